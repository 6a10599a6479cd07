"""One trial on one draw: do the results of an operator on shards make up its result on the whole, gradients included?

A draw that the operator refuses, or that gives NaN, is inconclusive: `NoTrial`.
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
from autopar.capture.custom_autograd.opaque import opaque_function
from autopar.capture.trace.export import flatten
from autopar.ir.graph import has_gradient, tensor_operands
from autopar.rules.derived import CommonDim, Place

Rows = list[int]
NEAR = {torch.float64: 2e-12, torch.complex128: 2e-12, torch.float32: 4e-6, torch.complex64: 4e-6}  # others: equal


@dataclass(frozen=True)
class CallResult:
    """Results of a call, and the gradients of its operands for given gradients of the results."""

    results: list[Tensor]
    gradients: list[Tensor | None]


def call_result(form: CallForm, tensors: Sequence[Tensor], tangents: Sequence[Tensor] | None = None) -> CallResult:
    """The result of one call; without tangents the forward alone. Raises NoTrial."""
    asked = [tangents is not None and (t.is_floating_point() or t.is_complex()) for t in tensors]
    leaves = [x.detach().clone().requires_grad_(a) for x, a in zip(tensors, asked, strict=True)]
    made = form.run(leaves)
    if not all(isinstance(r, Tensor) for r in made):
        raise NoTrial("it returns something that is not a tensor")
    if not all(same_bits(x.detach(), y) for x, y in zip(leaves, tensors, strict=True)):
        raise NoTrial("it writes to its operands")
    pairs = [(r, t) for r, t in zip(made, tangents or (), strict=False) if r.requires_grad]
    return CallResult([r.detach().resolve_conj().resolve_neg() for r in made], _gradients(pairs, leaves, asked))


def _gradients(
    pairs: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor], asked: Sequence[bool]
) -> list[Tensor | None]:
    wanted = [x for x, a in zip(leaves, asked, strict=True) if a]
    if not pairs:
        return [None] * len(leaves)
    try:
        found = iter(torch.autograd.grad([r for r, _ in pairs], wanted, [t for _, t in pairs], allow_unused=True))
    except Exception as error:
        raise NoTrial(str(error)) from error
    return [next(found) if a else None for a in asked]


class Trial:
    """One draw: the whole call, to be compared with shards of ``dim``. Raises NoTrial where it is inconclusive.

    ``rough``: only detect errors that rounding does not explain; for a dtype of few bits whose wide twin was tried.
    """

    def __init__(self, form: CallForm, dim: CommonDim, draw: Draw, rough: bool = False) -> None:
        self.form, self.dim, self.rough = form, dim, rough
        self.tensors = draw.tensors(form)
        forward = call_result(form, self.tensors)
        if not all(map(_finite, forward.results)):
            raise NoTrial("it returns NaN")
        g = torch.Generator(device="cpu")
        g.manual_seed(draw.seed + 1)
        self.tangents: list[Tensor] | None = [
            torch.randn(r.shape, generator=g, dtype=r.dtype, device="cpu") if _is_float(r) else torch.zeros_like(r)
            for r in forward.results
        ]
        try:
            self.whole = call_result(form, self.tensors, self.tangents)
        except NoTrial:
            if any(form.wanted):
                raise
            self.whole, self.tangents = forward, None  # it has no derivative, and none is wanted
        if not all(g is None or _finite(g) for g in self.whole.gradients):
            raise NoTrial("its gradient is NaN")

    def holds(self, splits: Sequence[Sequence[Rows]]) -> bool:
        """Whether a second run gives the same, and so do shards, divided in each of these ways."""
        return self._repeats() and all(map(self._agrees, splits)) and (len(splits) == 1 or self._isolates(splits[0]))

    def _repeats(self) -> bool:
        """Whether a second run gives the same and advances no random generator."""
        before = torch.random.get_rng_state()
        again = call_result(self.form, self.tensors, self.tangents)
        still = torch.equal(before, torch.random.get_rng_state())
        return still and all(map(torch.equal, again.results, self.whole.results))

    def _agrees(self, split: Sequence[Rows]) -> bool:
        dim, whole = self.dim, self.whole
        sums: list[Tensor | None] = [None] * len(self.tensors)
        for rows in split:
            given = [_taken(x, p, rows) for x, p in zip(self.tensors, dim.operands, strict=True)]
            tangents = self.tangents and [_taken(t, p, rows) for t, p in zip(self.tangents, dim.results, strict=True)]
            try:
                piece = call_result(self.form, given, tangents)
            except NoTrial:
                return False
            for a, b, p in zip(piece.results, whole.results, dim.results, strict=True):
                if p is not None and not self._same(a, _taken(b, p, rows), p):
                    return False
            for i, (g, w, p) in enumerate(zip(piece.gradients, whole.gradients, dim.operands, strict=True)):
                if p is None:
                    sums[i] = _plus(sums[i], g)
                elif not self._same_gradient(g, None if w is None else _taken(w, p, rows), p):
                    return False
        pairs = zip(sums, whole.gradients, dim.operands, strict=True)
        return all(p is not None or self._same_gradient(s, w, None) for s, w, p in pairs)

    def _isolates(self, split: Sequence[Rows]) -> bool:
        """Whether a row of NaN leaves the others alone. An operator may refuse such a row."""
        spoiled = [_spoiled(x, p) for x, p in zip(self.tensors, self.dim.operands, strict=True)]
        try:
            whole = self.form.run(spoiled)
            for rows in split:
                piece = self.form.run([_taken(x, p, rows) for x, p in zip(spoiled, self.dim.operands, strict=True)])
                for a, b, p in zip(piece, whole, self.dim.results, strict=True):
                    if p is not None and not self._same(a, _taken(b, p, rows), p):
                        return False
        except NoTrial:
            return True
        return True

    def _same_gradient(self, found: Tensor | None, expected: Tensor | None, place: Place) -> bool:
        if found is None or expected is None:
            there = found if expected is None else expected
            return there is None or not bool(there.abs().sum())
        return self._same(found, expected, place)

    def _same(self, found: Tensor, expected: Tensor, place: Place) -> bool:
        """Equal up to rounding, which is judged by row."""
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return False
        if not _is_float(found):
            return torch.equal(found, expected)
        if not torch.equal(torch.isfinite(found), torch.isfinite(expected)):
            return False
        if not found.numel():
            return True
        a, b = (torch.where(torch.isfinite(x), x, 0) for x in (found, expected))
        largest = b.abs().amax([e for e in range(b.dim()) if e != place], keepdim=True) if b.dim() > 1 else b.abs()
        eps = torch.finfo(found.dtype).eps
        near = eps**0.5 if self.rough else NEAR.get(found.dtype, 0.0)
        return bool(((a - b).abs() <= near * (largest + 1e-2 * b.abs().max()) + torch.finfo(found.dtype).tiny).all())


def _taken(x: Tensor, place: Place, rows: Rows) -> Tensor:
    """Some rows of a tensor along a dim; all of it for None."""
    return x if place is None else x.index_select(place, torch.tensor(rows, device="cpu"))


def _spoiled(x: Tensor, place: Place) -> Tensor:
    made = x.clone()
    if place is not None and x.is_floating_point():
        made.select(place, 0).fill_(math.nan)
    return made


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _finite(x: Tensor) -> bool:
    return not _is_float(x) or bool(torch.isfinite(x).all())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal; NaN equals NaN."""
    if not _is_float(a):
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


# --- what a call is tried with -------------------------------------------------------------------------

Shape = tuple[int, ...]
WIDE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
WIDE |= {torch.complex64: torch.complex128}


class NoTrial(Exception):
    """The operator refuses these operands, or returns NaN."""


@dataclass(frozen=True)
class Slot:
    """Replaces the i-th tensor among the arguments of a call."""

    i: int


@dataclass(frozen=True)
class CallForm:
    """A call: the operator, its arguments with a `Slot` for each tensor, and the tensors' shapes, dtypes, and whether
    their gradient is wanted. ``used``: which of its results are used."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    wanted: tuple[bool, ...]

    @classmethod
    def of(cls, node: Node) -> CallForm:
        """The form of a node; an operand that is passed twice counts twice."""
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
        """The same in double precision."""
        return replace(self, dtypes=tuple(WIDE.get(t, t) for t in self.dtypes))

    def resized(self, places: Sequence[Place], size: int) -> CallForm:
        """The same with another size of the dims at ``places``, one of each operand or none."""
        changed = tuple(
            s if d is None else (*s[:d], size, *s[d + 1 :]) for s, d in zip(self.shapes, places, strict=True)
        )
        return replace(self, shapes=changed)

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def numbers(self) -> list[int]:
        """The integers among the arguments."""
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
    """Shapes of the results, from fake tensors; None where the operator refuses these operands."""
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
    """Values whose rows, along each dim, have very different magnitude."""
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
    """How operands are filled. ``floats`` and ``integers`` by dtype."""

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
    """All draws for operands of these dtypes."""
    sizes = sorted({n for shape in form.shapes for n in shape if n > 1} | {2, 100}, reverse=True)
    kinds = {t.is_floating_point or t.is_complex for t in form.dtypes}
    floats: list[Fill] = [_normal, _unit, _large, _coarse, _uneven, _definite] if True in kinds else [_normal] * 3
    if opaque_function(form.target) is not None:
        sizes = [2]  # a kernel may read memory at such an index
    integers = [_below(n, order) for n in sizes for order in (False, True)] if False in kinds else [_below(2)] * 2
    return [Draw(f, i, 17 * a + b) for a, f in enumerate(floats) for b, i in enumerate(integers)]
