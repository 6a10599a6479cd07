"""One capture for planning and for the first step: a model is traced once for a batch of the same shapes.

shared = SharedCapture()
shared.first(model, batch, lift_to_float64=lift)     traces, and keeps a copy
shared.again(model, batch, lift_to_float64=lift)     the copy, if it is of the same batch and surroundings; else traces
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from autopar.adapters.dispatch import modes_around
from autopar.capture.front_end import capture
from autopar.ir.batch import facts_of
from autopar.ir.graph import copy_graph
from autopar.precision import Precision


class SharedCapture:
    """Keeps one graph until it is asked for again, or forgotten. Whether the modules are still as they were is for the
    caller to know."""

    def __init__(self) -> None:
        self._facts: tuple[Any, ...] = ()
        self._graph: GraphModule | None = None

    def first(self, model: nn.Module, batch: Mapping[str, Any], **how: Any) -> GraphModule:
        """As `autopar.capture.front_end.capture`, whose result is kept, unless the forward has filled a memo: in torch
        it is the first step that does, with what it then finds."""
        gm = capture(model, batch, **how, trial=True)
        if not gm.meta.get("kept"):  # absent where none was
            self._facts, self._graph = _seen(batch, **how), copy_graph(gm)
        return gm

    def again(self, model: nn.Module, batch: Mapping[str, Any], **how: Any) -> GraphModule:
        """What is kept, or a new capture; nothing is kept any more."""
        kept, facts = self._graph, self._facts
        self.forget()
        return kept if kept is not None and facts == _seen(batch, **how) else capture(model, batch, **how)

    def forget(self) -> None:
        """Free what is kept."""
        self._facts, self._graph = (), None


def _seen(
    batch: Mapping[str, Any],
    train: bool | None = None,
    lift_to_float64: bool = False,
    autocast: torch.dtype | None = None,
    precision: Precision | None = None,
    grad_mode: str = "grad",
) -> tuple[Any, ...]:
    """What a capture sees beside the modules. Of modes around it nothing is known: no two such captures are alike."""
    return (
        facts_of(batch),
        train,
        lift_to_float64,
        autocast,
        precision or Precision(),
        grad_mode,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
        object() if modes_around() else None,
    )
