"""Results of one process, and their comparison with a step on a mesh, for all tests of models.

expected = eager(model, batch)
found = compare_step(loss, gradients, expected, compiled.parameters, cut)
assert found.worst < 1e-10, found
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopar.api import load_adapters
from autopar.capture.front_end import adapter_for
from autopar.ir.signature import ParameterSpec
from autopar.lift_to_float64 import LiftFloat32
from autopar.ops.random_recipes import shared_random

LIMIT = 1e-10  # of the loss and of every gradient, in float64


class Expected(NamedTuple):
    """Loss and gradients (None for a parameter without) of a step of one process; buffers: these and the frozen
    parameters after it, since a forward may write to both."""

    loss: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def total_loss(output: Any) -> Tensor:
    """The loss in the output of a model, or the sum of all scalars with a gradient."""
    output = output["loss"] if isinstance(output, Mapping) and "loss" in output else output
    leaves = [output] if isinstance(output, Tensor) else output.values() if isinstance(output, Mapping) else output
    losses = [x for x in leaves if isinstance(x, Tensor) and not x.dim() and x.requires_grad]
    assert losses, "the model returns no loss"
    return torch.stack(losses).sum()


def eager(model: nn.Module, batch: Mapping[str, Any], seed: int | None = None) -> Expected:
    """Run one process with float32 islands in float64; what a forward may write, buffers and parameters, is restored.
    ``seed``: of the step whose dropout masks to use."""
    state = dict(model.named_buffers()) | dict(model.named_parameters())
    before = {n: x.detach().clone() for n, x in state.items()}
    model.zero_grad()
    masks = contextlib.nullcontext() if seed is None else shared_random(seed)
    load_adapters(model)
    adapter = adapter_for(model)
    arguments = batch if adapter is None else adapter.arguments(model, batch)
    with LiftFloat32(), contextlib.nullcontext() if adapter is None else adapter.reference(model), masks:
        loss = total_loss(model(**arguments))
        loss.backward()
    after = dict(model.named_buffers()) | dict(model.named_parameters())
    after = {n: x.detach().clone() for n, x in after.items()}
    with torch.no_grad():
        for name, value in before.items():
            path, _, key = name.rpartition(".")
            getattr(model.get_submodule(path), key).copy_(value)
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return Expected(float(loss.detach()), gradients, after)


@dataclass(frozen=True)
class Errors:
    """Errors of the step of one rank against one process: largest differences (infinite for nan or another shape), and
    parameters with a gradient on one side only."""

    loss: float
    gradients: dict[str, float]
    odd: list[str]

    @property
    def worst(self) -> float:
        return math.inf if self.odd else max(self.loss, *self.gradients.values(), 0.0)

    def __str__(self) -> str:
        bad = {n: e for n, e in self.gradients.items() if not e < LIMIT}
        return f"the loss is off by {self.loss:.1e}, one side alone has {self.odd}, gradients are off by {bad}"


def compare_step(
    loss: float,
    found: Mapping[str, Tensor | None],
    expected: Expected,
    parameters: Iterable[ParameterSpec],
    cut: Callable[[ParameterSpec, Tensor], Tensor],
    held: Collection[str] | None = None,
) -> Errors:
    """Compare the step of one rank with one process.

    Args:
        found: the rank's piece of each gradient, by the name of its parameter.
        cut: the rank's piece of a whole gradient.
        held: names of the parameters that the rank has; all of them, if left out.

    A gradient of zeros equals a missing one.
    """
    errors: dict[str, float] = {}
    odd, seen = set(), set[str]()
    for spec in (p for p in parameters if p.name in found):
        names, piece = {spec.name, *spec.aliases}, found[spec.name]
        whole = next((g for n in sorted(names) if (g := expected.gradients.get(n)) is not None), None)
        seen |= names
        if piece is not None:
            right = cut(spec, torch.zeros(spec.shape, dtype=piece.dtype) if whole is None else whole)
            errors |= dict.fromkeys(names, difference(piece, right))
        elif whole is not None:
            odd |= names
    odd |= {n for n, g in expected.gradients.items() if g is not None and (held is None or n in held)} - seen
    odd |= set(found) - seen
    return Errors(difference(_number(loss), _number(expected.loss)), errors, sorted(odd))


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest error."""
    if found.shape != expected.shape:
        return math.inf
    return float((found.detach() - expected).abs().nan_to_num(math.inf).max()) if found.numel() else 0.0


def _number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)
