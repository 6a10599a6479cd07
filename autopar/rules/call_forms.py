"""Calls whose tensors are left open, and draws that fill them: what operators without a rule are tried with.

Draws of floats are normal numbers, positive ones, few distinct ones, rows of very different size, positive definite
matrices; of integers small ones, those that may be indices, ascending ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from autopar.adapters.operators import OpOverload
from autopar.capture.trace.export import flatten
from autopar.ir.graph import has_gradient, tensor_operands
from autopar.rules.derived import Place

Shape = tuple[int, ...]
Rows = list[int]
WIDE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
WIDE |= {torch.complex64: torch.complex128}


class NoTrial(Exception):
    """The operator refuses these operands, or answers with what is no number."""


@dataclass(frozen=True)
class Slot:
    """Stands for the i-th tensor among the arguments of a call."""

    i: int


@dataclass(frozen=True)
class CallForm:
    """A call: the operator, its arguments with a `Slot` for each tensor, and of the tensors shape, dtype, and whether
    their gradient is wanted. ``used``: which of its results somebody uses."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    wanted: tuple[bool, ...]

    @classmethod
    def of(cls, node: Node) -> CallForm:
        """Of a node; operands that stand twice are two."""
        operands = tensor_operands(node)
        left = iter(range(len(operands)))

        def open_(x: Any) -> Any:
            return Slot(next(left)) if isinstance(x, Node) else x

        args, kwargs = map_aggregate(node.args, open_), map_aggregate(node.kwargs, open_)
        values = [x.meta["val"] for x in operands]
        assert isinstance(node.target, OpOverload)
        return cls(
            node.target, args, dict(kwargs), tuple(tuple(v.shape) for v in values), tuple(v.dtype for v in values),
            tuple(has_gradient(x) for x in operands),
        )  # fmt: skip

    def wide(self) -> CallForm:
        """In double precision."""
        return replace(self, dtypes=tuple(WIDE.get(t, t) for t in self.dtypes))

    def resized(self, places: Sequence[Place], size: int) -> CallForm:
        """With another size of the dims at ``places``, one of each operand or none."""
        changed = tuple(
            s if d is None else (*s[:d], size, *s[d + 1 :]) for s, d in zip(self.shapes, places, strict=True)
        )
        return replace(self, shapes=changed)

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def numbers(self) -> list[int]:
        """The whole numbers among the arguments."""
        found = [x for x in flatten((self.args, self.kwargs))[0] if isinstance(x, int) and not isinstance(x, bool)]
        return [abs(x) for x in found]

    def run(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The results, flat. Raises NoTrial."""
        args, kwargs = map_aggregate((self.args, self.kwargs), lambda x: tensors[x.i] if isinstance(x, Slot) else x)
        try:
            return list(flatten(self.target(*args, **kwargs))[0])
        except Exception as error:
            raise NoTrial(str(error)) from error


def shapes_made(form: CallForm, mode: Any) -> list[Shape] | None:
    """Shapes of the results, as the operator tells in a mode of fake tensors; None where it refuses these operands."""
    with mode:
        tensors = [torch.empty(s, dtype=t, device="cpu") for s, t in zip(form.shapes, form.dtypes, strict=True)]
        try:
            made = form.run(tensors)
        except NoTrial:
            return None
    return [tuple(map(int, r.shape)) for r in made] if all(isinstance(r, Tensor) for r in made) else None


# --- what the tensors hold ----------------------------------------------------------------------------------

Fill = Callable[[Shape, torch.dtype, torch.Generator], Tensor]


def _normal(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=dtype, device="cpu")


def _unit(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    return (torch.rand(shape, generator=g, dtype=torch.float64, device="cpu") * 0.9 + 0.05).to(dtype)


def _large(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    return (torch.rand(shape, generator=g, dtype=torch.float64, device="cpu") * 4 + 1.01).to(dtype)


def _coarse(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, shape, generator=g, device="cpu").to(dtype)


def _uneven(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """The rows of each dim are of very different size."""
    x = _normal(shape, dtype, g)
    for d, n in enumerate(shape):
        scale = 10.0 ** torch.randint(-6, 7, (n,), generator=g, device="cpu").to(torch.float64)
        x = x * scale.to(dtype).reshape([n if i == d else 1 for i in range(len(shape))])
    return x


def _definite(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    x = _normal(shape, dtype, g)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        return x
    return x @ x.mH + shape[-1] * torch.eye(shape[-1], dtype=dtype, device="cpu")


def _below(most: int, ascending: bool = False) -> Fill:
    def fill(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> Tensor:
        x = torch.randint(0, 2 if dtype == torch.bool else most, shape, generator=g, device="cpu")
        return (x.sort(-1).values if ascending and shape else x).to(dtype)

    return fill


@dataclass(frozen=True)
class Draw:
    """How operands are filled. ``floats`` and ``integers`` by kind of dtype."""

    floats: Fill
    integers: Fill
    seed: int

    def tensors(self, form: CallForm) -> list[Tensor]:
        """A draw for each operand of the form."""
        g = torch.Generator(device="cpu")
        g.manual_seed(self.seed)
        return [
            (self.floats if t.is_floating_point or t.is_complex else self.integers)(s, t, g)
            for s, t in zip(form.shapes, form.dtypes, strict=True)
        ]


def draws(form: CallForm) -> list[Draw]:
    """All that there are for operands of such dtypes."""
    sizes = sorted({n for shape in form.shapes for n in shape if n > 1} | {2, 100}, reverse=True)
    kinds = {t.is_floating_point or t.is_complex for t in form.dtypes}
    floats: list[Fill] = [_normal, _unit, _large, _coarse, _uneven, _definite] if True in kinds else [_normal] * 3
    integers = [_below(n, order) for n in sizes for order in (False, True)] if False in kinds else [_below(2)] * 2
    return [Draw(f, i, 17 * a + b) for a, f in enumerate(floats) for b, i in enumerate(integers)]
