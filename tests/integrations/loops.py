"""transformers' and accelerate's own loops, in one process and on ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar import integrations
from autopar.lift_to_float64 import LiftFloat32

VOCABULARY, TOKENS = 64, 12
Sizes = Mapping[str, int]


def llama(dtype: torch.dtype = torch.float64, **config: Any) -> LlamaForCausalLM:
    """Two layers, seeded."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes | config)).to(dtype)


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Texts of which some labels do not count, in each another number."""
    generator, found = torch.Generator().manual_seed(seed), []
    for i in range(count):
        ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
        found.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(TOKENS) < i % 5, -100)})
    return found


@contextlib.contextmanager
def as_started() -> Iterator[None]:
    """A process as torchrun starts it, for accelerate, which reads the environment and keeps what it has read."""
    before = dict(os.environ)
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="true")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        GradientState._reset_state()


def arguments(folder: str, parts: int, **changes: Any) -> transformers.TrainingArguments:
    """A batch of 8, accumulated twice, with clipping, decay, logs, evaluations and checkpoints."""
    chosen = {
        "per_device_train_batch_size": 8 // parts, "per_device_eval_batch_size": 4 // parts,
        "gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 1, "learning_rate": 0.01,
        "weight_decay": 0.1, "max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2,
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "include_num_input_tokens_seen": "all",
    }  # fmt: skip
    return transformers.TrainingArguments(folder, **chosen | changes)


def metrics(predicted: Any) -> dict[str, float]:
    """Of the rows that there are, in their order."""
    places = 1 + torch.arange(len(predicted.predictions), dtype=torch.float64)[:, None, None]
    weighted = places * torch.as_tensor(predicted.predictions).double()
    return {"rows": float(len(places)), "weighted": float(weighted.sum()), "labels": float(predicted.label_ids.sum())}


def trained(
    sizes: Sizes | None,
    folder: str,
    model: Any = None,
    options: Mapping[str, Any] | None = None,
    resume: str | None = None,
    cls: Any = None,
    exact: bool = True,
    given: Mapping[str, Any] | None = None,
    **changes: Any,
) -> list[dict[str, float]]:
    """What a trainer logs; on a mesh, or in one process without one."""
    with as_started(), LiftFloat32() if exact else contextlib.nullcontext():
        mesh = autopar.init_mesh("cpu", **sizes) if sizes is not None else None
        parts = autopar.dp_rank_and_size(mesh)[1] if mesh is not None else 1
        how: dict[str, Any] = {
            "model": llama() if model is None else model(),
            "args": arguments(folder, parts, **changes),
            "train_dataset": rows(80, 1),
            "eval_dataset": rows(10, 2),  # the last of three batches has two rows
            "compute_metrics": metrics,
        } | dict(given or {})
        if mesh is None:
            trainer = (cls or transformers.Trainer)(**how)
        else:
            trainer = (cls or integrations.Trainer)(
                **how, mesh=mesh, options={"lift_to_float64": exact, **(options or {})}
            )
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state.log_history


def differences(found: list[dict[str, float]], expected: list[dict[str, float]]) -> dict[str, float]:
    """The largest one of each thing that both logs have, but for times."""
    assert [log.keys() for log in found] == [log.keys() for log in expected]
    worst: dict[str, float] = {}
    for a, b in zip(found, expected, strict=True):
        for name in a:
            if "runtime" not in name and "per_second" not in name and "preparation_time" not in name:
                worst[name] = max(worst.get(name, 0.0), abs(a[name] - b[name]))
    return worst
