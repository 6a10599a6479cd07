"""Rules of operators that only rearrange: reshapes, permutations, splits, concatenations, slices."""

from __future__ import annotations

import math
from itertools import pairwise, takewhile

from autopar.rules.builders import UNARY, named_dims
from autopar.rules.call import Call, Shape
from autopar.rules.rule import Cat, Dim, Dims, Rule


def reshape_rule(call: Call) -> Rule:
    """(4, 32) -> (4, 8, 4): dims split into and merged from common factors."""
    source, target, blocked = common_factors(call, call.shape_of(call.operands[0]), call.result)
    return call.rule([source], [target], blocked=blocked, linear=UNARY, keep_partial=True)


def common_factors(call: Call, source: Shape, target: Shape) -> tuple[Dims, Dims, dict[str, str]]:
    """Factors of two shapes of equal size. Groups of dims whose boundaries do not divide each other are blocked."""
    if 0 in source:
        return _of_nothing(call, source, target)
    blocked: dict[str, str] = {}
    left: list[tuple[str, ...]] = [() for _ in source]
    right: list[tuple[str, ...]] = [() for _ in target]
    a = [i for i, s in enumerate(source) if s != 1]
    b = [i for i, s in enumerate(target) if s != 1]
    group = 0
    while a and b:
        take_a, take_b = [a.pop(0)], [b.pop(0)]
        while math.prod(source[i] for i in take_a) != math.prod(target[i] for i in take_b):
            if math.prod(source[i] for i in take_a) < math.prod(target[i] for i in take_b):
                take_a.append(a.pop(0))
            else:
                take_b.append(b.pop(0))
        _factor_group(call, [source[i] for i in take_a], [target[i] for i in take_b], group, blocked)
        for dims, taken, shape in ((left, take_a, source), (right, take_b, target)):
            for i in taken:
                dims[i] = _factors_between(call, group, [shape[j] for j in taken], taken.index(i))
        group += 1
    return tuple(left), tuple(right), blocked


def _of_nothing(call: Call, source: Shape, target: Shape) -> tuple[Dims, Dims, dict[str, str]]:
    """An empty tensor keeps its leading dims; how the others correspond is undetermined."""
    same = list(takewhile(lambda pair: pair[0] == pair[1] != 0, zip(source, target)))
    lead = [call.factor(f"d{i}", size) for i, (size, _) in enumerate(same)]
    left, right = ((*lead, *((),) * (len(shape) - len(lead))) for shape in (source, target))
    return left, right, {}


def _suffixes(sizes: list[int]) -> list[int]:
    """Products of the sizes after each position: (4, 8) -> [32, 8, 1]."""
    return [math.prod(sizes[i:]) for i in range(len(sizes) + 1)]


def _factor_group(call: Call, left: list[int], right: list[int], group: int, blocked: dict[str, str]) -> None:
    """Name the factors between all boundaries of both sides: g0_8 is the factor right above the boundary at 8."""
    bounds = sorted({*_suffixes(left), *_suffixes(right)}, reverse=True)
    for outer, inner in pairwise(bounds):
        name = f"g{group}_{inner}"
        if outer % inner:
            # (6, 4) -> (8, 3): no common factors; the whole group stays together
            for other in pairwise(bounds):
                call.sizes[f"g{group}_{other[1]}"] = max(other[0] // other[1], 1)
                blocked[f"g{group}_{other[1]}"] = f"the reshape {left} -> {right} mixes it"
            return
        call.sizes[name] = outer // inner


def _factors_between(call: Call, group: int, sizes: list[int], position: int) -> tuple[str, ...]:
    outer, inner = _suffixes(sizes)[position : position + 2]
    bounds = sorted((int(f.split("_")[1]) for f in call.sizes if f.startswith(f"g{group}_")), reverse=True)
    return tuple(f"g{group}_{b}" for b in bounds if inner <= b < outer)


def _permutation(call: Call, order: list[int]) -> Rule:
    dims = named_dims(call, call.shape_of(call.operands[0]))
    return call.rule([dims], [tuple(dims[i] for i in order)], linear=UNARY, keep_partial=True)


def permute_rule(call: Call) -> Rule:
    """(a, b, c) -> (c, a, b): factors move with their dims."""
    rank = len(call.shape("self"))
    return _permutation(call, [d % rank for d in call.args["dims"]])


def transpose_rule(call: Call) -> Rule:
    """Two dims change places."""
    order = list(range(len(call.shape("self"))))
    a, b = call.dim("dim0"), call.dim("dim1")
    order[a], order[b] = order[b], order[a]
    return _permutation(call, order)


def t_rule(call: Call) -> Rule:
    """(a, b) -> (b, a)"""
    return _permutation(call, list(reversed(range(len(call.shape("self"))))))


def expand_rule(call: Call) -> Rule:
    """A new dim, or one of size 1 that grows, is a factor of the result only."""
    shape, result = call.shape("self"), call.result
    offset = len(result) - len(shape)
    target = named_dims(call, result)
    source = tuple(target[i + offset] if size == result[i + offset] else () for i, size in enumerate(shape))
    return call.rule([source], [target], linear=UNARY, keep_partial=True)


def split_rule(call: Call) -> Rule:
    """The split dim is the concatenation of the results: all are sharded or none."""
    dim = call.dim()
    dims: list[Dim] = list(named_dims(call, call.shape("self")))
    parts = [f"part{i}" for i in range(len(call.result_shapes))]
    results = []
    for part, shape in zip(parts, call.result_shapes, strict=True):
        call.sizes[part] = shape[dim]
        results.append(tuple(((part,) if i == dim else d) for i, d in enumerate(dims)))
    dims[dim] = Cat(tuple(parts))
    return call.rule([tuple(dims)], results, linear=UNARY, keep_partial=True)


def cat_rule(call: Call) -> Rule:
    """The mirror of `split_rule`."""
    shapes = [call.shape_of(x) for x in call.operands]
    dim = int(call.args["dim"]) % len(call.result)
    result: list[Dim] = [call.factor(f"d{i}", s) if i != dim else () for i, s in enumerate(call.result)]
    operands: list[Dims | None] = []
    parts = []
    for i, shape in enumerate(shapes):
        if len(shape) != len(call.result):  # torch's legacy empty operand
            operands.append(None)
            continue
        call.sizes[f"part{i}"] = shape[dim]
        parts.append(f"part{i}")
        operands.append(tuple((f"part{i}",) if j == dim else result[j] for j in range(len(shape))))
    result[dim] = Cat(tuple(parts))
    return call.rule(operands, [tuple(result)], linear=(frozenset(range(len(shapes))),), keep_partial=True)


def stack_rule(call: Call) -> Rule:
    """A new dim of separate values; the others are shared."""
    dim = int(call.args["dim"]) % len(call.result)
    inner = named_dims(call, call.shape_of(call.operands[0]))
    call.sizes["stacked"] = call.result[dim]
    result = (*inner[:dim], ("stacked",), *inner[dim:])
    return call.rule(
        [inner for _ in call.operands],
        [result],
        blocked={"stacked": "stack creates it from separate values"},
        linear=(frozenset(range(len(call.operands))),),
        keep_partial=True,
    )


def dropped_dim(call: Call) -> Rule:
    """select, unbind: one dim is removed, and may not be sharded."""
    dim = call.dim()
    dims = named_dims(call, call.shape("self"))
    result = dims[:dim] + dims[dim + 1 :]
    return call.rule(
        [dims],
        [result for _ in call.result_shapes],
        blocked={f"d{dim}": "single entries of it are selected"},
        linear=UNARY,
        keep_partial=True,
    )


def resized_dims(call: Call) -> Rule:
    """slice, pad, index_select, flip, roll: dims that change size, or are reordered, are blocked; others pass."""
    shape, result = call.shape("self"), call.result
    dims = named_dims(call, shape)
    touched = _touched(call, shape, result)
    target = tuple(call.factor(f"n{i}", s) if i in touched else dims[i] for i, s in enumerate(result))
    blocked = {f"d{i}": f"{call.node.target} slices or reorders it" for i in touched}
    blocked |= {f"n{i}": "it is a slice" for i in touched}
    operands: list[Dims | None] = [dims, *([None] * (len(call.operands) - 1))]
    zero_fill = call.args.get("value") in (None, 0, 0.0)
    return call.rule(operands, [target], blocked=blocked, linear=UNARY if zero_fill else (), keep_partial=zero_fill)


def _touched(call: Call, shape: Shape, result: Shape) -> set[int]:
    touched = {i for i, (a, b) in enumerate(zip(shape, result, strict=True)) if a != b}
    padding = call.args.get("pad")  # from the last dim forwards, in pairs; (1, -1) shifts and keeps the size
    touched |= {len(shape) - 1 - i // 2 for i, width in enumerate(padding or ()) if width}
    for name in ("dim", "dims"):
        value = call.args.get(name)
        if value is not None and not (name == "dim" and call.node.target.__name__.startswith("slice") and not touched):  # type: ignore[union-attr]
            touched |= {int(d) % len(shape) for d in (value if isinstance(value, (list, tuple)) else [value])}
    if call.args.get("dims") == []:
        touched = set(range(len(shape)))
    return touched


def scatter_into(call: Call) -> Rule:
    """slice_scatter, select_scatter: the written dim is blocked, the others are shared with the source."""
    dims = named_dims(call, call.shape("self"))
    dim = call.dim()
    source_shape = call.shape("src")
    if len(source_shape) == len(dims):
        source = tuple(call.factor("written", source_shape[dim]) if i == dim else d for i, d in enumerate(dims))
    else:
        source = dims[:dim] + dims[dim + 1 :]
    blocked = {f"d{dim}": "a slice of it is written", "written": "it is a slice"}
    return call.rule([dims, source], [dims], blocked=blocked, linear=(frozenset({0, 1}),), keep_partial=True)


_COPIES = "every rank repeats it"


def repeat_interleave_rule(call: Call) -> Rule:
    """(hk) -> (hk, r) on one dim; on the flattened tensor, if none is named."""
    shape = call.shape("self")
    dims = named_dims(call, shape)
    if call.args["dim"] is None:
        call.sizes["repeat"] = call.result[0] // math.prod(shape)
        flat = (*(f for d in dims for f in d), "repeat")
        return call.rule([dims], [(flat,)], blocked={"repeat": _COPIES}, linear=UNARY, keep_partial=True)
    dim = call.dim()
    repeats = call.result[dim] // shape[dim]
    call.sizes["repeat"] = repeats
    target = tuple((*d, "repeat") if i == dim else d for i, d in enumerate(dims))
    return call.rule([dims], [target], blocked={"repeat": _COPIES}, linear=UNARY, keep_partial=True)


def repeat_rule(call: Call) -> Rule:
    """(s) -> (r, s) on every repeated dim."""
    shape, result = call.shape("self"), call.result
    lead = len(result) - len(shape)
    dims = named_dims(call, shape)
    target: list[Dim] = []
    for i, size in enumerate(result):
        inner = dims[i - lead] if i >= lead else ()
        times = size // (shape[i - lead] if i >= lead else 1)
        target.append((*call.factor(f"repeat{i}", times), *inner))
    blocked = {f: _COPIES for f in call.sizes if f.startswith("repeat")}
    return call.rule([dims], [tuple(target)], blocked=blocked, linear=UNARY, keep_partial=True)
