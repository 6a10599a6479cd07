"""Models that many tests share: each captured once per process, with one batch and what one process gets of it.

subject("llama")                a tiny model of transformers
subject("one-layer llama")      the same with one layer (of each kind), where two say no more
subject("packed llama")         one of `SPECIAL`: plain modules, other batches, other sizes
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autopar.capture.front_end import as_captured
from autopar.ir.graph import copy_graph
from autopar.models.tiny import TINY
from autopar.runtime.module.parallel_module import step_seed
from autopar.testing.reference import Expected, eager
from tests.hf.own_experts import own
from tests.support.capture_cache import captured_once
from tests.support.subject_models import IGNORED, Cnn, Mlp, TwoLosses

ROWS, TOKENS = 8, 16
LONG_ROWS, LONG = 3, 256
SEED = step_seed(0, 1)  # of the first step: of dropout

Made = tuple[nn.Module, dict[str, Tensor]]


@dataclass(frozen=True)
class Subject:
    """A model in float64, its whole batch, its graph, and what one process gets."""

    model: nn.Module
    batch: dict[str, Tensor]
    captured: GraphModule
    expected: Expected

    def graph(self) -> GraphModule:
        """A copy: compiling changes it."""
        return copy_graph(self.captured)


@functools.cache
def subject(name: str) -> Subject:
    """A model by its name; see the head of this file."""
    model, batch = make(name)
    given = as_captured(model, batch, STATIC_INPUTS.get(name, ()))
    return Subject(model, batch, captured_once(model, given, lift_to_float64=True), eager(model, batch, SEED))


def make(name: str) -> Made:
    """A new model, and its batch."""
    if name in SPECIAL:
        return SPECIAL[name]()
    kind = name.removeprefix("one-layer ")
    return tiny(kind, layers=0 if kind == name else 1)


def tiny(name: str, layers: int = 0, dropout: float = 0.0, **sizes: Any) -> Made:
    """A tiny model, with other sizes where given."""
    entry = TINY[name]
    counts = {k: layers for k in entry.sizes if layers and ("layers" in k or k == "n_layer")}
    entry = dataclasses.replace(entry, sizes=entry.sizes | counts | sizes)
    return entry.build(dropout=dropout), entry.batch(ROWS, TOKENS)


def _mlp() -> Made:
    torch.manual_seed(0)
    return Mlp().double(), {"x": torch.randn(ROWS, 12).double(), "target": torch.randn(ROWS, 8).double()}


def _cnn() -> Made:
    torch.manual_seed(0)
    labels = torch.randint(0, 8, (ROWS,)).masked_fill(torch.arange(ROWS) % 3 == 1, IGNORED)
    return Cnn().double(), {"images": torch.randn(ROWS, 3, 8, 8).double(), "labels": labels}


def _packed() -> Made:
    """Two or three documents per row; nothing but the last tokens has a label, so some ranks have none."""
    model, batch = tiny("llama", layers=1)
    lengths = [(16,), (5, 11), (9, 4, 3), (8, 8)] * 2
    batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    batch["labels"][:, :12] = IGNORED
    return model, batch


def _padded(made: Made) -> Made:
    """Rows without padding, with padding on the right, and on the left."""
    model, batch = made
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[1, 11:], mask[2, :3], mask[3, :9], mask[6, 2:] = 0, 0, 0, 0
    return model, batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, IGNORED)}


def _frozen(made: Made) -> Made:
    """The embedding is frozen."""
    made[0].get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
    return made


def _two_losses() -> Made:
    torch.manual_seed(0)
    ids = torch.randint(0, 16, (ROWS, TOKENS))
    labels = ids.roll(-1, 1).masked_fill(torch.rand(ROWS, TOKENS) < 0.3, IGNORED)
    return TwoLosses().double(), {"ids": ids, "labels": labels, "target": torch.rand(ROWS, TOKENS, 4).double()}


STATIC_INPUTS: dict[str, tuple[str, ...]] = {}  # subject -> inputs whose values decide its graph
SPECIAL: dict[str, Callable[[], Made]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "two losses": _two_losses,
    "long llama": lambda: (tiny("llama")[0], TINY["llama"].batch(LONG_ROWS, LONG)),
    "packed llama": _packed,
    "padded llama": lambda: _padded(tiny("llama")),
    "multi-query tied llama": lambda: tiny("llama_tied", layers=1, num_key_value_heads=1),
    "frozen qwen3_moe": lambda: _frozen(tiny("qwen3_moe", layers=1)),
    "deep mixtral": lambda: tiny("mixtral", layers=4),  # experts on every rank of a pipeline
    "jetmoe": lambda: own("jetmoe"),
    "switch transformers": lambda: own("switch transformers"),
    "gpt2 with dropout": lambda: tiny("gpt2", layers=1, dropout=0.1),
    "padded bert with dropout": lambda: _padded(tiny("bert", layers=1, dropout=0.1)),
}
