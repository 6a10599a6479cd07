"""Small models of other libraries, and plain modules as others write them: what each is made of and how it is checked.

    MODELS["timm swin"].make() -> model, batch          float64, seeded; the forward returns the loss (first)

``needs`` names the library that must be there. ``tokens``: its sequence can be sharded on cp; ``experts``:
its experts on ep.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 4
Made = tuple[nn.Module, dict[str, Any]]


@dataclass(frozen=True)
class Outside:
    """A model of others. ``group`` is where the table puts it; ``static_inputs``: those whose values decide a graph."""

    name: str
    group: str
    build: Callable[[], Made]
    needs: str = ""
    tokens: bool = False
    static_inputs: tuple[str, ...] = ()
    experts: bool = False

    def make(self) -> Made:
        """A fresh model in train mode, and its whole batch."""
        if self.needs:
            library(self.needs)
        torch.manual_seed(0)
        model, batch = self.build()
        model = nn.Module.double(model).train()
        moved = (p for p in model.parameters() if p.dim() == 1)
        with torch.no_grad():
            for parameter in moved:  # off their zeros and ones, so that a mistake about them shows
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        return model, batch


MODELS: dict[str, Outside] = {}


def entry(
    group: str,
    name: str,
    needs: str = "",
    tokens: bool = False,
    static_inputs: tuple[str, ...] = (),
    experts: bool = False,
) -> Callable[[Callable[[], Made]], Any]:
    """Enter a builder."""

    def put(build: Callable[[], Made]) -> Callable[[], Made]:
        full = f"{group} {name}"
        assert full not in MODELS, full
        MODELS[full] = Outside(full, group, build, needs, tokens, static_inputs, experts)
        return build

    return put


def library(name: str) -> Any:
    """Import a library."""
    return importlib.import_module(name)


class Classifier(nn.Module):
    """A model of images with its loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out = self.body(x)
        out = out[0] if isinstance(out, tuple) else out
        return F.cross_entropy(out, labels)


class Regressor(nn.Module):
    """A model with several inputs whose result has a target; ``pick`` takes the result out of what it returns."""

    def __init__(self, body: nn.Module, pick: Callable[[Any], Tensor] = lambda out: out, **fixed: Any) -> None:
        super().__init__()
        self.body, self.pick, self.fixed = body, pick, fixed

    def forward(self, target: Tensor, **inputs: Any) -> Tensor:
        return F.mse_loss(self.pick(self.body(**inputs, **self.fixed)), target)


class Language(nn.Module):
    """Logits of tokens with their loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.body(ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(*shape: int, count: int = 8, seed: int = 1) -> Tensor:
    """Integers below ``count``."""
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


def pictures(size: int = 32, channels: int = 3, rows: int = ROWS) -> dict[str, Tensor]:
    return {"x": draw(rows, channels, size, size), "labels": classes(rows)}


def text(length: int = 16, vocabulary: int = 64, rows: int = ROWS) -> dict[str, Tensor]:
    """Tokens, and labels of which each row ignores another number."""
    ids = classes(rows, length, count=vocabulary)
    ignored = torch.arange(length) < torch.arange(rows).unsqueeze(1)
    return {"ids": ids, "labels": ids.roll(-1, 1).masked_fill(ignored, -100)}
