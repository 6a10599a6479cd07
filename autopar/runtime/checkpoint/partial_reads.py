"""Partial reads: a window of a computed tensor reads only those parts of the inputs that it depends on.

    w = stack([e0, e1, e2, e3]).transpose(1, 2)        a rank needs w[2:4, :, 0:8]   -->   e2[0:8, :], e3[0:8, :]

The computation is a graph, and a window propagates from its output to its inputs. Operators that only move data
translate the window. Any other operator reads its full inputs, and the window is sliced from the result.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.ir.weight_conversion import Making

aten = torch.ops.aten
Window = tuple[slice, ...]  # start and stop for every dim
Read = Callable[[int, Window], Tensor]  # number of an input, window


def traced(make: Making, inputs: Sequence[Tensor]) -> dict[str, Node]:
    """The results of ``make`` by name, as nodes of one graph; their ``meta["val"]`` have the shapes and dtypes.

    ``inputs`` are on the meta device. Raises whatever ``make`` raises.
    """
    names: list[str] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        made = make(tensors)
        names[:] = made
        return list(made.values())

    graph: Any = make_fx(run, tracing_mode="fake")(*inputs).graph
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        node.meta["number"] = number
    return dict(zip(names, graph.output_node().args[0], strict=True))


def pulled(node: Node, window: Window, read: Read) -> Tensor:
    """A window of the value of a node of `traced`. () is all of it."""
    window = window or _whole(node)
    if any(s.start >= s.stop for s in window):
        return torch.empty([s.stop - s.start for s in window], dtype=node.meta["val"].dtype)
    if node.op == "placeholder":
        return read(node.meta["number"], window)
    rule = _rule(node)
    if rule is not None:
        return rule(node, window, lambda x, part: pulled(x, part, read))
    result: Tensor = _computed(node, read)[window]
    return result


def _computed(node: Node, read: Read) -> Any:
    def whole(x: Node) -> Any:
        return pulled(x, (), read) if isinstance(x.meta["val"], Tensor) else _computed(x, read)

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), whole)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _whole(node: Node) -> Window:
    return tuple(slice(0, size) for size in node.meta["val"].shape)


# --- operators that only move data ---------------------------------------------------------------------

Pull = Callable[[Any, Window], Tensor]  # of a node


def _set(window: Window, dim: int, part: slice) -> Window:
    return (*window[:dim], part, *window[dim + 1 :])


def _argument(node: Any, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _dim(node: Any, place: int = 1) -> int:
    """The ``dim`` argument of an operator, from the front: of its result, if that has more dims than the input."""
    operand = node.args[0] if isinstance(node.args[0], Node) else node.args[0][0]
    ndim = max(x.ndim for x in (operand.meta["val"], node.meta["val"]) if isinstance(x, Tensor))
    return int(_argument(node, place, "dim", 0)) % ndim


def _cat(node: Any, window: Window, pull: Pull) -> Tensor:
    dim, at, parts = _dim(node), 0, []
    for piece in node.args[0]:
        size = piece.meta["val"].shape[dim]
        low, high = max(window[dim].start, at), min(window[dim].stop, at + size)
        if low < high:
            parts.append(pull(piece, _set(window, dim, slice(low - at, high - at))))
        at += size
    return torch.cat(parts, dim)


def _stack(node: Any, window: Window, pull: Pull) -> Tensor:
    dim = _dim(node)
    rest = (*window[:dim], *window[dim + 1 :])
    return torch.stack([pull(x, rest) for x in node.args[0][window[dim]]], dim)


def _item(node: Any, window: Window, pull: Pull) -> Tensor:
    """An item of a split or of an unbind."""
    listed, number = node.args
    source, dim = listed.args[0], _dim(listed, 1 if listed.target == aten.unbind.int else 2)
    if listed.target == aten.unbind.int:
        return pull(source, (*window[:dim], slice(number, number + 1), *window[dim:])).squeeze(dim)
    at = sum(x.shape[dim] for x in listed.meta["val"][:number])
    return pull(source, _set(window, dim, slice(window[dim].start + at, window[dim].stop + at)))


def _slice(node: Any, window: Window, pull: Pull) -> Tensor:
    source, dim = node.args[0], _dim(node)
    start, step = _argument(node, 2, "start", None), _argument(node, 4, "step", 1)
    first = range(source.meta["val"].shape[dim])[slice(start, None)].start
    low, high = first + window[dim].start * step, first + (window[dim].stop - 1) * step + 1
    taken = pull(source, _set(window, dim, slice(low, high)))
    return taken[(*[slice(None)] * dim, slice(None, None, step))]


def _select(node: Any, window: Window, pull: Pull) -> Tensor:
    source, dim = node.args[0], _dim(node)
    at = int(node.args[2]) % source.meta["val"].shape[dim]
    return pull(source, (*window[:dim], slice(at, at + 1), *window[dim:])).squeeze(dim)


def _permute(node: Any, window: Window, pull: Pull) -> Tensor:
    source = node.args[0]
    order = list(range(len(window)))
    if node.target == aten.permute.default:
        order = [d % len(window) for d in node.args[1]]
    elif len(window) > 1:
        a, b = (0, 1) if node.target == aten.t.default else (d % len(window) for d in node.args[1:3])
        order[a], order[b] = order[b], order[a]
    before = [slice(0, 0)] * len(window)
    for dim, there in enumerate(order):
        before[there] = window[dim]
    return pull(source, tuple(before)).permute(order)


def _reshape(node: Any, window: Window, pull: Pull) -> Tensor:
    """Unchanged leading dims are sliced before the reshape, the others after: [experts, 2·rows, n] -> [experts, rows,
    2, n]."""
    source = node.args[0]
    old, new = source.meta["val"].shape, node.meta["val"].shape
    same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(old, new))))
    taken = pull(source, (*window[:same], *(slice(0, size) for size in old[same:])))
    return taken.reshape(*taken.shape[:same], *new[same:])[(*[slice(None)] * same, *window[same:])]


_RULES: dict[Any, Callable[[Any, Window, Pull], Tensor]] = {
    aten.cat: _cat,
    aten.stack: _stack,
    aten.slice: _slice,
    aten.select: _select,
    **dict.fromkeys((aten.permute, aten.transpose, aten.t), _permute),
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape, aten.squeeze, aten.unsqueeze), _reshape),
    **dict.fromkeys(
        (aten.clone, aten.contiguous, aten.alias, aten.detach), lambda node, part, pull: pull(node.args[0], part)
    ),
}


def _rule(node: Any) -> Callable[[Any, Window, Pull], Tensor] | None:
    if node.target is operator.getitem:  # of a list
        return _item if _packet(node.args[0]) in (aten.split, aten.split_with_sizes, aten.unbind) else None
    return _RULES.get(_packet(node))


def _packet(node: Any) -> Any:
    return getattr(node.target, "overloadpacket", None)
