"""What the benchmarks share: the model, interleaved timing, and the generated parts of docs/benchmarks.md."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

DOCS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
Step = Callable[[], Any]


@dataclass(frozen=True)
class Workload:
    """A seeded float32 Llama of transformers (20.4M parameters), and a batch for it in which every label counts."""

    hidden: int = 384
    layers: int = 8
    inner: int = 1024
    heads: int = 6
    vocab: int = 8192
    batch: int = 4
    length: int = 512

    def model(self) -> nn.Module:
        """A new model; the same weights each time."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.inner, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.heads, max_position_embeddings=self.length,
            tie_word_embeddings=False, use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        model: nn.Module = LlamaForCausalLM(config)
        model.train()
        return model

    def tokens(self) -> dict[str, Tensor]:
        """Keyword arguments of the forward, with labels."""
        seeded = torch.Generator().manual_seed(1)
        ids = torch.randint(0, self.vocab, (self.batch, self.length), generator=seeded)
        return {"input_ids": ids, "labels": ids.clone()}


SMALL = Workload(hidden=96, layers=2, inner=256, heads=6, vocab=512, length=64)  # to try the harness itself


@dataclass
class Times:
    """Seconds per round of one step: by the clock, and of the processor (all threads). With ranks, of the slowest."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def interleaved(steps: Mapping[str, Step], rounds: int, warmup: int = 1) -> dict[str, Times]:
    """Times of each step, ``rounds`` times, in turn: a slow moment of the machine meets all of them.

    With ranks: a barrier before each.
    """
    times = {name: Times() for name in steps}
    for i in range(warmup + rounds):
        for name, step in steps.items():
            if dist.is_initialized():
                dist.barrier()
            start, processor = time.perf_counter(), time.process_time()
            step()
            seconds = time.perf_counter() - start, time.process_time() - processor
            if i >= warmup:
                times[name].wall.append(slowest(seconds[0]))
                times[name].cpu.append(slowest(seconds[1]))
    return times


def slowest(seconds: float) -> float:
    """The maximum over the ranks."""
    if not dist.is_initialized():
        return seconds
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def ratio(times: Times, reference: Times) -> tuple[float, float, float]:
    """(min over min, median over rounds of the ratio within a round, min over min of processor time)."""
    median = statistics.median(a / b for a, b in zip(times.wall, reference.wall, strict=True))
    return min(times.wall) / min(reference.wall), median, min(times.cpu) / min(reference.cpu)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def load() -> str:
    """The load average of the last minute, and the number of cores."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def publish(section: str, text: str) -> None:
    """Print a result and put it between its marks in docs/benchmarks.md."""
    print(text, flush=True)
    begin, end = f"<!-- {section}: begin, written by tests/benchmarks -->", f"<!-- {section}: end -->"
    page = DOCS.read_text(encoding="utf-8")
    found = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not found.search(page):
        raise ValueError(f"benchmarks: {DOCS.name} has no section {section!r}; restore the line {begin}")
    DOCS.write_text(found.sub(lambda _: f"{begin}\n{text.strip()}\n{end}", page), encoding="utf-8")
