"""Steps of ours with Inductor beside those of torch.compile, in turns in one process: at most as long, and with at most
as much memory."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

import autopar
from tests.gpu_check.processes import Check, Machine
from tests.gpu_check.rows import FAILED, NOT_APPLICABLE, OK, Row

ROUNDS, WARMUP = 10, 3
SMALL = 64  # width on a CPU, where the check itself is tested


@dataclass(frozen=True)
class Peer:
    """A class of transformers, its config, and the tokens of a batch. ``small``: sizes on a CPU."""

    model: str
    config: str
    sizes: dict[str, Any]
    batch: tuple[int, int]
    small: dict[str, Any] = field(default_factory=dict)

    def made(self, machine: Machine) -> tuple[torch.nn.Module, dict[str, Tensor]]:
        """The model and a batch, on the device."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**(self.sizes if machine.is_gpu else self.sizes | self.small))
        rows, length = self.batch if machine.is_gpu else (2, 16)
        with torch.device(machine.device):
            model = getattr(transformers, self.model)(config).to(torch.bfloat16 if machine.is_gpu else torch.float32)
            ids = torch.randint(config.vocab_size - 10, (rows, length))
            if self.model.startswith("Whisper"):
                frames = torch.randn(rows, config.num_mel_bins, 2 * config.max_source_positions, dtype=model.dtype)
                return model, {"input_features": frames, "labels": ids}
        return model, {"input_ids": ids, "labels": ids}


_LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
_FEW = {"hidden_size": SMALL, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 101, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
PEERS = {
    "llama": Peer(
        "LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "num_key_value_heads": 32, "vocab_size": 32000}, (4, 2048), _FEW
    ),
    "llama, 128,256 tokens": Peer(
        "LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "num_key_value_heads": 8, "vocab_size": 128256}, (2, 4096), _FEW
    ),
    "qwen3_moe": Peer(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 768, "num_hidden_layers": 8,
            "num_attention_heads": 16, "num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4,
            "vocab_size": 32000,
        },
        (4, 2048),
        {**_FEW, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2": Peer(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257},
        (16, 1024),
        {"n_embd": SMALL, "n_layer": 1, "n_head": 4, "vocab_size": 101},
    ),
    "gemma2": Peer(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024, "vocab_size": 256000,
        },
        (4, 2048),
        {**_FEW, "sliding_window": 8},
    ),
    "whisper": Peer(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
            "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "vocab_size": 51865,
        },
        (8, 256),
        {
            "d_model": SMALL, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 101,
            "max_source_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "decoder_start_token_id": 3,
        },
    ),
}  # fmt: skip


def peer_checks(machine: Machine) -> list[Check]:
    """A process for each model; where only seconds are to be spent, one model."""
    names = ["llama"] if machine.quick else list(PEERS)
    return [Check("speed", f"{name} beside torch.compile", functools.partial(beside, name), 1, 600.0) for name in names]


def beside(name: str, machine: Machine) -> Iterator[Row]:
    """Time and memory of a step, over torch.compile's."""
    warnings.filterwarnings("ignore")
    steps = {"ours": _ours(name, machine), "torch.compile": _compiled(name, machine)}
    losses = [float(step()) for step in steps.values()]
    assert all(loss == loss and abs(loss) < 1e4 for loss in losses), losses
    times, peaks = in_turns(steps, machine)
    yield _ratio(f"{name}: time of a step", times, 1e3, "ms", machine)
    if machine.is_gpu:
        yield _ratio(f"{name}: memory of a step", peaks, 2**-30, "GiB", machine)


def _ours(name: str, machine: Machine) -> Callable[[], Tensor]:
    model, batch = PEERS[name].made(machine)
    mesh = autopar.init_mesh(machine.device, dp=1)
    parallel: Any = autopar.parallelize(model, mesh, backend="inductor", example_batch=batch)

    def step() -> Tensor:
        parallel.zero_grad(set_to_none=True)
        loss: Tensor = parallel.train_step(**batch)
        return loss.detach()

    return step


def _compiled(name: str, machine: Machine) -> Callable[[], Tensor]:
    model, batch = PEERS[name].made(machine)
    run: Any = torch.compile(model)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = run(**batch).loss
        loss.backward()
        return loss.detach()

    return step


def in_turns(steps: dict[str, Callable[[], Tensor]], machine: Machine) -> tuple[dict[str, float], dict[str, float]]:
    """The fastest step of each, in seconds, and the most bytes that it added to what lay there before it."""
    times, peaks = dict.fromkeys(steps, float("inf")), dict.fromkeys(steps, 0.0)
    for i in range(WARMUP + ROUNDS):
        for name, step in steps.items():
            before = 0
            if machine.is_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            step()
            if machine.is_gpu:
                torch.cuda.synchronize()
            if i >= WARMUP:
                times[name] = min(times[name], time.perf_counter() - start)
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() - before if machine.is_gpu else 0.0)
    return times, peaks


def _ratio(what: str, found: dict[str, float], scale: float, unit: str, machine: Machine) -> Row:
    """Above 1 it is wrong; without a GPU it means nothing."""
    ratio = found["ours"] / found["torch.compile"]
    verdict = NOT_APPLICABLE if not machine.is_gpu else OK if ratio <= 1.0 else FAILED
    words = ", ".join(f"{name} {x * scale:.4g} {unit}" for name, x in found.items())
    return Row(what, "at most 1", verdict, ratio, "of torch.compile's", words)
