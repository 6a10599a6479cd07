"""The memory of a graph's values: the storages behind them. Their lifetimes: `autopar.ir.live_values`.

A value lives from its node to the last use of any view of it. Sums overwrite an operand where they may.
The workspace of operators: `autopar.ir.live_values`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import arguments, is_call, outputs
from autopar.ir.waits import overwritten
from autopar.ops import traits

aten = torch.ops.aten
Storage = tuple[Node, int]  # the node that allocates it, and which of its results it is


def bytes_of(nodes: Iterable[Node]) -> int:
    """Bytes of all results of nodes, views like any other."""
    return sum(_size(v) for n in nodes for v in _results(n))


def _size(value: Any) -> int:
    return math.prod(value.shape) * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0


def _results(node: Node) -> list[Any]:
    """Everything that a call returns, None (an unwanted gradient) included."""
    val = node.meta["val"]
    return list(val) if isinstance(val, (tuple, list)) else [val]


def storages(gm: GraphModule, in_place: bool | Collection[Node] = False) -> dict[Node, tuple[Storage, ...]]:
    """Node -> the storage behind each of its results. A view has that of its base. ``in_place``: so has a sum that
    may overwrite an operand, as it does at run time; or only those of some nodes."""
    found: dict[Node, tuple[Storage, ...]] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        if is_call(node, operator.getitem):
            found[node] = (found[node.args[0]][node.args[1]],)
        elif _is_in(node, in_place) and (given := overwritten(node)) is not None:
            found[node] = found[given]
        elif (base := _base(node)) is not None:
            found[node] = found[base][:1] * len(_results(node))
        else:
            found[node] = tuple((node, i) for i in range(len(_results(node))))
    return found


def _is_in(node: Node, nodes: bool | Collection[Node]) -> bool:
    return nodes if isinstance(nodes, bool) else node in nodes


def size_of(storage: Storage) -> int:
    """Bytes on the device."""
    if storage[0].target is torch.ops.autopar.to_host.default:
        return 0
    return _size(_results(storage[0])[storage[1]])


def _base(node: Node) -> Node | None:
    """The operand whose storage all results of a view share; None for a call that allocates."""
    if node.op != "call_function" or not traits.aliases(node.target) or not (given := node.all_input_nodes):
        return None
    if is_call(node, torch.ops.autopar.shard_slice.default):
        return given[0] if not arguments(node)["blocks"] else None
    # `to` is a view only where the dtype stays, `reshape` and `contiguous` where strides allow it
    shares = traits.is_view(node.target) or _dtype(node) == _dtype(given[0])
    return given[0] if shares and not _copies(node, given[0]) else None


def _copies(node: Node, base: Node) -> bool:
    """Whether elements have to be copied for a shape or for a memory order."""
    if node.target not in (aten.reshape.default, aten.contiguous.default):
        return False
    given: torch.Tensor = base.meta["val"]
    if given.is_contiguous():
        return False
    if is_call(node, aten.contiguous.default):
        return True
    try:
        torch.empty_strided(given.shape, given.stride(), device="meta").view(node.meta["val"].shape)
    except RuntimeError:
        return True
    return False


def is_dense(x: torch.Tensor) -> bool:
    """Whether the elements are dense in memory, in any order of dims."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride()) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _dtype(node: Node) -> Any:
    return getattr(_results(node)[0], "dtype", None)


def shares_storage(node: Node) -> bool:
    """Whether a call allocates nothing."""
    return is_call(node, operator.getitem) or _base(node) is not None


def shared_outputs(gm: GraphModule, owned: Iterable[int]) -> list[int]:
    """The outputs among ``owned`` without a contiguous storage of their own: it is an input's, or larger than the
    value, or shared with another output. The first of several outputs with one storage may keep it."""
    behind, values, owned = storages(gm), outputs(gm), set(owned)
    nodes = {i: v for i, v in enumerate(values) if isinstance(v, Node)}
    taken = {s for i, v in nodes.items() if i not in owned for s in behind[v]}
    found = []
    for i in sorted(owned & set(nodes)):
        (storage,) = behind[nodes[i]]
        if storage[0].op != "placeholder" and storage not in taken and _fills(nodes[i], storage):
            taken.add(storage)
        else:
            found.append(i)
    return found


def _fills(node: Node, storage: Storage) -> bool:
    """Whether a contiguous value is all of its storage."""
    value = node.meta["val"]
    return bool(value.is_contiguous()) and _size(value) == size_of(storage)


def storage_bytes(gm: GraphModule, results: Iterable[int], held: Collection[str] = ()) -> int:
    """Bytes behind some of a graph's outputs, each storage once, placeholders in ``held`` left out."""
    behind, values = storages(gm), outputs(gm)
    kept = {s for i in results if isinstance(values[i], Node) for s in behind[values[i]]}
    return sum(size_of(s) for s in kept if s[0].name not in held)
