"""What a forward keeps for its backward, and the time of a step, with Inductor on one process: autopar by default,
autopar keeping everything, and torch.compile.

Bytes are those of the storages that the compiled forward hands to the compiled backward, in bfloat16; times are of
steps in float32, in turns, as multiples of torch.compile's.

    python tests/benchmarks/bench_saved.py [--only llama] [--rounds 5]
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from common import Step, interleaved, publish
from torch import Tensor, nn

import autopar
from autopar.models.tiny import TINY
from autopar.runtime.exec.executor import Executor
from tests.support.ranks import run_ranks

_WIDE = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 2048}
_HEADS = {"head_dim": 64}
SIZES: dict[str, dict[str, Any]] = {
    "llama": _WIDE,
    "gpt2": {"n_embd": 256, "n_inner": 1024, "vocab_size": 2048},
    "qwen3_moe": {**_WIDE, **_HEADS, "moe_intermediate_size": 256},
    "gemma2": {**_WIDE, **_HEADS},
    "t5": {"d_model": 256, "d_ff": 704, "d_kv": 64, "vocab_size": 2048},
    "whisper": {
        "d_model": 256, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024, "vocab_size": 2048,
    },
}  # fmt: skip
Made = tuple[nn.Module, dict[str, Tensor]]


def made(name: str, dtype: torch.dtype) -> Made:
    """A model of two layers, 256 wide, and a batch."""
    entry = dataclasses.replace(TINY[name], sizes=TINY[name].sizes | SIZES[name])
    return entry.build(dtype=dtype), entry.batch(8, 64, dtype=dtype)


def storages(values: Iterable[Any]) -> dict[int, int]:
    """Bytes by address."""
    tensors = (x for x in values if isinstance(x, Tensor))
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


def ours(model: nn.Module, batch: Mapping[str, Tensor], backend: str = "inductor", **options: Any) -> Any:
    """The model on a mesh of one rank."""
    mesh = autopar.init_mesh("cpu", 60.0, dp=1)
    return autopar.parallelize(model, mesh, backend=backend, example_batch=batch, **options)


def kept_by(parallel: Any, batch: Mapping[str, Tensor]) -> int:
    """Bytes that a forward of ours keeps for its backward."""
    found: dict[int, int] = {}

    def seen(self: Executor, *args: Any) -> Any:
        result = forward(self, *args)
        found.update(storages(x for _, x in result[1].saved))
        return result

    forward = Executor.run_forward
    with patch.object(Executor, "run_forward", seen):
        parallel(**batch)
    return sum(found.values())


def kept_by_autograd(run: Callable[..., Any], model: nn.Module, batch: Mapping[str, Tensor]) -> int:
    """Bytes that autograd keeps for the backward of a model that ``run`` calls, without weights and the batch."""
    own = storages([*model.parameters(), *model.buffers(), *batch.values()])
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        found.update(storages([x]))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run(**batch)
    return sum(size for where, size in found.items() if where not in own)


def bytes_of(name: str) -> list[int]:
    """Bytes kept by autopar, by autopar that recomputes nothing, and by torch.compile."""
    model, batch = made(name, torch.bfloat16)
    mine = [kept_by(ours(model, batch, **how), batch) for how in ({}, {"activation_checkpoint": "none"})]
    return [*mine, kept_by_autograd(torch.compile(model.forward), model, batch)]


def steps_of(name: str) -> dict[str, Step]:
    """Steps of the same."""
    model, batch = made(name, torch.float32)
    mine, whole = ours(model, batch), ours(model, batch, activation_checkpoint="none")
    compiled = torch.compile(made(name, torch.float32)[0].forward)

    def theirs() -> Tensor:
        loss: Tensor = compiled(**batch).loss
        loss.backward()
        return loss.detach()

    steps: dict[str, Step] = {
        "default": lambda: mine.train_step(**batch),
        "none": lambda: whole.train_step(**batch),
        "torch.compile": theirs,
    }
    losses = [float(step()) for step in steps.values()]
    assert max(losses) - min(losses) < 1e-4, losses
    return steps


def row(name: str, rounds: int) -> str:
    """On the one rank."""
    kept, times = bytes_of(name), interleaved(steps_of(name), rounds)
    best = {way: min(found.wall) for way, found in times.items()}
    sizes = " | ".join(f"{size / 1e6:.2f}" for size in kept)
    shares = " | ".join(f"{best[way] / best['torch.compile']:.2f}" for way in ("default", "none"))
    return f"| {name} | {sizes} | {kept[0] / kept[2]:.2f} | {shares} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    rows = [run_ranks(1, row, name, args.rounds, timeout=1800.0)[0] for name in SIZES if args.only in ("", name)]
    head = (
        "| model | kept, MB | keeping everything | torch.compile | kept, of its | time, of its | keeping everything |"
    )
    text = "\n".join([head, "|---|---|---|---|---|---|---|", *rows])
    print(text) if args.only else publish("saved bytes", text)


if __name__ == "__main__":
    main()
