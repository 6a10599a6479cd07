"""One capture for planning and for the first step: a model is traced once for a batch of the same shapes.

shared = SharedCapture()
shared.first(model, batch, lift_to_float64=lift)     traces, and keeps a copy
shared.again(model, batch, lift_to_float64=lift)     the copy, if batch and surroundings are the same; else traces
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from autopar.adapters.dispatch import modes_around
from autopar.capture.branches.buffer_values import has_bytes
from autopar.capture.front_end import capture
from autopar.ir.batch import facts_of
from autopar.ir.graph import copy_graph
from autopar.precision import Precision


class SharedCapture:
    """Keeps one graph until it is used or forgotten. The caller must know whether the modules have changed since."""

    def __init__(self) -> None:
        self._facts: tuple[Any, ...] = ()
        self._graph: GraphModule | None = None

    def first(self, model: nn.Module, batch: Mapping[str, Any], **how: Any) -> GraphModule:
        """`autopar.capture.front_end.capture`, whose result is kept, unless the forward has filled a memo: in torch the
        first step would fill it, with the values of that time."""
        gm = capture(model, batch, **how, trial=True)
        if not gm.meta.get("kept"):  # absent where none was
            self._facts, self._graph = _seen(batch, **how), copy_graph(gm)
        return gm

    def again(self, model: nn.Module, batch: Mapping[str, Any], **how: Any) -> GraphModule:
        """The kept graph, or a new capture; nothing is kept afterwards."""
        kept, facts = self._graph, self._facts
        self.forget()
        if kept is not None and facts == _seen(batch, **how):
            held = dict(model.named_buffers(remove_duplicate=False))
            if all(has_bytes(held.get(name), text) for name, text in _values_read(kept)):
                return kept
        return capture(model, batch, **how)

    def forget(self) -> None:
        """Free the kept graph."""
        self._facts, self._graph = (), None


def _values_read(gm: GraphModule) -> tuple[tuple[str, str], ...]:
    """`Signature.values` of a graph that has a signature."""
    signature = gm.meta.get("signature")
    return signature.values if signature is not None else ()


def _seen(
    batch: Mapping[str, Any],
    train: bool | None = None,
    lift_to_float64: bool = False,
    autocast: torch.dtype | None = None,
    precision: Precision | None = None,
    grad_mode: str = "grad",
) -> tuple[Any, ...]:
    """What a capture depends on besides the modules. Within unknown modes, no two captures are equal."""
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
