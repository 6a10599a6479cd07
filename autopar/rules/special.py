"""Rules of particular operators: embedding, losses, experts, selection."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from autopar.ir.conversions import conversion_of, exchange_slice, is_conversion
from autopar.ir.mesh import AXES
from autopar.ir.placement import Shard, extent, repetitions, scaled_blocks
from autopar.rules.builders import UNARY, broadcast_dims, named_dims, opaque
from autopar.rules.call import Call
from autopar.rules.rule import ROUTED, UNITS, Cut, Dims, Rule, RuleError


def embedding_rule(call: Call) -> Rule:
    """(v h), (... ) -> (... h). v is contracted: a rank looks up its own rows and returns zeros for the others."""
    rows, width = call.shape("weight")
    ids = named_dims(call, call.shape("indices"), "i")
    v, h = call.factor("v", rows), call.factor("h", width)
    blocked = {}
    if call.args.get("scale_grad_by_freq"):
        blocked = {f: "gradients are scaled by the frequency of a row in the whole batch" for d in (v, *ids) for f in d}
    return call.rule([(v, h), ids], [(*ids, h)], blocked=blocked, linear=UNARY, one_block=frozenset({"v"}))


def one_hot_rule(call: Call) -> Rule:
    """(...) -> (... c). Without a given number of classes it is the largest value plus one, of the global tensor."""
    numbers = named_dims(call, call.shape("self"), "i")
    c = call.factor("c", int(call.node.meta["val"].shape[-1]))
    blocked = {f: "each number picks one of all classes" for f in c}
    if int(call.args.get("num_classes", -1)) < 0:
        blocked |= {f: "the largest value determines the number of classes" for dim in numbers for f in dim}
    return call.rule([numbers], [(*numbers, c)], blocked=blocked)


def cross_entropy_rule(call: Call) -> Rule:
    """(n c), (n) -> (n), (n). The reduction over classes happens inside: a maximum, and one sum of two numbers per
    row."""
    rows, classes = call.shape("logits")
    n, c = call.factor("n", rows), call.factor("c", classes)
    return call.rule([(n, c), (n,)], [(n,), (n,)], absorbed=frozenset({"c"}), one_block=frozenset({"c"}))


def ctc_loss_rule(call: Call) -> Rule:
    """(t, n, c), (n, s), (n), (n) -> (n)."""
    steps, examples, classes = call.shape("log_probs")
    n, why = call.factor("n", examples), "the loss sums over all alignments"
    log_probs: Dims = (call.factor("t", steps), n, call.factor("c", classes))
    targets = call.shape("targets")
    blocked = {f: why for f in call.sizes if f in "tc"}
    if len(targets) == 1:
        blocked |= {f: "the targets of all examples are concatenated" for f in n}
    of_targets: Dims = (*((n,) if len(targets) == 2 else ()), call.factor("s", targets[-1]))
    blocked |= {"s": why} if "s" in call.sizes else {}
    return call.rule([log_probs, of_targets, (n,), (n,)], [(n,)], blocked=blocked)


def dropout_rule(call: Call) -> Rule:
    """Elementwise: mask and numbers depend on the global position of an element, which lower_to_local passes in."""
    dims = named_dims(call, call.result)
    return call.rule([dims, (), *[None] * (len(call.operands) - 2)], [dims])


def layer_norm_rule(call: Call) -> Rule:
    """(... h), (h), (h) -> (... h); h is blocked."""
    source = call.shape("input")
    dims = named_dims(call, source)
    n = len(call.args["normalized_shape"])
    operands: list[Dims | None] = [dims]
    operands += [dims[len(dims) - n :] for name in ("weight", "bias") if isinstance(call.args.get(name), Node)]
    blocked = {f"d{i}": "the norm's statistics span it" for i in range(len(source) - n, len(source))}
    return call.rule(operands, [dims], blocked=blocked)


def zero_padding_rule(call: Call) -> Rule:
    """(...) -> (...): each row of a piece, or zeros."""
    dims = named_dims(call, call.result)
    return call.rule([dims], [dims], linear=UNARY, keep_partial=True)


def histc_rule(call: Call) -> Rule:
    """(...) -> (b). With given bounds, shards of the values give partial counts."""
    values, b = named_dims(call, call.shape("self")), call.factor("b", call.result[0])
    blocked = {f: "a value may be counted anywhere in it" for f in b}
    if call.args.get("min", 0) == call.args.get("max", 0):
        blocked |= {f: "its bounds depend on all values" for dim in values for f in dim}
    return call.rule([values], [(b,)], blocked=blocked)


def complex_pairs_rule(call: Call) -> Rule:
    """(..., 2) real and (...) complex: the dim of real and imaginary part is the last one."""
    dims = named_dims(call, call.shape_of(call.operands[0]))
    n = len(call.result)
    pair = call.factor("pair", 2)
    result = (*dims, pair) if n > len(dims) else dims[:-1]
    why = "it holds real and imaginary part"
    blocked = {"pair": why} if n > len(dims) else {f: why for f in dims[-1]}
    return call.rule([dims], [result], blocked=blocked, linear=UNARY)


# --- experts ---------------------------------------------------------------------------------------------


def capacity_rule(call: Call) -> Rule:
    """(t k) -> (t k): an expert's capacity is counted over all tokens."""
    dims = named_dims(call, call.shape("expert"))
    return call.rule([dims], [dims], blocked={f: "the places of an expert span all tokens" for d in dims for f in d})


def moe_dispatch_rule(call: Call) -> Rule:
    """x (t, h), expert (t, k) -> rows (t·k, h), order (t·k), offsets (e): every rank sorts its own tokens. Where
    experts are sharded, each rank has the rows of all tokens for its own experts: it gathers the tokens, or receives
    the rows from other ranks."""
    tokens, width = call.shape("x")
    t, h = call.factor("t", tokens), call.factor("h", width)
    k = call.factor("k", call.shape("expert")[1])
    e = call.factor("e", call.result_shapes[2][0])
    own = call.experts
    rows = _rows_of(call, call.result_shapes[0][0], own is not None)
    blocked = {f: "every token goes to several experts" for f in k}
    blocked |= {f: "the order of rows beside the result does not have it" for f in h}
    if not own:
        blocked |= {f: "experts are offsets here" for f in e}
    if call.axis == "tp" or own:
        blocked |= {f: "tokens are gathered before sharded experts" for f in t}
    linked, imposed = _linked(rows, t, e if own else ()), _blocks_of(call, t)
    imposed |= {f: (call.sizes[f],) for f in e if own}
    units = _expert_units(call, e)
    imposed |= {UNITS + f: (units,) for f in e if units}
    made = [(rows, h), (rows,), (e,)]
    return call.rule([(t, h), (t, k)], made, blocked=blocked, rows=linked, imposed=imposed, expert_units=units)


def _expert_units(call: Call, e: tuple[str, ...]) -> int:
    """`Rule.expert_units`."""
    if call.experts is None or call.mesh is None:
        return 0
    return sum(call.sizes[f] for f in e if call.sizes[f] % call.mesh.size(call.axis))


def _blocks_of(call: Call, t: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """How tokens are cut whose copies go to their experts: as the dispatch has them."""
    if call.experts is None or not call.experts.sends_tokens:
        return {}
    return {f: call.seen or (call.sizes[f],) for f in t}


def _rows_of(call: Call, rows: int, own: bool) -> tuple[str, ...]:
    """The dim of rows: each token times k. Unknown for rows of a rank's own experts."""
    t, k = call.sizes.get("t", 1), call.sizes.get("k", 1)
    if not own and rows == t * k:
        return (*call.factor("t", t), *call.factor("k", k))
    return call.factor("n", rows)


def _linked(*factors: tuple[str, ...]) -> tuple[str, str, str]:
    """`Rule.rows`."""
    rows, tokens, experts = ("".join(f) if len(f) == 1 else "" for f in factors)
    return (rows, tokens, experts) if rows == "n" else ("", "", "")


def grouped_mm_rule(call: Call) -> Rule:
    """rows (n, i), weight (e, o, i) or (e, i, o), offsets (e) -> (n, o)."""
    rows, width = call.shape("rows")
    experts, a, b = call.shape("weight")
    n, i, e = call.factor("n", rows), call.factor("i", width), call.factor("e", experts)
    o = call.factor("o", a if not call.args["transposed"] else b)
    weight: Dims = (e, i, o) if call.args["transposed"] else (e, o, i)
    sets, adds = (frozenset({0}), frozenset({1})), {2: "n"} if n else {}
    linked, blocked = _linked(n, (), e), _experts_blocked(call, e)
    how: dict[str, Any] = {"blocked": blocked, "addends": adds, "rows": linked, "expert_units": _expert_units(call, e)}
    return call.rule([(n, i), weight, (e,)], [(n, o)], linear=sets, **how)


def scaled_grouped_mm_rule(call: Call) -> Rule:
    """`grouped_mm_rule` with scales of the shapes of rows and weight, but one, or one for each block, along i."""
    rule = grouped_mm_rule(call)
    scales = [
        tuple(() if size == 1 else dim for size, dim in zip(call.shape(name), dims or (), strict=True))
        for name, dims in zip(("scale_rows", "scale_weight"), rule.operands)
    ]
    operands, linear = (*rule.operands[:2], *scales, rule.operands[2]), tuple(frozenset({i}) for i in range(4))
    return dataclasses.replace(rule, operands=operands, linear=linear)


def grouped_mm_by_offsets_rule(call: Call) -> Rule:
    """rows (n, i), weight (e, i, o), offsets (e) -> (n, o). Offsets count all rows."""
    n, i = (call.factor(f, size) for f, size in zip("ni", call.shape("rows"), strict=True))
    e, o = call.factor("e", call.shape("weight")[0]), call.factor("o", call.shape("weight")[2])
    blocked = {f: "offsets say which of all rows are an expert's" for f in (*n, *e)}
    sets = (frozenset({0}), frozenset({1}))
    return call.rule([(n, i), (e, i, o), (e,)], [(n, o)], blocked=blocked, linear=sets)


def scaled_mm_rule(call: Call) -> Rule:
    """self (m, k), mat2 (k, n), scales () or (m, 1) and (1, n), bias (n) -> (m, n). k is not cut: partial sums would be
    rounded to the result's dtype. Raises RuleError for scales of blocks."""
    (m, k), n = call.shape("self"), call.shape("mat2")[1]
    rows, inner, columns = call.factor("m", m), call.factor("k", k), call.factor("n", n)
    operands: list[Dims | None] = [(rows, inner), (inner, columns)]
    for name, shape, dims in (("scale_a", (m, 1), (rows, ())), ("scale_b", (1, n), ((), columns))):
        given = call.shape(name)
        if math.prod(given) != 1 and given != shape:
            raise RuleError(f"{name} has scales of blocks, {list(given)}, which can not be cut with their operand")
        operands.append(dims if given == shape else tuple(() for _ in given))
    operands += [(columns,)] if isinstance(call.args.get("bias"), Node) else []
    operands += (
        [tuple(() for _ in call.shape("scale_result"))] if isinstance(call.args.get("scale_result"), Node) else []
    )
    blocked = dict.fromkeys(inner, "partial sums would be rounded to the result's dtype")
    return call.rule(operands, [(rows, columns)], blocked=blocked)


def block_scaled_mm_rule(call: Call) -> Rule:
    """a (m, k), b (k, n), scales (m, 1) and (1, n), or (m, k) and (k, n) in blocks -> (m, n): linear in each alone."""
    (m, k), n = call.shape("a"), call.shape("b")[1]
    rows, inner, columns = call.factor("m", m), call.factor("k", k), call.factor("n", n)
    found: list[Dims | None] = [(rows, inner), (inner, columns)]
    for name, dims in (("scale_a", (rows, inner)), ("scale_b", (inner, columns))):
        found.append(tuple(() if size == 1 else dim for size, dim in zip(call.shape(name), dims, strict=True)))
    return call.rule(found, [(rows, columns)], linear=tuple(frozenset({i}) for i in range(len(found))))


def grouped_bias_rule(call: Call) -> Rule:
    """rows (n, o) + bias (e, o) of the row's expert."""
    rows, width = call.shape("rows")
    n, o, e = call.factor("n", rows), call.factor("o", width), call.factor("e", call.shape("bias")[0])
    linked, blocked, adds = _linked(n, (), e), _experts_blocked(call, e), {2: "n"} if n else {}
    how: dict[str, Any] = {"blocked": blocked, "addends": adds, "rows": linked, "expert_units": _expert_units(call, e)}
    return call.rule([(n, o), (e, o), (e,)], [(n, o)], **how)


def _experts_blocked(call: Call, e: tuple[str, ...]) -> dict[str, str]:
    if call.of_step or call.experts is not None:
        return {}
    return dict.fromkeys(e, "sharded by expert parallelism, through the dispatch")


def moe_combine_rule(call: Call) -> Rule:
    """rows (t·k, h), order (t·k), weights (t, k) -> (t, h): partial for rows of a rank's own experts, or, where these
    return to the ranks of their tokens, the tokens of these. Then experts (t, k) say where."""
    tokens, top = call.shape("weights")
    t, k = call.factor("t", tokens), call.factor("k", top)
    h = call.factor("h", call.shape("rows")[1])
    own = call.experts is not None
    rows = _rows_of(call, call.shape("rows")[0], own)
    blocked = {f: "the experts of a token are summed" for f in k}
    order = call.args["order"]
    made_so = is_conversion(order) and conversion_of(order)[0] == call.axis
    if call.axis == "tp" or own or made_so or call.seen is False:
        # a slice of all rows does not have the rows of a slice of the tokens
        blocked |= {f: "rows are sorted by expert, so only the rank that sorted them knows their tokens" for f in t}
    operands = [(rows, h), (rows,), (t, k), (t, k)][: len(call.operands)]
    sets = (frozenset({0}),)
    linked, imposed = _linked(rows, t, ()), _blocks_of(call, t)
    if imposed:
        imposed |= {ROUTED + n: () for n in rows}
    return call.rule(operands, [(t, h)], blocked=blocked, linear=sets, keep_partial=True, rows=linked, imposed=imposed)


def ask_experts_rule(call: Call) -> Rule:
    """x (t, h), expert (t, k), weights (t, k) -> (t, h): data ranks and token slices ask for tokens of their own; the
    ranks of other axes have the same tokens, and ask once."""
    tokens, width = call.shape("x")
    t, h = call.factor("t", tokens), call.factor("h", width)
    blocked = {f: "experts are asked for whole tokens" for f in h}
    operands: list[Dims | None] = [(t, h)]
    if isinstance(call.args["expert"], Node):
        k = call.factor("k", call.shape("expert")[1])
        blocked |= {f: "every token goes to several experts" for f in k}
        operands += [(t, k), (t, k)]
    if call.axis not in ("dp", "dp_replicate", "sl"):
        blocked |= {f: "ranks of this axis ask together" for f in t}
    return call.rule(operands, [(t, h)], blocked=blocked)


# --- selection ------------------------------------------------------------------------------------------


def where_rule(call: Call) -> Rule:
    """Elementwise; linear in its two branches jointly, and in one where the other is zero."""
    branches = [call.args[name] for name in ("self", "other")]
    tensors = [x for x in branches if isinstance(x, Node)]
    linear = bool(tensors) and all(isinstance(x, Node) or x == 0 for x in branches)
    dims = [broadcast_dims(call, call.shape_of(x), call.result) for x in call.operands]
    first = len(dims) - len(tensors)
    sets = (frozenset(range(first, len(dims))),) if linear else ()
    return call.rule(dims, [named_dims(call, call.result)], linear=sets)


def masked_fill_rule(call: Call) -> Rule:
    """Elementwise; linear where it fills with zero."""
    dims = [broadcast_dims(call, call.shape_of(x), call.result) for x in call.operands]
    zero = len(dims) == 2 and call.args["value"] == 0
    return call.rule(dims, [named_dims(call, call.result)], linear=UNARY if zero else ())


def masked_scatter_rule(call: Call) -> Rule:
    """x (b, ..., h), mask (b, ..., h or 1), source (b·k, ..., h) -> x, whose entries under the mask are taken from the
    source in order. Examples may be sharded if each has its own rows of the source, which is checked at run time
    (`watch_count`); the width, if the mask is the same for all of it."""
    shape, mask, source = call.shape("self"), call.shape("mask"), call.shape("source")
    dims = named_dims(call, shape)
    own = len(shape) > 1 and source[:1] != () and source[0] % shape[0] == 0
    k = call.factor("k", source[0] // shape[0]) if own else call.factor("n", source[0] if source else 1)
    wide = len(shape) > 1 and len(source) > 1 and source[-1] == shape[-1] and (not mask or mask[-1] == 1)
    middle = [call.factor(f"m{i}", n) for i, n in enumerate(source[1 : len(source) - wide])]
    taken: Dims = ((*(dims[0] if own else ()), *k), *middle, *([dims[-1]] if wide else []))
    free = {*(dims[0] if own else ()), *(dims[-1] if wide else ())}
    blocked = {f: "the source fills it in order" for f in call.sizes if f not in free}
    return call.rule(
        [dims, broadcast_dims(call, mask, shape), taken], [dims], blocked=blocked, linear=(frozenset({0, 2}),)
    )


def filled_rows_rule(call: Call) -> Rule:
    """rows (b·k, w...), mask (b, s...) -> (b, s..., w...): examples may be sharded if each has as many rows, which is
    checked at run time."""
    rows, mask = call.shape("rows"), call.shape("mask")
    own = bool(mask) and rows[0] % mask[0] == 0
    b, k = call.factor("b", mask[0]), call.factor("k" if own else "n", rows[0] // mask[0] if own else rows[0])
    places = [call.factor(f"s{i}", n) for i, n in enumerate(mask[1:])]
    width = [call.factor(f"w{i}", n) for i, n in enumerate(rows[1:])]
    free = {*(b if own else ()), *(f for dim in width for f in dim)}
    blocked = {f: "rows fill it in order" for f in call.sizes if f not in free}
    taken: Dims = ((*(b if own else ()), *k), *width)
    return call.rule([taken, (b, *places)], [(b, *places, *width)], blocked=blocked, linear=(frozenset({0}),))


def placed_rows_rule(call: Call) -> Rule:
    """rows (b·k, w...), selected (b·k), places (b, s...) -> (b, s..., w...): examples may be sharded if each has as
    many selected rows as places, which is checked at run time."""
    rows, places = call.shape("rows"), call.shape("places")
    own = rows[0] % places[0] == 0
    b, k = call.factor("b", places[0]), call.factor("k" if own else "n", rows[0] // places[0] if own else rows[0])
    others = [call.factor(f"s{i}", n) for i, n in enumerate(places[1:])]
    width = [call.factor(f"w{i}", n) for i, n in enumerate(rows[1:])]
    taken = (*(b if own else ()), *k)
    free = {*(b if own else ()), *(f for dim in width for f in dim)}
    blocked = {f: "rows are placed in order" for f in call.sizes if f not in free}
    return call.rule(
        [(taken, *width), (taken,), (b, *others)], [(b, *others, *width)], blocked=blocked, linear=(frozenset({0}),)
    )


def dealt_rows_rule(call: Call) -> Rule:
    """x (d, m, f, w), splits (d, m, 2, d') -> (d, m, t, w): ranks of the axis that the call names exchange rows."""
    shape, rows = call.shape("x"), call.result[2]
    d, m, f, w = (call.factor(name, size) for name, size in zip("dmfw", shape, strict=True))
    way, to, t = call.factor("way", 2), call.factor("to", call.shape("splits")[3]), call.factor("t", rows)
    blocked = {name: "rows for any rank stand in it" for name in (*f, *t, *way, *to)}
    if call.axis != call.args["axis"]:
        blocked |= {name: "its entries exchange rows" for name in d}
    linear = (frozenset({0}),)
    return call.rule([(d, m, f, w), (d, m, way, to)], [(d, m, t, w)], blocked=blocked, linear=linear)


# --- losses ----------------------------------------------------------------------------------------------


def multi_margin_rule(call: Call) -> Rule:
    """x (n, c), target (n), weight (c) -> (n), if it is not reduced."""
    if call.args["reduction"] != 0:
        return opaque("the loss reduces over all examples")(call)
    *n, c = named_dims(call, call.shape("self"))
    operands: list[Dims | None] = [(*n, c), (*n,), (c,)]
    blocked = dict.fromkeys(c, "a margin is to all other classes")
    return call.rule(operands[: len(call.operands)], [(*n,)], blocked=blocked)


# --- structure -------------------------------------------------------------------------------------------


def getitem_rule(call: Call) -> Rule:
    """One of several results. The tuple's own results have the placements."""
    dims = named_dims(call, call.result)
    return call.rule([dims], [dims], linear=UNARY, keep_partial=True)


def conversion_of_other_axis(call: Call) -> Rule:
    """convert(x, axis, src, dst) as another axis sees it: a linear op in which only the converted dims are special."""
    axis, src, dst = conversion_of(call.node)
    if AXES.index(axis) < AXES.index(call.axis):  # outer axes shard later, within these shards: invisible from here
        dims = named_dims(call, call.result)
        return call.rule([dims], [dims], linear=UNARY, keep_partial=True)
    source, result = call.shape_of(call.operands[0]), call.result
    touched = {p.dim: p for p in (src, dst) if isinstance(p, Shard)}
    dims_in, dims_out = [], []
    blocked: dict[str, str] = {}
    for i, (a, b) in enumerate(zip(source, result, strict=True)):
        if i not in touched:
            d = call.factor(f"d{i}", a)
            dims_in.append(d)
            dims_out.append(d)
            continue
        within = math.prod(pieces for dim, pieces in call.seen[1] if dim == i)
        outer = _repetitions(touched[i], max(a, b) * within)
        major = call.factor(f"d{i}", outer)
        unit = _unit(call, i, a, (a // outer, b // outer))
        # Shards that are equal on all ranks; token slices may differ.
        shared = 1 if axis == "sl" or call.node.target is exchange_slice else min(a, b) // outer // unit
        piece, minor = call.factor(f"piece{i}", shared), call.factor(f"unit{i}", unit)
        rows = (("in", a // outer // unit), ("out", b // outer // unit))
        ranks_in, ranks_out = (call.factor(f"{way}{i}", n // shared) for way, n in rows)
        blocked |= {f: "another axis converts it" for f in (*ranks_in, *ranks_out)}
        if len(touched[i].blocks) > repetitions(touched[i].blocks):  # shards of several blocks do not lie side by side
            blocked |= dict.fromkeys(piece, "another axis converts several blocks of it, each for itself")
        dims_in.append((*major, *ranks_in, *piece, *minor))
        dims_out.append((*major, *ranks_out, *piece, *minor))
    return call.rule([tuple(dims_in)], [tuple(dims_out)], blocked=blocked, linear=UNARY, keep_partial=True)


def _unit(call: Call, dim: int, size: int, pieces: tuple[int, int]) -> int:
    """Rows of a unit that is sharded in the same way each time (tokens of a sequence): converting whole units keeps the
    sharding."""
    given, _ = call.seen
    if not isinstance(given, Shard) or given.dim != dim or repetitions(given.blocks) == 1:
        return 1
    unit = size // repetitions(given.blocks)
    return 1 if any(piece % unit for piece in pieces) else unit


def _repetitions(placement: Shard, size: int) -> int:
    """How often the pattern of a Shard's blocks repeats in a dim of local size ``size`` (as if axes in between had not
    sharded each repetition)."""
    taken = max(1, extent(placement.blocks) // size)
    return max(1, repetitions(placement.blocks) // taken)


@dataclass(frozen=True)
class LinkedRule(Rule):
    """A rule with two factors that are sharded together or not at all: queries and keys of attention over sharded
    sequences. ``dealt``: the blocks of each, whose ratios are those that the algorithm was planned for. Operands with
    other blocks (keys joined from two sequences, each sharded) are converted."""

    linked: tuple[str, str] = ("s", "t")
    dealt: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def completed(self, cut: Cut) -> Cut:
        full = super().completed(cut)
        if any(f in full for f in self.linked):
            for factor, blocks in zip(self.linked, self.dealt):
                planned = scaled_blocks(blocks, self.sizes[factor]) or (self.sizes[factor],)
                if full.setdefault(factor, planned) != planned:
                    raise RuleError(f"{full[factor]} of {factor} is not the planned layout of its sequence: {planned}")
        return full


def attention_rule(call: Call) -> Rule:
    """q (b, hk·g, s, d), k (b, hk, t, d), v (b, hk, t, e) -> (b, hk·g, s, e), (b, hk·g, s). Heads and batch may be
    sharded; so may queries into token slices (axis "sl") if each attends to keys of its own or earlier slices only; so
    may queries and keys together on axis "cp", if an algorithm is planned for it (``meta["dealt"]``).
    """
    batch, heads, queries, width = call.shape("q")
    _, kv_heads, keys, _ = call.shape("k")
    b, s, t = call.factor("b", batch), call.factor("s", queries), call.factor("t", keys)
    d, e = call.factor("d", width), call.factor("e", call.shape("v")[3])
    hk, g = call.factor("hk", kv_heads), call.factor("g", heads // kv_heads)
    h = (*hk, *g)
    all_keys = call.factor("all", keys) if call.axis == "cp" else t  # masks cover the whole sequence
    full: Dims = (b, h, s, all_keys)
    optional: dict[str, Dims] = {"sinks": (h,), "key_mask": (b, all_keys), "segments": (b, all_keys)}
    operands: list[Dims | None] = [(b, h, s, d), (b, hk, t, d), (b, hk, t, e)]
    for name in ("bias", "key_mask", "segments", "sinks", "seed"):
        if isinstance(call.args.get(name), Node):
            shape = call.shape(name)
            if name == "bias":
                operands.append(_aligned(call, shape, full, (batch, heads, queries, keys)))
            elif name == "seed":
                operands.append(())
            else:
                operands.append(tuple(() if n == 1 else dim for n, dim in zip(shape, optional[name], strict=True)))
    operands += [None] * (len(call.operands) - len(operands))
    blocked = _mixed(call, s, t)
    blocked |= {f: "the mask covers all keys" for f in all_keys if f not in t}
    blocked |= {f: "attention contracts it before a softmax" for f in d}
    blocked |= {f: "the log-sum-exp beside the result does not have it" for f in e}
    rule = call.rule(operands, [(b, h, s, e), (b, h, s)], blocked=blocked)
    dealt = call.node.meta.get("dealt")
    if call.axis == "cp" and dealt is not None and not call.relaxed:
        return LinkedRule(**vars(rule), dealt=dealt)
    return rule


def _mixed(call: Call, s: tuple[str, ...], t: tuple[str, ...]) -> dict[str, str]:
    """Which of queries and keys cannot be sharded, and why."""
    if call.axis == "sl":
        causal = call.args["causal"] and call.shape("q")[2] == call.shape("k")[2]
        return {f: "queries attend to later tokens: no causal flag is set" for f in (t if causal else (*s, *t))}
    if call.axis == "cp" and (call.relaxed or "dealt" in call.node.meta):
        return {}
    return {f: "attention mixes it; context parallelism shards it" for f in (*s, *t)}


def _aligned(call: Call, shape: tuple[int, ...], full: Dims, sizes: tuple[int, ...]) -> Dims:
    offset = len(full) - len(shape)
    return tuple(full[i + offset] if n == sizes[i + offset] and n != 1 else () for i, n in enumerate(shape))
