"""One canonical operator instead of several spellings: the one that rules and costs know."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autopar.adapters.operators import decomposition_of, is_composite
from autopar.ir.conversions import is_zeros
from autopar.ir.graph import arguments, fake_mode, insert_call, output_node, placeholders
from autopar.ops.random_recipes import recipe_for
from autopar.ops.traits import is_view
from autopar.rewrite.build import Build, Rewrite, operand, shape_of, value_of
from autopar.rules import has_rule

aten = torch.ops.aten
CONVOLUTIONS = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
TRANSPOSED = {1: aten.conv_transpose1d.default, 2: aten.conv_transpose2d.input, 3: aten.conv_transpose3d.input}


def convolution(node: Node, build: Build) -> Node | None:
    """convolution(x, w, b, ..., transposed=False) --> conv2d(x, w, b, ...)   as padding="same" decomposes; transposed
    ones, as derivatives decompose, become conv_transpose2d"""
    known = arguments(node)
    names = ["input", "weight", "bias", "stride", "padding", "groups", "dilation"]
    table = TRANSPOSED if known["transposed"] else CONVOLUTIONS
    target = table.get(len(shape_of(operand(node, 1))) - 2)
    if known["transposed"]:
        names.insert(5, "output_padding")
    else:
        names[5:] = ["dilation", "groups"]
    return build(target, *(known[name] for name in names)) if target is not None else None


def ones_of_a_number(node: Node, build: Build) -> Node | None:
    """ones_like(sum(x)) --> full([], 1)   as derivatives begin: no sum is needed"""
    if shape_of(operand(node)):
        return None
    value = value_of(node)
    return build(aten.full.default, [], 1, dtype=value.dtype, device=value.device)


def addition(node: Node, build: Build) -> Node | None:
    """add(x, zeros) --> x   as a sum over layers begins, or Python's sum of a list: partial values pass through"""
    known = arguments(node)
    for zeros, other in ((known["self"], known["other"]), (known["other"], known["self"])):
        nothing = is_zeros(zeros) if isinstance(zeros, Node) else zeros == 0
        if isinstance(other, Node) and nothing and _alike(other, node) and known.get("alpha", 1) == 1:
            return other
    return None


def _alike(x: Node, y: Node) -> bool:
    a, b = x.meta["val"], y.meta["val"]
    return bool(a.dtype == b.dtype and a.shape == b.shape)


def scattered_slice(node: Node, build: Build) -> Node | None:
    """slice_scatter(x, y, 0, 0, 4) --> y   where the slice is all of x (a loop over chunks of tokens that runs once)"""
    known = arguments(node)
    if shape_of(known["src"]) == shape_of(known["self"]) and known["step"] == 1:
        return build.cast(known["src"], value_of(node).dtype)
    return scattered_complex(node, build)


def scattered_complex(node: Node, build: Build) -> Node | None:
    """slice_scatter(z, w, 1, 0, 4) --> view_as_complex(slice_scatter(view_as_real(z), view_as_real(w), 1, 0, 4))
    since torch has no derivative of this operator for complex numbers"""
    into = operand(node)
    if not value_of(node).is_complex():
        return None
    known, rank = arguments(node), len(shape_of(into))
    z, w = (_pairs(build, build.cast(known[name], value_of(into).dtype)) for name in ("self", "src"))
    if node.target is aten.diagonal_scatter.default:  # its diagonal is the last dim, after the pairs
        w = build(aten.transpose.int, w, -1, -2)
    where = [x % rank if name.startswith("dim") else x for name, x in known.items() if name not in ("self", "src")]
    return build(aten.view_as_complex.default, build(node.target, z, w, *where))  # type: ignore[arg-type]


def _pairs(build: Build, z: Node) -> Node:
    """[..., 2]. The captured view of a conjugate may still be marked as conjugate."""
    return build(aten.view_as_real.default, build(aten.clone.default, z) if value_of(z).is_conj() else z)


def complex_weight(node: Node, build: Build) -> Node | None:
    """view_as_complex(w) --> complex(select(w, 1, 0), select(w, 1, 1))   of a weight or a view of one: the strides of a
    gathered weight do not allow a view of pairs"""
    x = source = operand(node)
    while source.op == "call_function" and is_view(source.target):
        source = operand(source)
    if source.op != "placeholder":
        return None
    last = len(shape_of(x)) - 1
    return build(aten.complex.default, *(build(aten.select.int, x, last, i) for i in (0, 1)))


def conjugate(node: Node, build: Build) -> Node | None:
    """_conj(z) --> _conj_physical(z)   so that no operator has to check for lazy conjugates"""
    return build(aten._conj_physical.default, operand(node))


def distance(node: Node, build: Build) -> Node | None:
    """dist(x, y, p) --> linalg_vector_norm(sub(x, y), p)"""
    known = arguments(node)
    return build(aten.linalg_vector_norm.default, build(aten.sub.Tensor, known["self"], known["other"]), known["p"])


def distances_of_whole(node: Node, build: Build) -> Node | None:
    """cdist(x, y) --> cdist(x, y, 2.0, 1 or 2)   with matrix products or without, which torch decides by the number of
    rows: of the global tensor here, not of a shard"""
    known = arguments(node)
    if known["compute_mode"]:
        return None
    many = max(shape_of(known[name])[-2] for name in ("x1", "x2")) > 25
    return build(node.target, known["x1"], known["x2"], known["p"], 1 if many else 2)  # type: ignore[arg-type]


def added_products(node: Node, build: Build) -> Node | None:
    """addbmm(x, a, b) --> add(x, einsum("bnm,bmp->np", a, b)); addr(x, u, v) --> add(x, mul(unsqueeze(u, 1), v))"""
    known = arguments(node)
    if "batch1" in known:
        product = build(aten.einsum.default, "bnm,bmp->np", [known["batch1"], known["batch2"]])
    else:
        product = build(aten.mul.Tensor, build(aten.unsqueeze.default, known["vec1"], 1), known["vec2"])
    if known["alpha"] != 1:
        product = build(aten.mul.Tensor, product, known["alpha"])
    if known["beta"] == 0:
        return product
    x = known["self"] if known["beta"] == 1 else build(aten.mul.Tensor, known["self"], known["beta"])
    return build(aten.add.Tensor, x, product)


def channel_shuffle(node: Node, build: Build) -> Node | None:
    """channel_shuffle(x, g) --> reshape(transpose(reshape(x, [n, g, c / g, ...]), 1, 2), [n, c, ...])"""
    groups, (n, c, *space) = arguments(node)["groups"], shape_of(operand(node))
    grouped = build.reshape(operand(node), (n, groups, c // groups, *space))
    return build.reshape(build(aten.transpose.int, grouped, 1, 2), (n, c, *space))


def affine_grid(node: Node, build: Build) -> Node | None:
    """affine_grid_generator(theta, [n, c, h, w], a) --> reshape(matmul(points, transpose(theta, 1, 2)), [n, h, w, 2])
    of points (x, y, 1) [h·w, 3]: the batch comes from theta"""
    known = arguments(node)
    theta, (n, _, *space) = known["theta"], known["size"]
    points = build.reshape(
        _points(build, value_of(theta), space, known["align_corners"]), (math.prod(space), len(space) + 1)
    )
    placed = build(aten.matmul.default, points, build(aten.transpose.int, theta, 1, 2))
    return build.reshape(placed, (n, *space, len(space)))


def _points(build: Build, like: torch.Tensor, space: list[int], align_corners: bool) -> Node:
    """[*space, coordinates and 1]: the coordinate of the last dim comes first. Ends are at -1 and 1, or half a step
    inside."""
    made = {"dtype": like.dtype, "device": like.device}
    columns = [build(aten.ones.default, [*space, 1], **made)]
    for dim, size in enumerate(space):
        end = 0.0 if size == 1 else 1.0 if align_corners else (size - 1) / size
        line = build(aten.linspace.default, -end, end, size, **made)
        line = build.reshape(line, [size if d == dim else 1 for d in range(len(space) + 1)])
        columns.insert(0, build(aten.expand.default, line, [*space, 1]))
    return build(aten.cat.default, columns, -1)


TABLE: dict[Any, Rewrite] = {
    aten._conj.default: conjugate,
    aten.conj.default: conjugate,
    aten.view_as_complex.default: complex_weight,
    aten.slice_scatter.default: scattered_slice,
    aten.select_scatter.default: scattered_complex,
    aten.diagonal_scatter.default: scattered_complex,
    aten.dist.default: distance,
    aten.cdist.default: distances_of_whole,
    aten.addbmm.default: added_products,
    aten.addr.default: added_products,
    aten.channel_shuffle.default: channel_shuffle,
    aten.affine_grid_generator.default: affine_grid,
    aten.convolution.default: convolution,
    aten.ones_like.default: ones_of_a_number,
    aten.add.Tensor: addition,
}


def take_apart(gm: GraphModule, known: Container[Any]) -> None:
    """Decompose composite operators that have neither a rule nor a rewrite (``known``), if each operator of the
    decomposition has one. Otherwise they stay, so that messages and ``replicate_ops`` name what the model calls."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and not _is_known(node, known) and is_composite(node.target):
            parts, operands = decomposition_of(node, fake_mode(gm.graph))
            calls = [part for part in parts.graph.nodes if part.op not in ("placeholder", "output")]
            if all(_is_known(part, known) for part in calls):
                _inline(node, parts, operands)


def _is_known(node: Node, known: Container[Any]) -> bool:
    recipe, writes = recipe_for(node.target)  # of a random operator
    return has_rule(node) or node.target in known or (recipe is not None and not writes)


def _inline(node: Node, parts: GraphModule, operands: list[Node]) -> None:
    """Inline the decomposition. Its values are known already: a recurrence has thousands."""
    made: dict[Node, Any] = dict(zip(placeholders(parts), operands, strict=True))
    for part in parts.graph.nodes:
        if part.op == "call_function":
            args, kwargs = map_arg((part.args, part.kwargs), made.__getitem__)
            made[part] = insert_call(node, part.target, args, kwargs, val=part.meta["val"])
    results: Any = map_arg(output_node(parts).args[0], made.__getitem__)
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def as_strided(node: Node, build: Build) -> Node | None:
    """Index into the dims between the unchanged outer and the unchanged inner ones, if those can be joined to one."""
    known = arguments(node)
    x, made = known["self"], list(zip(known["size"], known["stride"], strict=True))
    shape, offset = shape_of(x), value_of(x).storage_offset()
    own = list(zip(shape, value_of(x).stride(), strict=True))
    if known["storage_offset"] not in (None, offset) or not value_of(x).numel():
        return None
    most_outer, most_inner = _equal_dims(made, own), _equal_dims(made[::-1], own[::-1])
    for outer, inner in itertools.product(range(most_outer, -1, -1), range(most_inner, -1, -1)):
        if outer + inner >= len(shape) or outer + inner > len(made):
            continue
        middle, steps = own[outer : len(own) - inner], made[outer : len(made) - inner]
        unit, count = middle[-1][1], math.prod(n for n, _ in middle)
        one_dim = all(a[1] == b[0] * b[1] for a, b in itertools.pairwise(middle))
        last = sum((n - 1) * stride for n, stride in steps)
        if unit > 0 and one_dim and all(stride % unit == 0 for _, stride in steps) and last < count * unit:
            rows = build.reshape(x, (*shape[:outer], count, *shape[len(shape) - inner :]))
            chosen = _places(build, [(n, stride // unit) for n, stride in steps], value_of(x).device)
            return build.reshape(build(aten.index_select.default, rows, outer, chosen), shape_of(node))
    return None


def _equal_dims(made: list[tuple[int, int]], own: list[tuple[int, int]]) -> int:
    """How many leading dims keep their size and stride."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(made, own, strict=False)))


def _places(build: Build, steps: list[tuple[int, int]], device: torch.device) -> Node:
    """All sums of one multiple of each stride, in order, flat."""
    total = build(aten.full.default, [1] * max(1, len(steps)), 0, dtype=torch.int64, device=device)
    for i, (n, stride) in enumerate(steps):
        counted = build(aten.mul.Tensor, build(aten.arange.default, n, device=device), stride)
        total = build(aten.add.Tensor, total, build.reshape(counted, [n if j == i else 1 for j in range(len(steps))]))
    return build.reshape(total, (math.prod(n for n, _ in steps),))


STRIDED: dict[Any, Rewrite] = {aten.as_strided.default: as_strided}
