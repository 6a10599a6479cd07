"""Masks of the tokens that chose one expert, by dataflow: index == e, whatever views and one-hot tensors are between.

select(permute(eq(unsqueeze(index, -1), arange(4)), [2, 0, 1]), 0, 3)    -->    index == 3, at the mask's own dims
eq(index, 3).any(-1), scatter(zeros, -1, index, True)[:, 3]              -->    the same, anywhere along a dim
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.adapters.fx.graph_nodes import node_of

aten = torch.ops.aten
ANY = "any"  # the place of a dim along which one entry is enough
Place = int | str | tuple[int]  # a number; ANY; (d, ), dim d of the mask
_AS_THEY_ARE = (
    aten.alias.default, aten.clone.default, aten.detach.default, aten._to_copy.default, aten.to.dtype,
    aten.to.dtype_layout, aten.lift_fresh_copy.default, aten.contiguous.default,
    aten.detach_.default, aten.to.device, aten.to.other,
)  # fmt: skip
_TESTS = {
    aten.ne.Scalar: 0, aten.not_equal.Scalar: 0, aten.gt.Scalar: 0, aten.greater.Scalar: 0,
    aten.ge.Scalar: 1, aten.greater_equal.Scalar: 1,
}  # fmt: skip  # of a count or a flag: with what
_REDUCES = (aten.any.dim, aten.any.dims, aten.sum.dim_IntList, aten.amax.default, aten.max.dim)
_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_ANDS = (
    aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor, aten.mul.Tensor, aten.logical_and_.default,
)  # fmt: skip
_FILLS = (
    aten.zeros.default, aten.zeros_like.default, aten.full.default, aten.full_like.default, aten.new_zeros.default,
)  # fmt: skip


@dataclass(frozen=True)
class ExpertMask:
    """index == expert. ``places``: of each dim of ``index``, the dim of the mask. ``kept``: masks, with their places,
    that have to be true as well."""

    index: Node
    places: tuple[Place, ...]
    expert: int
    kept: tuple[tuple[Node, tuple[Place, ...]], ...] = ()

    @property
    def reduced(self) -> bool:
        """Whether one of several entries of the index is enough."""
        return ANY in self.places


def expert_mask(node: Any) -> ExpertMask | None:
    """What a boolean node says of the experts of tokens; None if it is no such mask."""
    return _mask(node, tuple((d,) for d in range(node.meta["val"].dim())))


def experts_asked(node: Any, expert: int) -> ExpertMask | None:
    """What entry ``expert`` of a boolean node [E] says: whether any token chose it. The mask's own dims are numbered in
    any order."""
    at: tuple[Place, ...] = (expert,)
    while True:
        for x, places in _behind(node, at):  # noqa: B007 - the last one
            pass
        dims = _reduced(x)
        if dims is None:
            return _mask(x, places)
        found = list(places)
        for d in dims:
            found.insert(d, (len(found),))
        node, at = x.args[0], tuple(found)


def _reduced(x: Any) -> list[int] | None:
    """The dims over which a node is a sum, or true where any entry is, in order."""
    if x.target not in _REDUCES or len(x.args) > 2 or x.kwargs.get("keepdim"):
        return None
    rank = x.args[0].meta["val"].dim()
    dims = [x.args[1]] if isinstance(x.args[1], int) else list(x.args[1] or range(rank))
    return sorted(d % rank for d in dims)


def are_distinct(mask: Tensor) -> bool:
    """Whether a traced mask is true at most once for each token: it compares the indices of a topk with an expert."""
    mode: Any = get_proxy_mode()
    node = node_of(mask, mode.tracer) if mode is not None else None
    found = expert_mask(node) if node is not None else None
    return found is not None and distinct_experts(found.index)


def distinct_experts(index: Any) -> bool:
    """Whether the experts along the last dim of an index differ: they are of a topk or a sort, or one."""
    x = index
    while x.target in (*_AS_THEY_ARE, *_VIEWS):
        if x.meta["val"].shape[-1:] != x.all_input_nodes[0].meta["val"].shape[-1:]:
            return False
        x = x.all_input_nodes[0]
    if x.target in (aten.slice.Tensor, aten.narrow.default):
        x = x.all_input_nodes[0]
    of: Any = x.args[0] if x.target is operator.getitem else None
    chosen = isinstance(of, Node) and of.target in (aten.topk.default, aten.sort.default, aten.sort.stable)
    if not chosen and x.target in (aten.argsort.default, aten.argsort.stable):
        of, chosen = x, True
    if not chosen:
        return bool(index.meta["val"].dim()) and index.meta["val"].shape[-1] == 1
    along = of.args[2] if of.target is aten.topk.default and len(of.args) > 2 else of.kwargs.get("dim", -1)
    if of.target is not aten.topk.default:
        along = of.kwargs.get("dim", of.args[1] if len(of.args) > 1 else -1)
    return x.args[1:2] == (1,) * (x.target is operator.getitem) and along in (-1, x.meta["val"].dim() - 1)


def _mask(node: Any, places: tuple[Place, ...]) -> ExpertMask | None:
    for x, at in _behind(node, places):
        if x.target in (aten.eq.Tensor, aten.eq.Scalar):
            return _compared(x, at)
        if x.target in (aten.scatter.value, aten.scatter_.value):
            return _scattered(x, at)
        if x.target is aten.one_hot.default and isinstance(at[-1], int):
            return ExpertMask(x.args[0], at[:-1], at[-1])
        if x.target in _ANDS and isinstance(x.args[1], Node):
            return _both(x, at)
    return None


def _both(x: Any, places: tuple[Place, ...]) -> ExpertMask | None:
    if ANY in places:
        return None
    operands = [(y, _aligned(y, places)) for y in x.args[:2]]
    for (y, at), other in zip(operands, operands[::-1], strict=True):
        found = _mask(y, at)
        if found is not None:
            return ExpertMask(found.index, found.places, found.expert, (*found.kept, other))
    return None


def _compared(x: Any, places: tuple[Place, ...]) -> ExpertMask | None:
    a, b = x.args
    if not isinstance(b, Node):
        return ExpertMask(*_base(a, places), int(b)) if isinstance(b, int) else None
    for index, other in ((a, b), (b, a)):
        number = _number(other, _aligned(other, places))
        if number is not None:
            return ExpertMask(*_base(index, _aligned(index, places)), number)
    return None


def _base(index: Any, places: tuple[Place, ...]) -> tuple[Node, tuple[Place, ...]]:
    """The last node behind an index whose dims are all of the mask's."""
    best = index, places
    for x, at in _behind(index, places):
        if all(not isinstance(place, int) for place in at):
            best = x, at
    return best


def _scattered(x: Any, places: tuple[Place, ...]) -> ExpertMask | None:
    """scatter(zeros, d, index, true) at number e of dim d: whether one of index along d is e."""
    base, dim, index, value = x.args
    dim %= len(places)
    expert = places[dim]
    zeros = base.target in _FILLS and not any(v for v in base.args[1:2] if base.target in (aten.full.default,))
    same = index.meta["val"].shape[:dim] + index.meta["val"].shape[dim + 1 :] == (
        base.meta["val"].shape[:dim] + base.meta["val"].shape[dim + 1 :]
    )
    if not zeros or not same or not value or not isinstance(expert, int) or ANY in places:
        return None
    if base.target is aten.full_like.default and base.args[1]:
        return None
    along: Place = ANY if index.meta["val"].shape[dim] > 1 else 0
    if along == 0:
        index_node, at = _base(index, (*places[:dim], 0, *places[dim + 1 :]))
        return ExpertMask(index_node, at, expert)
    return ExpertMask(index, (*places[:dim], along, *places[dim + 1 :]), expert)


def _number(x: Any, places: tuple[Place, ...]) -> int | None:
    """The number at a place of arange, or of a filled tensor."""
    for y, at in _behind(x, places):
        if y.target in _ARANGES and isinstance(at[0], int):
            start, step = (y.args[0], y.args[2] if len(y.args) > 2 else 1) if len(y.args) > 1 else (0, 1)
            return int(start) + at[0] * int(step)
        if y.target is aten.full.default and isinstance(y.args[1], int):
            return y.args[1]
    return None


def _aligned(x: Any, places: tuple[Place, ...]) -> tuple[Place, ...]:
    """Places in an operand that is broadcast."""
    shape = x.meta["val"].shape
    own = places[len(places) - len(shape) :]
    return tuple(0 if n == 1 else place for n, place in zip(shape, own, strict=True))


def _behind(node: Any, places: tuple[Place, ...]) -> Iterator[tuple[Any, tuple[Place, ...]]]:
    """A node and the nodes that it is a view of, with the places in them."""
    while True:
        yield node, places
        found = _step(node, places)
        if found is None:
            return
        node, places = found


def _step(node: Any, at: tuple[Place, ...]) -> tuple[Node, tuple[Place, ...]] | None:
    x: Any = node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(x, Node):
        return None
    target, args = node.target, node.args
    rank = len(x.meta["val"].shape) if isinstance(x.meta.get("val"), Tensor) else 0
    if target in _AS_THEY_ARE or (target in _TESTS and args[1] == _TESTS[target]):
        return x, at
    if target in (aten.permute.default, aten.transpose.int, aten.t.default):
        order = list(range(rank))
        if target is aten.permute.default:
            order = [d % rank for d in args[1]]
        else:
            a, b = args[1:3] if target is aten.transpose.int else (0, 1)
            order[a], order[b] = order[b], order[a]
        places: list[Place] = [0] * rank
        for d, source in enumerate(order):
            places[source] = at[d]
        return x, tuple(places)
    if target is aten.select.int:
        d = args[1] % rank
        return x, (*at[:d], args[2] % x.meta["val"].shape[d], *at[d:])
    if target is operator.getitem and x.target is aten.unbind.int:
        unbound: Any = x
        whole, d = unbound.args[0], (unbound.args[1] if len(unbound.args) > 1 else 0) % (len(at) + 1)
        return whole, (*at[:d], args[1], *at[d:])
    if target is aten.unsqueeze.default:
        d = args[1] % (rank + 1)
        return x, (*at[:d], *at[d + 1 :])
    if target in (aten.squeeze.dim, aten.squeeze.dims):
        dims = [args[1]] if isinstance(args[1], int) else args[1]
        with_ones = list(at)
        for d in sorted(d % rank for d in dims if x.meta["val"].shape[d] == 1):
            with_ones.insert(d, 0)
        return x, tuple(with_ones)
    if target is aten.expand.default:
        return x, _aligned(x, at)
    if target is aten.slice.Tensor:
        return _sliced(node, x, at)
    if target in (aten.narrow.default, aten.narrow_copy.default):
        d, start = args[1] % rank, args[2]
        return (x, (*at[:d], start + at[d], *at[d + 1 :])) if isinstance(at[d], int) and start >= 0 else None
    if target in _VIEWS:
        return _viewed(node, x, at)
    if target in _REDUCES:
        dims = [args[1]] if isinstance(args[1], int) else list(args[1] or ())
        if len(dims) == 1 and rank == len(at) + 1 and ANY not in at and len(args) < 3:
            d = dims[0] % rank
            return x, (*at[:d], ANY, *at[d:])
    return None


def _sliced(node: Any, x: Any, at: tuple[Place, ...]) -> tuple[Node, tuple[Place, ...]] | None:
    d = node.args[1] if len(node.args) > 1 else 0
    start, step = (node.args[2] if len(node.args) > 2 else 0) or 0, node.args[4] if len(node.args) > 4 else 1
    if node.meta["val"].shape == x.meta["val"].shape:
        return x, at
    place = at[d]
    if isinstance(place, int) and start >= 0:
        return x, (*at[:d], start + place * step, *at[d + 1 :])
    return None


def _viewed(node: Any, x: Any, at: tuple[Place, ...]) -> tuple[Node, tuple[Place, ...]] | None:
    """A view that only adds or removes dims of size one."""
    shape, before = list(node.meta["val"].shape), list(x.meta["val"].shape)
    if [n for n in shape if n != 1] != [n for n in before if n != 1]:
        return None
    left = iter([place for n, place in zip(shape, at, strict=True) if n != 1])
    return x, tuple(0 if n == 1 else next(left) for n in before)


def number_of_choice(x: Any, experts: int) -> Node | None:
    """The index of which x [..., E], before it is summed over all other dims, says whether it is e."""
    rank = len(x.meta["val"].shape)
    found = [_mask(x, (*((d,) for d in range(rank - 1)), e)) for e in {0, experts - 1}]
    first = found[0]
    if first is None or any(m is None or (m.index, m.places, m.kept) != (first.index, first.places, ()) for m in found):
        return None
    if {m.expert for m in found if m is not None} != {0, experts - 1}:
        return None
    if first.reduced and not distinct_experts(first.index):
        return None
    return first.index
