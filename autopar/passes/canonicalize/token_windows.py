"""token_windows: what reads a few tokens beside its own becomes one operator that keeps the number of tokens.

Consumes    a canonical global graph; reads only whether the mesh has an axis cp.
Guarantees  shifts and convolutions of stride 1 that pad a dim and crop it to its former size are `shift` and
            `token_conv1d` (`autopar.ops.token_windows`), which run on a sharded sequence with a halo.
Leaves      the numbers, values that depend on no parameter, and every graph without an axis cp.

    conv1d = conv1d(x, w, b, [1], [3], [1], 64); y = slice(conv1d, 2, 0, 16)  --> y = token_conv1d(x, w, b, 3, 0, 1, 64)
    y = constant_pad_nd(x, [0, 0, 1, -1])                                     --> y = shift(x, 1, 1, False)
    y = cat([zeros([4, 1, 8]), slice(x, 1, 0, -1)], 1)                        --> y = shift(x, 1, 1, False)
    y = roll(x, [1], [1])                                                     --> y = shift(x, 1, 1, True)
    y = unfold(pad(x, [0, 0, 2, 0]), 1, 3, 1)       --> y = stack([shift(x, 1, 2, False), shift(x, 1, 1, False), x], 3)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autopar.adapters.operators import OpOverload
from autopar.ir.graph import arguments, is_call, reach, remove_dead_code, tensor_operands
from autopar.ir.meta import names_of_parameters
from autopar.ops.token_windows import shift, token_conv1d
from autopar.ops.traits import FILL_VALUES, is_elementwise
from autopar.rewrite.build import Build, shape_of
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

aten = torch.ops.aten
_PADS = (aten.constant_pad_nd.default, aten.pad.default)


class TokenWindows(Pass):
    """See the module's docstring."""

    name = "token_windows"
    requires = ("functional",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        if ctx.mesh.size("cp") == 1:
            return gm
        names = names_of_parameters(gm)
        made = set(reach((n for n in gm.graph.nodes if n.name in names), lambda n: n.users))
        for node in [n for n in gm.graph.nodes if n in made and n.op == "call_function"]:
            new = _rolled(node) or _unfolded(node) or _shifted(node) or _convolved(node)
            if new is not None:
                node.replace_all_uses_with(new)
        remove_dead_code(gm)
        gm.recompile()
        return gm


@dataclass(frozen=True)
class _Resized:
    """``value`` with ``before`` and ``behind`` rows of zeros along ``dim``; negative: without so many of its rows."""

    value: Node
    dim: int
    before: int = 0
    behind: int = 0


def _rolled(node: Node) -> Node | None:
    if not is_call(node, aten.roll.default):
        return None
    args = arguments(node)
    if len(args["dims"]) != 1:
        return None
    dim = args["dims"][0] % len(shape_of(node))
    rows = shape_of(node)[dim]
    by = args["shifts"][0] % max(rows, 1)
    by = by - rows if by > rows // 2 else by
    return Build(node)(shift, args["self"], dim, by, True) if by else None


def _shifted(node: Node) -> Node | None:
    for dim in _dims_resized(node):
        found = _resized(node, dim)
        if found.before == -found.behind and found.value is not node:
            return _moved(Build(node), found.value, dim, found.before)
    return None


def _moved(build: Build, x: Node, dim: int, by: int) -> Node:
    return build(shift, x, dim, by, False) if by else x


def _unfolded(node: Node) -> Node | None:
    """As many windows as there are rows before padding."""
    if not is_call(node, aten.unfold.default):
        return None
    args, build = arguments(node), Build(node)
    dim = args["dimension"] % _rank(args["self"])
    read = _resized(args["self"], dim)
    if args["step"] != 1 or min(read.before, read.behind) < 0 or shape_of(node)[dim] != shape_of(read.value)[dim]:
        return None
    return build(
        aten.stack.default,
        [_moved(build, read.value, dim, read.before - i) for i in range(args["size"])],
        _rank(node) - 1,
    )


def _convolved(node: Node) -> Node | None:
    """A convolution whose result is cropped to as many rows as its operand has before padding."""
    made = _resized(node, 2, only_slices=True) if _rank(node) == 3 else None
    if made is None:
        return None
    conv, functions = made.value, []
    while made.value is not node and _is_function(conv):
        functions.append(conv)
        (conv,) = tensor_operands(conv)
    if not is_call(conv, aten.conv1d.default):
        return None
    args, build = arguments(conv), Build(node)
    if _rank(args["input"]) != 3 or list(args["stride"]) != [1] or isinstance(args["padding"], str):
        return None
    read = _resized(args["input"], 2)
    if min(read.before, read.behind) < 0:
        read = _Resized(args["input"], 2)
    (dilation,), (padding,) = args["dilation"], args["padding"]
    span = dilation * (shape_of(args["weight"])[2] - 1)
    before = read.before + padding + made.before
    if not 0 <= before <= span or not span or shape_of(node)[2] != shape_of(read.value)[2]:
        return None
    weight, bias, groups = args["weight"], args["bias"], args["groups"]
    x = build(token_conv1d, read.value, weight, bias, before, span - before, dilation, groups)
    for call in reversed(functions):
        x = build(call.target, *map_arg(call.args, lambda _, x=x: x), **call.kwargs)  # type: ignore[misc, arg-type]
    return x


def _is_function(node: Node) -> bool:
    """Whether a call computes each element from that of its one operand."""
    target = node.target
    return isinstance(target, OpOverload) and is_elementwise(target) and len(tensor_operands(node)) == 1


def _rank(node: Node) -> int:
    value = node.meta.get("val")
    return len(value.shape) if isinstance(value, torch.Tensor) else 0


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _dims_resized(node: Node) -> list[int]:
    """Dims that a call pads or crops."""
    if is_call(node, *_PADS):
        return [d for d in range(_rank(node)) if any(_pads(node)[d])]
    if is_call(node, aten.slice.Tensor, aten.cat.default):
        return [int(arguments(node)["dim"]) % _rank(node)]
    return []


def _pads(node: Node) -> list[tuple[int, int]]:
    """(rows before, rows behind) of each dim."""
    pads, rank = list(arguments(node)["pad"]), _rank(node)
    pairs = [(pads[i], pads[i + 1]) for i in range(0, len(pads), 2)]
    return [*([(0, 0)] * (rank - len(pairs))), *reversed(pairs)]


def _resized(node: Node, dim: int, only_slices: bool = False) -> _Resized:
    """What a value consists of along one dim: another value between rows of zeros, or without some of its rows."""
    whole = _Resized(node, dim)
    operand, before, behind = _step(node, dim, only_slices) or (node, 0, 0)
    if operand is node:
        return whole
    inner = _resized(operand, dim, only_slices)
    if (before > 0 > inner.before) or (behind > 0 > inner.behind):
        return _Resized(operand, dim, before, behind)  # these rows of zeros take the place of rows of the value
    if -(inner.before + before) - (inner.behind + behind) >= shape_of(inner.value)[dim]:
        return whole
    return _Resized(inner.value, dim, inner.before + before, inner.behind + behind)


def _step(node: Node, dim: int, only_slices: bool) -> tuple[Node, int, int] | None:
    """(operand, rows before, rows behind) of one call that pads or crops this dim and no other."""
    if _dims_resized(node) != [dim]:
        return None
    args = arguments(node)
    if is_call(node, aten.slice.Tensor):
        x: Node = args["self"]
        rows = shape_of(x)[dim]
        start, end = (_place(args[name], rows, default) for name, default in (("start", 0), ("end", rows)))
        return (x, -start, end - rows) if args["step"] == 1 and start < end else None
    if only_slices:
        return None
    if is_call(node, *_PADS):
        zero = args.get("mode", "constant") == "constant" and not args["value"]
        return (args["self"], *_pads(node)[dim]) if zero else None
    parts = list(args["tensors"])
    real = [i for i, x in enumerate(parts) if not _is_zero(x)]
    if len(real) != 1 or any(_rank(x) != _rank(node) for x in parts) or _dtype(parts[real[0]]) != _dtype(node):
        return None
    sizes = [shape_of(x)[dim] for x in parts]
    return parts[real[0]], sum(sizes[: real[0]]), sum(sizes[real[0] + 1 :])


def _place(index: Any, rows: int, default: int) -> int:
    return default if index is None else max(0, min(rows, index + rows if index < 0 else index))


def _is_zero(x: Node) -> bool:
    """Whether a value is created as zeros."""
    return is_call(x, *FILL_VALUES) and bool(FILL_VALUES[x.target](x) == 0)  # type: ignore[index]
