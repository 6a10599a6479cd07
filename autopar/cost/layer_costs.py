"""What the layers of a model compute, send and keep, as functions of the rows of a microbatch.

    graph_work(gm, mesh)         what one graph does: products, attention, element-wise operators, exchanges
    model_costs(samples, ...)    of each kind of layer, and of everything outside of layers

Samples are compiled models with few layers, each for two numbers of rows. All costs are affine in the layers of each
kind and in rows, so that samples of one and two layers determine those of any number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.fx import GraphModule, Node

from autopar.cost.attention_costs import is_context_attention, sent_by
from autopar.cost.flops import (
    ATTENTION,
    PRODUCT,
    flops,
    is_backward_attention,
    is_lookup,
    kind_of,
    memory_bytes,
    tiled_flops,
)
from autopar.cost.layout import Placement
from autopar.cost.memory import Memory
from autopar.cost.traffic import transfer
from autopar.ir.graph import arguments, nbytes, shape, tensor_operands
from autopar.ir.mesh import Mesh
from autopar.ir.traffic import KINDS

Floats = NDArray[np.float64]
Way = tuple[str, str]  # axis, kind of collective
Solver = Callable[[Sequence[Floats]], Floats]  # values of samples -> of everything outside of layers, and of each kind

SCALARS = ("moved", "fused", "kernels", "fused_kernels")


@dataclass(frozen=True)
class RawWork:
    """What a graph does, in its order. products: (FLOPs in whole tiles, FLOPs, bytes) of each. attention: (FLOPs of
    allowed pairs, FLOPs of all pairs, elements of the scores, whether it is of the backward). scalars: bytes that
    element-wise operators move, the same if those between the same products are fused, kernels, and fused kernels.
    sent: axis and kind -> (calls, bytes)."""

    products: tuple[tuple[float, ...], ...]
    attention: tuple[tuple[float, ...], ...]
    scalars: tuple[float, ...]
    sent: Mapping[Way, tuple[float, float]]


# --- one graph -----------------------------------------------------------------------------------------------


def graph_work(gm: GraphModule, mesh: Mesh, again: bool | None = None) -> RawWork:
    """What a graph does. ``again``: only what the backward computes once more, or only the rest."""
    nodes = [n for n in gm.graph.nodes if again is None or bool(n.meta.get("again")) == again]
    nodes.sort(key=lambda node: node.name)  # graphs of other sizes are ordered otherwise, and compared call by call
    products: list[tuple[float, ...]] = []
    attention: list[tuple[float, ...]] = []
    sent: dict[Way, tuple[float, float]] = {}
    moved = plain = 0
    for node in nodes:
        for way, calls, size in _exchanges(node, mesh):
            before = sent.get(way, (0.0, 0.0))
            sent[way] = before[0] + calls, before[1] + size
        kind = kind_of(node)
        if kind == PRODUCT:
            products.append((tiled_flops(node), float(flops(node)), float(memory_bytes(node))))
        elif kind == ATTENTION:
            attention.append(_attention(node))
        elif kind:
            moved += memory_bytes(node)
            plain += 1
    fused, groups = _fused(gm, set(nodes))
    heavy = len(products) + len(attention)
    return RawWork(tuple(products), tuple(attention), (moved, fused, plain + heavy, groups + heavy), sent)


def _attention(node: Node) -> tuple[float, ...]:
    args = arguments(node)
    q, k = (shape(args[long] if long in args else args[long[0]]) for long in ("query", "key"))
    v = shape(args["value"] if "value" in args else args["v"])
    backward = is_backward_attention(node)
    scores = float(math.prod(q[:-1]) * k[-2])
    widths = (3 * q[-1] + 2 * v[-1]) if backward else q[-1] + v[-1]
    return float(flops(node)), 2 * scores * widths * args.get("size", 1), scores * args.get("size", 1), float(backward)


def _exchanges(node: Node, mesh: Mesh) -> list[tuple[Way, float, float]]:
    if is_context_attention(node):
        axis = str(arguments(node)["axis"])
        return [((axis, kind), float(calls), float(size)) for kind, (calls, size) in sent_by(node).items()]
    found = transfer(node, mesh)
    if found is None or found.kind not in KINDS or mesh.size(found.axis) < 2:
        return []
    return [((found.axis, found.kind), 1.0, float(found.bytes))]


def _fused(gm: GraphModule, counted: set[Node]) -> tuple[int, int]:
    """(bytes, kernels) of element-wise operators, if those that are connected and stand between the same products,
    attention and exchanges are one kernel, which reads its inputs once and keeps values between its operators in
    registers."""
    level: dict[Node, int] = {}
    base: dict[Node, Node] = {}
    group: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        while group[node] is not node:
            group[node] = node = group[group[node]]
        return node

    members: list[Node] = []
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        kind = kind_of(node) if node.op == "call_function" else ""
        heavy = kind in (PRODUCT, ATTENTION) or (not kind and transfer_like(node))
        level[node] = max((level[x] for x in inputs), default=0) + heavy
        base[node] = node
        if node.op == "call_function" and not kind and not heavy and inputs:
            base[node] = base[inputs[0]]  # a view
        elif kind == "other":
            group[node] = node
            members.append(node)
            if is_lookup(node):
                continue
            for x in inputs:
                other = base[x]
                if other in group and level[other] == level[node] and not is_lookup(other):
                    group[root(node)] = root(other)
    users: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        for x in node.all_input_nodes:
            users.setdefault(base[x], []).append(node)
    read: set[tuple[Node, Node]] = set()
    total = 0
    for node in members:
        if node not in counted:
            continue
        mine = root(node)
        if is_lookup(node):
            total += memory_bytes(node)
            continue
        for x in tensor_operands(node):
            source = base[x]
            if (source not in group or root(source) is not mine) and (mine, source) not in read:
                read.add((mine, source))
                total += (
                    min(nbytes(x), nbytes(source)) if source.op != "call_function" or source is not x else nbytes(x)
                )
        if any(u not in group or root(u) is not mine for u in users.get(node, []) if base.get(u) is u):
            total += nbytes(node)
    return total, len({root(node) for node in members if node in counted})


def transfer_like(node: Node) -> bool:
    """Whether a node without computation moves data: a collective, or a copy to the host."""
    return str(getattr(node.target, "_schema", "")).startswith("autopar::")


# --- a model -------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A number of numpy as one of Python, which is faster; others as they are."""
    return value.item() if isinstance(value, np.generic) else value


@dataclass(frozen=True)
class Work:
    """What one layer does in one pass, for any number of rows: value = column 0 + rows * column 1.

    products [n, 1 + 3 x 2], attention [n, 1 + 3 x 2 + 1]: count of equal ones, then the values of `RawWork`, constant
    and slope; attention ends with whether it is of the backward. scalars [4, 2]. sent: axis and kind -> [calls, bytes],
    2 each.
    """

    products: Floats
    attention: Floats
    scalars: Floats
    sent: Mapping[Way, Floats]

    def of_products(self, rows: float) -> tuple[Floats, Floats, Floats, Floats]:
        """(count, FLOPs in whole tiles, FLOPs, bytes)"""
        p = self.products
        return p[:, 0], p[:, 1] + rows * p[:, 2], p[:, 3] + rows * p[:, 4], p[:, 5] + rows * p[:, 6]

    def of_attention(self, rows: float) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """(count, FLOPs of allowed pairs, of all pairs, elements of the scores, of the backward)"""
        a = self.attention
        return a[:, 0], a[:, 1] + rows * a[:, 2], a[:, 3] + rows * a[:, 4], a[:, 5] + rows * a[:, 6], a[:, 7]

    def scalar(self, name: str, rows: float) -> Any:
        """One of `SCALARS`."""
        const, slope = self.scalars[SCALARS.index(name)]
        return plain(const + rows * slope)

    def flops(self, rows: float) -> Any:
        """FLOPs of products and attention."""
        products, attention = self.of_products(rows), self.of_attention(rows)
        return plain(products[0] @ products[2] + attention[0] @ attention[1])


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one layer, or of everything outside of layers, on one rank. forward, backward: without what is computed
    again; again: that. dense, experts: elements of its parameters outside and inside of sharded experts. first: of
    ``dense``, those in the tables that the model starts with. saved: bytes that F keeps, [constant, slope]."""

    forward: Work
    backward: Work
    again: Work
    dense: float
    experts: float
    first: float
    saved: Floats


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model on a placement. kinds: of each layer, in the model's order. layers: by kind. rest: outside of
    layers. peak: bytes of temporaries of the loss, [constant, slope]; layer_peak: of the largest layer. hop: bytes of a
    value between layers, [constant, slope]. itemsize: bytes per element of a parameter. logits:
    elements, [constant, slope]. num_experts: a number that divides those of every layer; 0: there are none."""

    placement: Placement
    kinds: tuple[int, ...]
    layers: tuple[LayerCosts, ...]
    rest: LayerCosts
    peak: Floats
    layer_peak: Floats
    hop: Floats
    itemsize: int
    logits: Floats
    num_experts: int

    def total(self, name: str) -> float:
        """Elements of parameters of the whole model on a rank: dense or experts."""
        return getattr(self.rest, name) + sum(getattr(self.layers[k], name) for k in self.kinds)

    def flops(self, rows: float) -> Any:
        """FLOPs of a forward of a microbatch, on a rank."""
        layers = sum(n * self.layers[k].forward.flops(rows) for k, n in Counter(self.kinds).items())
        return self.rest.forward.flops(rows) + layers


@dataclass(frozen=True)
class Sample:
    """A compiled model with few layers. counts: layers by kind. works: (forward, backward, again) for each number of
    rows. memory: for each. dense, experts, first: elements of parameters."""

    counts: tuple[int, ...]
    works: tuple[tuple[RawWork, RawWork, RawWork], ...]
    memory: tuple[Memory, ...]
    layer_peak: tuple[float, ...]
    hop: tuple[float, ...]
    logits: tuple[float, ...]
    dense: float
    experts: float
    first: float
    itemsize: int
    num_experts: int

    def resized(self, axis: str, size: int, name: str, ranks: int) -> Sample:
        """With another name and other ranks of an axis over which only sums of gradients travel."""
        times = (1 - 1 / ranks) / (1 - 1 / size)

        def changed(work: RawWork) -> RawWork:
            sent = {way: value for way, value in work.sent.items() if way[0] != axis}
            grown = {(name, way[1]): (n, times * b) for way, (n, b) in work.sent.items() if way[0] == axis}
            return replace(work, sent=sent | (grown if ranks > 1 else {}))

        works = tuple((changed(f), changed(b), changed(again)) for f, b, again in self.works)
        return replace(self, works=works)


Unlike = tuple[int, int]  # a kind, and which of its layers costs more or less than the next ones


def design_row(counts: Sequence[int], unlike: Collection[Unlike]) -> list[float]:
    """What the costs of a sample are a sum of: the rest, layers of each kind, what some of them cost more."""
    return [1.0, *counts, *(float(counts[kind] >= number) for kind, number in unlike)]


def model_costs(
    placement: Placement,
    kinds: Sequence[int],
    samples: Sequence[Sample],
    rows: tuple[int, int],
    unlike: Collection[Unlike] = (),
) -> ModelCosts:
    """Costs of layers of each kind, from samples for ``rows`` that have different numbers of them. What ``unlike``
    layers cost more than others of their kind is added to the rest."""
    solver = np.linalg.pinv([design_row(s.counts, unlike) for s in samples])
    columns = 1 + len(samples[0].counts)

    def solved(values: Sequence[Floats]) -> Floats:
        found: Floats = np.asarray(solver @ np.array(values), dtype=np.float64)
        found[0] += found[columns:].sum(axis=0)
        found = found[:columns]
        whole = np.round(found)
        near: Floats = np.where(np.abs(found - whole) <= 1e-9 * np.maximum(1.0, np.abs(whole)), whole, found)
        return near

    passes = [_works([s.works for s in samples], way, rows, solved) for way in range(3)]
    saved = solved([_affine([m.saved for m in s.memory], rows) for s in samples])
    sizes = solved([np.array([s.dense, s.experts, s.first]) for s in samples])
    costs = [
        LayerCosts(forward, backward, again, float(dense), float(experts), float(first), kept)
        for forward, backward, again, (dense, experts, first), kept in zip(*passes, sizes, saved, strict=True)
    ]
    last = samples[-1]
    peak = np.max([_affine(_temporaries(s.memory), rows) for s in samples], axis=0)
    layer_peak = np.max([_affine(s.layer_peak, rows) for s in samples], axis=0)
    return ModelCosts(
        placement, tuple(kinds), tuple(costs[1:]), costs[0], peak, layer_peak, _affine(last.hop, rows), last.itemsize,
        _affine(last.logits, rows), math.gcd(*(s.num_experts for s in samples)),
    )  # fmt: skip


def _temporaries(memory: Sequence[Memory]) -> list[float]:
    return [float(m.forward_peak - m.saved) for m in memory]


def _affine(values: Sequence[float], rows: tuple[int, int]) -> Floats:
    """[constant, slope] through the values at two numbers of rows."""
    slope = (values[1] - values[0]) / (rows[1] - rows[0])
    return np.array([values[0] - slope * rows[0], slope])


def _works(
    works: Sequence[Sequence[tuple[RawWork, ...]]], way: int, rows: tuple[int, int], solved: Solver
) -> list[Work]:
    """One pass of everything outside of layers, and of each kind of layer."""
    pairs = [(sample[0][way], sample[1][way]) for sample in works]
    products = _counted([_paired(a.products, b.products, rows, 3) for a, b in pairs], solved)
    attention = _counted([_paired(a.attention, b.attention, rows, 3) for a, b in pairs], solved)
    scalars = solved(
        [np.array([_affine([x, y], rows) for x, y in zip(a.scalars, b.scalars, strict=True)]).ravel() for a, b in pairs]
    ).reshape(-1, len(SCALARS), 2)
    ways = list(dict.fromkeys(way for pair in pairs for raw in pair for way in raw.sent))
    sent = {way: solved([_sent(a, b, way, rows) for a, b in pairs]).reshape(-1, 2, 2) for way in ways}
    return [
        Work(products[i], attention[i], scalars[i], {w: s[i] for w, s in sent.items() if s[i].any()})
        for i in range(len(scalars))
    ]


def _sent(a: RawWork, b: RawWork, way: Way, rows: tuple[int, int]) -> Floats:
    one, two = a.sent.get(way, (0.0, 0.0)), b.sent.get(way, (0.0, 0.0))
    return np.array([_affine([x, y], rows) for x, y in zip(one, two, strict=True)]).ravel()


def _paired(
    one: Sequence[tuple[float, ...]], two: Sequence[tuple[float, ...]], rows: tuple[int, int], affine: int
) -> Counter[tuple[float, ...]]:
    """Equal calls counted, each with constants and slopes of its first ``affine`` values, then the others."""
    if len(one) != len(two):  # a graph for one row may lack what makes no difference to it
        one = tuple(tuple(v * rows[0] / rows[1] if i < affine else v for i, v in enumerate(t)) for t in two)
    found: Counter[tuple[float, ...]] = Counter()
    for x, y in zip(one, two, strict=True):
        values = [float(v) for i in range(affine) for v in _affine([x[i], y[i]], rows)]
        found[(*values, *x[affine:])] += 1
    return found


def _counted(counters: Sequence[Counter[tuple[float, ...]]], solved: Solver) -> list[Floats]:
    keys = list(dict.fromkeys(key for counter in counters for key in counter))
    if not keys:
        return [np.zeros((0, 8)) for _ in solved([np.zeros(1) for _ in counters])]
    counts = solved([np.array([float(counter[key]) for key in keys]) for counter in counters])
    table = np.array(keys)
    return [np.column_stack([row, table])[row != 0] for row in counts]
