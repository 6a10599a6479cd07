"""Rule functions for whole families of operators: einsum-like, pointwise, one dim blocked, reductions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from autopar.ir.graph import has_gradient
from autopar.ir.placement import Shard
from autopar.rules.call import Call, RuleFunction
from autopar.rules.rule import UNITS, Dims, Rule

UNARY = (frozenset({0}),)
Factors = tuple[tuple[str, ...], ...]  # dims without concatenations


def named_dims(call: Call, shape: tuple[int, ...], prefix: str = "d") -> Factors:
    """One factor per dim: d0, d1, ..."""
    return tuple(call.factor(f"{prefix}{i}", size) for i, size in enumerate(shape))


def broadcast_dims(call: Call, shape: tuple[int, ...], result: tuple[int, ...]) -> Dims:
    """Factors of an operand aligned to the right of the result; a broadcast dim has none."""
    offset = len(result) - len(shape)
    return tuple(
        call.factor(f"d{i + offset}", size) if size == result[i + offset] else () for i, size in enumerate(shape)
    )


def pointwise(linear: str = "", keep: bool = False) -> RuleFunction:
    """Elementwise with broadcasting. ``linear``: 'unary' (in the only tensor), 'sum' (in all jointly),
    'product' (in each alone), 'numerator' (in the first), '' (in none)."""

    def build(call: Call) -> Rule:
        dims: list[Dims | None] = [broadcast_dims(call, call.shape_of(x), call.result) for x in call.operands]
        n = len(dims)
        scales = linear in ("product", "numerator")
        sets: tuple[frozenset[int], ...] = ()
        if n == 1 and linear in ("unary", "product", "numerator"):
            sets = UNARY
        elif linear == "sum" and n > 1:
            sets = (frozenset(range(n)),)
        elif linear == "product":
            sets = tuple(frozenset({i}) for i in range(n))
        elif linear == "numerator":
            sets = UNARY
        return call.rule(
            dims, [named_dims(call, call.result)], linear=sets, keep_partial=keep or (scales and _by_constant(call))
        )

    return build


def _by_constant(call: Call) -> bool:
    """Whether it is a mul or div by a scalar: passing a Partial on is free."""
    others = call.operands[1:]
    return not others or all(not x.meta["val"].dim() and not has_gradient(x) for x in others)


def einsum_rule(equation: str, names: str, bias: str = "") -> RuleFunction:
    """``'... i, o i -> ... o'`` over the named arguments; linear in each alone. ``bias``: an optional addend of the
    result's last dim; with it a contraction may not be sharded (the bias would be added once per rank)."""
    left, right = equation.split("->")
    terms, target = [term.split() for term in left.split(",")], right.split()

    def build(call: Call) -> Rule:
        shapes = [call.shape(name) for name in names.split()]
        dims, result = _factors_of(call, terms, shapes, target)
        blocked = {}
        sets: tuple[frozenset[int], ...] = tuple(frozenset({i}) for i in range(len(dims)))
        if bias and call.args.get(bias) is not None:
            if not call.relaxed:
                why = "the bias would be added once per rank; split it off first"
                present = {f for dim in result for f in dim}
                blocked = {f: why for d in dims for dim in d for f in dim if f not in present}
            dims.append((result[-1],))
            sets = sets if call.relaxed else ()  # the bias will be split off
        return call.rule(dims, [result], blocked=blocked, linear=sets)

    return build


def einsum_of_call(call: Call) -> Rule:
    """torch.einsum: letters, dims that "..." stands for, and alphabetical order of the result if none is given."""
    left, arrow, right = str(call.args["equation"]).replace(" ", "").partition("->")
    terms = [re.findall(r"\.\.\.|[a-zA-Z]", term) for term in left.split(",")]
    letters = [letter for term in terms for letter in term if letter != "..."]
    implied = ["..."] * ("..." in left) + sorted(letter for letter in set(letters) if letters.count(letter) == 1)
    target = re.findall(r"\.\.\.|[a-zA-Z]", right) if arrow else implied
    shapes = [call.shape_of(x) for x in call.operands]
    dims, result = _factors_of(call, terms, shapes, target)
    # a diagonal: the rows and the columns of rank r would cover only a block of it
    twice = {letter for term in terms for letter in term if term.count(letter) > 1}
    blocked = {letter: "the equation takes a diagonal of it" for letter in sorted(twice)}
    return call.rule(dims, [result], blocked=blocked, linear=tuple(frozenset({i}) for i in range(len(dims))))


def _factors_of(
    call: Call, terms: list[list[str]], shapes: list[tuple[int, ...]], target: list[str]
) -> tuple[list[Factors], Factors]:
    """Factors of the operands, and of the result."""
    operands = [_term_dims(call, term, shape) for term, shape in zip(terms, shapes, strict=True)]
    return operands, _term_dims(call, target, call.result)


def _term_dims(call: Call, term: list[str], shape: tuple[int, ...]) -> Factors:
    if "..." not in term:
        assert len(term) == len(shape), f"{call.node}: {term} against {shape}"
        return tuple(call.factor(f, s) for f, s in zip(term, shape, strict=True))
    at = term.index("...")
    tail = len(term) - at - 1
    lead = len(shape) - tail - at
    head = tuple(call.factor(f, s) for f, s in zip(term[:at], shape[:at], strict=True))
    # broadcast dims align to the right of the dots
    dots = tuple(call.factor(f"lead{lead - i}", s) for i, s in enumerate(shape[at : at + lead]))
    rest = tuple(call.factor(f, s) for f, s in zip(term[at + 1 :], shape[at + lead :], strict=True))
    return head + dots + rest


def blocks_dims(dims_of: Callable[[Call], Iterable[int]], why: str, linear: bool = False) -> RuleFunction:
    """Same shape in and out, some dims may not be sharded (softmax, cumsum, flip, sort)."""

    def build(call: Call) -> Rule:
        shape = call.shape("self")
        dims = named_dims(call, shape)
        blocked = {f"d{i}": why for i in dims_of(call)}
        operands: list[Dims | None] = [
            dims if call.shape_of(x) == shape else broadcast_dims(call, call.shape_of(x), shape) for x in call.operands
        ]
        results = [dims if r == shape else _unlinked(call, r, dims, i) for i, r in enumerate(call.result_shapes)]
        blocked |= {f: why for f in call.sizes if f.startswith("new")}
        sets = UNARY if linear and len(operands) == 1 else ()
        return call.rule(operands, results, blocked=blocked, linear=sets)

    return build


def _unlinked(call: Call, shape: tuple[int, ...], dims: Dims, i: int) -> Dims:
    """A result whose blocked dims changed size (topk, layer_norm's statistics): equal sizes link, others do not."""
    out = []
    for d, size in enumerate(shape):
        same = d < len(dims) and dims[d] and call.sizes[dims[d][0]] == size  # type: ignore[index]
        out.append(dims[d] if same else call.factor(f"new{i}_{d}", size))
        if not same and size != 1:
            call.sizes[f"new{i}_{d}"] = size
    return tuple(out)


def reduction(linear: bool, dim: str = "dim", keepdim: str = "keepdim") -> RuleFunction:
    """sum and mean contract the dims they reduce; amax and the like (``linear=False``) block them."""

    def build(call: Call) -> Rule:
        shape = call.shape("self")
        dims = named_dims(call, shape)
        reduced = _reduced(call.args.get(dim), len(shape))
        keep = bool(call.args.get(keepdim, False))
        result = tuple(() if i in reduced else d for i, d in enumerate(dims) if keep or i not in reduced)
        blocked = {} if linear else {f"d{i}": f"{call.node.target} reduces it" for i in reduced}
        return call.rule(
            [dims],
            [result for _ in call.result_shapes],
            blocked=blocked,
            linear=UNARY if linear else (),
            keep_partial=linear,
        )

    return build


def _reduced(dim: Any, rank: int) -> set[int]:
    if dim is None or dim == []:
        return set(range(rank))
    return {int(d) % max(rank, 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim])}


def factory(call: Call) -> Rule:
    """No tensor operand, or only dtype and device of operands matter: replicated everywhere."""
    return call.rule(
        [None for _ in call.operands], [named_dims(call, r, f"r{i}_") for i, r in enumerate(call.result_shapes)]
    )


def filled(call: Call) -> Rule:
    """A factory whose elements are all alike: replicated, or sharded where that is all that is needed of it, since each
    rank can make its own part (`autopar.passes.partition.slice_early`)."""
    dims = named_dims(call, call.result, "r0_")
    placed = call.seen
    imposed = {}
    if isinstance(placed, Shard) and dims[placed.dim]:
        (factor,) = dims[placed.dim]
        imposed = {factor: placed.blocks or (call.sizes[factor],)}
        imposed |= {UNITS + factor: (placed.units,)} if placed.units else {}
    return call.rule([None for _ in call.operands], [dims], imposed=imposed)


def like(call: Call) -> Rule:
    """zeros_like and the like: the result is sharded as the operand is."""
    dims = named_dims(call, call.result)
    return call.rule([dims], [dims])


def opaque(why: str, linear: bool = False) -> RuleFunction:
    """No dim may be sharded; the op is replicated. ``linear``: in all operands jointly."""

    def build(call: Call) -> Rule:
        operands: list[Dims | None] = [
            named_dims(call, call.shape_of(x), f"o{i}_") for i, x in enumerate(call.operands)
        ]
        results = [named_dims(call, r, f"r{i}_") for i, r in enumerate(call.result_shapes)]
        sets = (frozenset(range(len(operands))),) if linear else ()
        return call.rule(operands, results, blocked={f: why for f in call.sizes}, linear=sets, keep_partial=linear)

    return build


def words(text: str) -> list[str]:
    """Split a list of names written as text."""
    return re.findall(r"\S+", text)
