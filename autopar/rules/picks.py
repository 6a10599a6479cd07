"""Rules of operators that read, or write, entries at given indices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from autopar.rules.builders import UNARY, broadcast_dims, named_dims, opaque
from autopar.rules.call import Call
from autopar.rules.rule import Cat, Dims, Rule


def gather_rule(call: Call) -> Rule:
    """Dims other than the gathered one pass where operand and index have the same size."""
    dim = call.dim()
    shape, index = call.shape("self"), call.shape("index")
    dims = tuple(call.factor(f"d{i}", n) for i, n in enumerate(shape))
    picked = tuple(dims[i] if i != dim and n == shape[i] else call.factor(f"p{i}", n) for i, n in enumerate(index))
    blocked = {f"d{i}": "gather reads anywhere in it" for i in range(len(shape)) if i == dim or index[i] != shape[i]}
    blocked |= {f: "gather picks less than the dim" for f in call.sizes if f.startswith("p") and f != f"p{dim}"}
    return call.rule([dims, picked], [picked], blocked=blocked, linear=UNARY)


def scatter_add_rule(call: Call) -> Rule:
    """`scatter_rule`, but writes are added: shards of the scattered dim give partial results."""
    rule, dim = scatter_rule(call), call.dim()
    source, index = call.shape("src"), call.shape("index")
    if not index or source[dim] != index[dim]:
        return rule
    (w,) = rule.operands[1][dim] or ("",)  # type: ignore[index, misc]
    if not w:
        return rule
    return replace(rule, blocked={f: why for f, why in rule.blocked.items() if f != w}, addends={0: w})


def scatter_rule(call: Call) -> Rule:
    """Dims other than the scattered one pass where index, source and target have the same size."""
    dim = call.dim()
    shape, index = call.shape("self"), call.shape("index")
    dims = named_dims(call, shape)
    written = tuple(dims[i] if i != dim and n == shape[i] else call.factor(f"w{i}", n) for i, n in enumerate(index))
    why = "scatter writes anywhere in it"
    blocked = {f"d{i}": why for i in range(len(shape)) if i == dim or index[i] != shape[i]}
    blocked |= {f: why for f in call.sizes if f.startswith("w")}
    operands: list[Dims | None] = [dims, written]
    if isinstance(call.args.get("src"), Node):
        larger = [call.factor(f"s{i}", n) for i, n in enumerate(call.shape("src"))]
        operands.append(tuple(written[i] if n == index[i] else larger[i] for i, n in enumerate(call.shape("src"))))
        blocked |= {f: "a slice of it is read" for f in call.sizes if f.startswith("s")}
        blocked |= {f"d{i}": why for i, n in enumerate(call.shape("src")) if n != index[i]}
    return call.rule(operands, [dims], blocked=blocked)


def index_add_rule(call: Call) -> Rule:
    """(.. d ..), (n), (.. n ..) -> (.. d ..): rows are added at the indices. Shards of rows give partial results."""
    dim = call.dim()
    dims = named_dims(call, call.shape("self"))
    n = call.factor("n", call.shape("index")[0] if call.shape("index") else 1)
    source: Dims = (*dims[:dim], n, *dims[dim + 1 :]) if call.shape("source") else ()
    blocked = {f: "rows anywhere in it are written" for f in dims[dim]}
    linear = (frozenset({0, 2}),)
    return call.rule(
        [dims, (n,) if call.shape("index") else (), source],
        [dims],
        blocked=blocked,
        linear=linear,
        addends={0: "n"} if n else {},
    )


def index_copy_rule(call: Call) -> Rule:
    """`index_add_rule`, but rows replace the old ones."""
    rule = index_add_rule(call)
    return replace(rule, blocked=rule.blocked | {"n": "rows anywhere are replaced"}, addends={})


def index_put_rule(call: Call) -> Rule:
    """The mirror of `advanced_index_rule`: values (...), or what broadcasts to them, are written at the indices. With
    accumulation, values may be sharded, which gives partial results; without, the last of equal indices wins, so they
    may not.
    """
    indices = [i for i in call.args["indices"] if i is not None]
    if any(map(_is_bool, indices)):
        return opaque("the number of true mask entries is known only at run time", linear=True)(call)
    rule = advanced_index_rule(replace(call, result_shapes=(_picked_shape(call, indices),)))
    into, *places = rule.operands
    (picked,) = rule.results
    assert into is not None
    given = call.shape("values")
    values = tuple(d if n != 1 else () for d, n in zip(picked[len(picked) - len(given) :], given, strict=True))
    own = [f for dim in picked if not isinstance(dim, Cat) for f in dim if f.startswith("d")]
    added = own[0] if own and call.args["accumulate"] and own[0] in {f for d in values for f in d} else ""  # type: ignore[union-attr]
    return replace(
        rule,
        operands=(into, *places, values),
        results=(into,),
        blocked=rule.blocked | {f: "entries anywhere are written" for f in own if f != added},
        linear=(frozenset({0, len(places) + 1}),),
        addends={0: added} if added else {},
    )


def _picked_shape(call: Call, indices: list[Node]) -> tuple[int, ...]:
    """The shape that indexing with these indices, none of them a mask, returns."""
    named = call.args["indices"]
    at = [d for d, i in enumerate(named) if i is not None]
    rest = [n for d, n in enumerate(call.shape("self")) if d not in at]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    return (*rest[:first], *torch.broadcast_shapes(*map(call.shape_of, indices)), *rest[first:])


def take_rule(call: Call) -> Rule:
    """(any), (...) -> (...): entries at flat indices."""
    source = named_dims(call, call.shape("self"), "x")
    picked = named_dims(call, call.result)
    blocked = {f: "entries anywhere in it are taken" for dim in source for f in dim}
    return call.rule([source, picked], [picked], blocked=blocked, linear=UNARY)


def put_rule(call: Call) -> Rule:
    """The mirror of `take_rule`, replicated: any value may be written to any entry. Linear in both jointly."""
    rule = opaque("entries anywhere in it are written, flat")(call)
    return replace(rule, linear=(frozenset({0, len(rule.operands) - 1}),))


def index_select_rule(call: Call) -> Rule:
    """(.. d ..), (n) -> (.. n ..)."""
    dim = call.dim()
    shape = call.shape("self")
    dims = named_dims(call, shape)
    n = call.factor("n", call.result[dim])
    blocked = {f"d{dim}": "entries anywhere in it are selected"}
    return call.rule([dims, (n,)], [(*dims[:dim], n, *dims[dim + 1 :])], blocked=blocked, linear=UNARY)


def advanced_index_rule(call: Call) -> Rule:
    """x[i, j, :]: indexed dims are blocked, index dims broadcast together, the rest pass."""
    shape = call.shape("self")
    indices: list[Any] = list(call.args["indices"]) + [None] * (len(shape) - len(call.args["indices"]))
    at = [i for i, x in enumerate(indices) if x is not None]
    dims = named_dims(call, shape, "x")
    rest = [d for i, d in enumerate(dims) if i not in at]
    index_shapes = [call.shape_of(indices[i]) for i in at]
    rank = max(len(s) for s in index_shapes)
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    picked_shape = call.result[first : first + rank]
    picked = tuple(call.factor(f"d{i}", n) for i, n in enumerate(picked_shape))
    operands: list[Dims | None] = [dims, *(broadcast_dims(call, s, picked_shape) for s in index_shapes)]
    blocked = {f"x{i}": "entries anywhere in it are indexed" for i in at}
    boolean = any(indices[i].meta["val"].dtype.is_floating_point is False and _is_bool(indices[i]) for i in at)
    if boolean:
        blocked |= {f: "a boolean mask gives a size known only at run time" for f in call.sizes}
    result: Dims = (*rest[:first], *picked, *rest[first:])
    return call.rule(operands, [result], blocked=blocked, linear=UNARY)


def _is_bool(node: Node) -> bool:
    return "bool" in str(node.meta["val"].dtype)
