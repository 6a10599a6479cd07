"""The seconds and the memory of a layout as expressions of its batch, its sequence and the speeds of its links.

    found = symbolic_price(layout, {4096: costs, 8192: costs, 16384: costs}, cluster, stack)
    found.javascript()      a function of (batch, seq, inside, card), for the page of `autopar plan --auto --dump`

The same formulas as `autopar.cost.layout_price`; `tests/cost/test_symbolic_price.py` insists on equal numbers. Costs at
three sequence lengths give those at any, as all of them are quadratic in it, up to rows of tiles. batch: rows of a
step, in microbatches of the same size. inside, card: factors of the speeds of the cluster's links. Of a
pipeline, those critical paths are known that are the longest at some sequence and speeds.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy

from autopar.cost.cluster import HOP_ACROSS, HOP_INSIDE, AxisLinks, Cluster
from autopar.cost.efficiency import Stack
from autopar.cost.hardware import Device
from autopar.cost.layer_costs import LayerCosts, ModelCosts, Work
from autopar.cost.layout import DATA_AXES, Layout
from autopar.cost.layout_price import (
    PLAIN_KERNELS,
    SCORE_BYTES,
    TRAINED,
    layers_of_parts,
    ranks_of_part,
)
from autopar.schedule.critical_path import COMM, CriticalPath, Part, steady_pipeline
from autopar.schedule.formulas import expression
from autopar.schedule.request import SCHEDULES, Request

Expr: TypeAlias = Any  # sympy.Expr: sympy has no annotations
Pick = Callable[[ModelCosts], Work]
BATCH, SEQ, INSIDE, CARD = sympy.symbols("batch seq inside card", positive=True)
ARGUMENTS = (BATCH, SEQ, INSIDE, CARD)
LENGTHS = 3  # sequences whose costs are needed
SPEEDS = 0.25, 1.0, 4.0  # of links, at which critical paths are looked for
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}


@dataclass(frozen=True)
class SymbolicPrice:
    """seconds: of a step. flops: of the model and step. memory: bytes of each rank of pp. peak: FLOPs per second of all
    chips."""

    seconds: Expr
    flops: Expr
    memory: tuple[Expr, ...]
    peak: float

    def javascript(self) -> str:
        """A function (batch, seq, inside, card) => [seconds, MFU, bytes of each rank of pp]."""
        rows = [self.seconds, self.flops / (self.seconds * self.peak), *self.memory]
        shared, left = sympy.cse(rows, sympy.numbered_symbols("x"))
        lines = [f"const {name}={sympy.jscode(value)};" for name, value in shared]
        return f"(batch,seq,inside,card)=>{{{''.join(lines)}return [{','.join(map(sympy.jscode, left))}]}}"


def can_be_symbolic(layout: Layout, cluster: Cluster) -> bool:
    """Whether there are expressions: on equal nodes, with stages of equal numbers of layers and one copy."""
    copies = SCHEDULES[layout.schedule].copies if layout.schedule else 1
    return cluster.is_uniform and not layout.layers and copies == 1


def symbolic_price(
    layout: Layout, costs: Mapping[int, ModelCosts], cluster: Cluster, stack: Stack, *, kernel: str = "",
    compute: str = "",
) -> SymbolicPrice:  # fmt: skip
    """Expressions of a layout, from the costs at three sequence lengths. Raises ValueError for less, and for costs that
    differ in their kinds of work."""
    if len(costs) < LENGTHS:
        raise ValueError(f"symbolic price: needs costs at {LENGTHS} sequence lengths, found {len(costs)}; add some")
    kernel = kernel or stack.kernel
    cluster = cluster.with_ranks(layout.ranks)
    return _Symbolic(layout, dict(costs), cluster, stack.with_kernel(kernel), kernel, compute == "fp8").price()


@dataclass
class _Pass:
    """Seconds of one pass, as expressions."""

    products: Expr = sympy.S.Zero
    computing: Expr = sympy.S.Zero
    exposed: Expr = sympy.S.Zero

    @property
    def seconds(self) -> Expr:
        return self.computing + self.exposed

    def __add__(self, other: _Pass) -> _Pass:
        return _Pass(
            self.products + other.products, self.computing + other.computing, self.exposed + other.exposed
        )  # fmt: skip

    def times(self, count: int) -> _Pass:
        return _Pass(count * self.products, count * self.computing, count * self.exposed)


def _most(*values: Any) -> Expr:
    return sympy.Max(*map(sympy.sympify, values), evaluate=False) if len(set(values)) > 1 else sympy.sympify(values[0])


def _least(*values: Any) -> Expr:
    return sympy.Min(*map(sympy.sympify, values), evaluate=False) if len(set(values)) > 1 else sympy.sympify(values[0])


@dataclass
class _Symbolic:
    layout: Layout
    costs: dict[int, ModelCosts]
    cluster: Cluster
    stack: Stack
    kernel: str
    float8: bool

    def __post_init__(self) -> None:
        layout, first = self.layout, next(iter(self.costs.values()))
        self.rows, self.first = float(layout.micro_batch), first
        self.m = BATCH / (layout.data_size * layout.micro_batch)
        self.parts = layers_of_parts(layout, first.kinds)
        self.data_ranks = math.prod(getattr(layout, axis) for axis in DATA_AXES)
        axis = layout.expert_axis
        experts_on = int(getattr(layout, axis)) if axis in ("ep", "dp", "cp") else 1
        self.expert_ranks = max(1, self.data_ranks // max(1, experts_on))
        self.device = Device(self.cluster.chip_name, self.cluster.chip, self.stack, self.kernel, self.float8)

    # --- numbers that depend on the sequence ------------------------------------------------------------------

    def _of_seq(self, value: Callable[[ModelCosts], float]) -> Expr:
        """The quadratic through a value at three lengths."""
        points = [(s, float(value(c))) for s, c in sorted(self.costs.items())[:LENGTHS]]
        if len({v for _, v in points}) == 1:
            return sympy.Float(points[0][1], 17)
        (a, fa), (b, fb), (c, fc) = points
        first = (fb - fa) / (b - a)
        second = ((fc - fb) / (c - b) - first) / (c - a)
        if abs(second) * c * c < 1e-12 * max(abs(fa), abs(fc)):
            second = 0.0
        return sympy.Float(fa, 17) + (SEQ - a) * (sympy.Float(first, 17) + (SEQ - b) * sympy.Float(second, 17))

    def _affine(self, pair: Callable[[ModelCosts], Any]) -> Expr:
        return self._of_seq(lambda c: pair(c)[0] + self.rows * pair(c)[1])

    # --- one pass ---------------------------------------------------------------------------------------------

    def _pass(self, work: Pick) -> _Pass:
        rows, stack, first = self.rows, self.stack, work(self.first)
        products: Expr = sympy.S.Zero
        for i in range(len(first.products)):
            padded = self._of_seq(lambda c, i=i: float(work(c).of_products(rows)[1][i]))  # type: ignore[misc]
            moved = self._of_seq(lambda c, i=i: float(work(c).of_products(rows)[3][i]))  # type: ignore[misc]
            products += float(first.products[i, 0]) * _most(padded / self.device.products, moved / self.device.memory)
        attention: Expr = sympy.S.Zero
        count = len(first.attention)
        plain = self.kernel == "plain"
        for i in range(count):
            flops = self._of_seq(lambda c, i=i: float(work(c).of_attention(rows)[2 if plain else 1][i]))  # type: ignore[misc]
            backward = first.attention[i, -1] > 0
            share = self.device.attention_share(backward)
            scores = self._of_seq(lambda c, i=i: float(work(c).of_attention(rows)[3][i]))  # type: ignore[misc]
            moved = scores * SCORE_BYTES / self.device.memory if plain else 0
            attention += float(first.attention[i, 0]) * (flops / (self.cluster.chip.flops * share) + moved)
        name = "fused" if stack.fused else "moved"
        beside = self._of_seq(lambda c: work(c).scalar(name, rows)) / self.device.memory
        launches = self._of_seq(lambda c: work(c).scalar("kernels", rows))
        launches += sum(self._of_seq(lambda c, w=w: float(work(c).sent[w][0] @ (1.0, rows))) for w in first.sent)  # type: ignore[misc]
        if count and plain:
            each = [PLAIN_KERNELS[1] if row[-1] > 0 else PLAIN_KERNELS[0] for row in first.attention]
            launches += sum(float(row[0]) * n for row, n in zip(first.attention, each, strict=True))
        computing = products + attention + beside
        computing += _most(0, launches * stack.launch - computing)
        exposed = sum((self._exposed(work, way, computing, attention) for way in first.sent), sympy.S.Zero)
        return _Pass(products, computing, exposed)

    def _exposed(
        self, work: Callable[[ModelCosts], Work], way: tuple[str, str], computing: Expr, attention: Expr
    ) -> Expr:
        level, kind = way
        axis = re.split("[%/]", level)[0]
        first = work(self.first).sent[way]
        calls = self._affine(lambda c: work(c).sent[way][0])
        if axis in ("cp", "ep"):
            if self.rows * float(first[1][1]) <= 0 or float(first[0] @ (1.0, self.rows)) <= 0:
                return sympy.S.Zero
            size = self._of_seq(lambda c: self.rows * work(c).sent[way][1][1])
        else:
            size = self._affine(lambda c: work(c).sent[way][1])
        seconds = self._seconds(self._links(level), kind, size, _most(calls, 1.0))
        hidden = self.stack.hidden.get(axis, 0.0)
        if axis == "tp":
            return seconds * (1 - hidden)
        return _most(seconds * (1 - hidden), seconds - (attention if axis == "cp" else computing))

    # --- links ------------------------------------------------------------------------------------------------

    def _links(self, axis: str) -> AxisLinks:
        mesh = self.layout.mesh
        return self._reached(self.cluster.links(mesh.size(axis), mesh.stride(axis)))

    def _data_links(self, ranks: int) -> AxisLinks:
        return self._reached(self.cluster.links(ranks, self.layout.tp * (self.data_ranks // ranks)))

    def _reached(self, links: AxisLinks) -> AxisLinks:
        return links.scaled(self.stack.inside, self.stack.network, self.stack.start)

    def _seconds(self, links: AxisLinks, kind: str, sent: Expr, calls: Any = 1.0) -> Expr:
        """As `AxisLinks.seconds`, with the factors of the speeds."""
        if links.size == 1:
            return sympy.S.Zero
        near, far = links.near * INSIDE, links.far * CARD
        hop = HOP_ACROSS if links.nodes > 1 else HOP_INSIDE
        if kind.startswith("all_to_all"):
            away = links.inside * (links.nodes - 1) / (links.size - 1)
            return _most(sent * (1 - away) / near, sent * away / far) + calls * (links.start + hop)
        slow = near if links.nodes == 1 else _least(near, far)
        if kind not in ROUNDS:
            return sent / slow + calls * hop
        ring = ROUNDS[kind] * (HOP_INSIDE * (links.inside - 1) * links.nodes + HOP_ACROSS * (links.nodes - 1))
        delay = min(ring, 4 * math.log2(links.size) * hop)
        speed = near if links.nodes == 1 else _least(near, far * links.cards)
        return sent / speed + calls * (links.start + delay)

    # --- a rank -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _passes(self) -> list[list[_Pass]]:
        def kind(i: int) -> Callable[[ModelCosts], LayerCosts]:
            return lambda c: c.layers[i] if i < len(c.layers) else c.rest

        ways = ("forward", "backward", "again")
        return [
            [self._pass(lambda c, i=i, w=w: getattr(kind(i)(c), w)) for w in ways]  # type: ignore[misc]
            for i in range(len(self.first.layers) + 1)
        ]

    @functools.cached_property
    def held(self) -> list[list[int]]:
        """The parts of each rank of pp."""
        parts = range(self.layout.parts)
        return [[k for k in parts if rank in ranks_of_part(k, self.layout)] for rank in range(self.layout.pp)]

    def _of_rank(self, held: Sequence[int], way: int) -> _Pass:
        found = _Pass()
        for k in held:
            for one in sorted(set(self.parts[k])):
                found += self._passes[one][way].times(list(self.parts[k]).count(one))
            if k == self.layout.parts - 1:
                found += self._passes[-1][way]
        return found

    def _groups(self, held: Sequence[int]) -> list[tuple[float, int]]:
        """(elements of parameters, ranks that sum their gradients)."""
        rest, last = self.first.rest, self.layout.parts - 1
        dense = experts = 0.0
        for k in held:
            layers = [self.first.layers[i] for i in self.parts[k]]
            dense += sum(c.dense for c in layers) + rest.first * (k == 0) + (rest.dense - rest.first) * (k == last)
            experts += sum(c.experts for c in layers) + rest.experts * (k == last)
        return [(dense, self.data_ranks), (experts, self.expert_ranks)]

    def price(self) -> SymbolicPrice:
        layout, m = self.layout, self.m
        p, held = layout.pp, self.held
        way = [[self._of_rank(h, w) for h in held] for w in range(3)]
        gathers = [self._sharded(held[r], [way[w][r] for w in range(3)]) for r in range(p)]
        each = [sum((way[w][r].seconds for w in range(3)), gathers[r]) for r in range(p)]
        once = [self._once(self._groups(h), way[1][r].computing + way[2][r].computing) for r, h in enumerate(held)]
        optimizer = max(self._optimizer(self._groups(h)) for h in held)
        seconds = m * _most(*each) + _most(*once) + optimizer + self._pipeline(each, gathers)
        seconds *= 1 + self.stack.jitter * max(0.0, math.log2(layout.ranks / 8))
        flops = self._of_seq(lambda c: TRAINED * c.flops(self.rows) * layout.data_size * layout.tp * layout.cp) * m
        memory = tuple(self._memory(r, h) for r, h in enumerate(held))
        return SymbolicPrice(seconds, flops, memory, self.cluster.chip.flops * layout.ranks)

    def _sharded(self, held: Sequence[int], way: Sequence[_Pass]) -> Expr:
        """Exposed seconds of gathers and reductions of each microbatch."""
        layout, stack, total = self.layout, self.stack, sympy.S.Zero
        hidden = stack.hidden.get("zero", 0.8)
        back_time = way[1].computing + way[2].computing
        for elements, ranks in self._groups(held):
            if ranks < 2 or not elements:
                continue
            links, share = self._data_links(ranks), (ranks - 1) / ranks
            calls = float(sum(len(self.parts[k]) for k in held) + 1)
            gather = self._seconds(links, "all_gather", elements * self.first.itemsize * share, calls)
            reduce = self._seconds(links, "reduce_scatter", elements * stack.gradient * share, calls)
            if layout.zero and not layout.gathers_once:
                back = gather + (0 if layout.reduces_once else reduce)
                total += _most(0, gather - hidden * way[0].computing) + _most(0, back - hidden * back_time)
            elif not layout.reduces_once:
                total += _most(0, (reduce if layout.zero else 2 * reduce) - hidden * back_time)
        return total

    def _once(self, groups: Sequence[tuple[float, int]], backward: Expr) -> Expr:
        layout, stack, total = self.layout, self.stack, sympy.S.Zero
        for elements, ranks in groups:
            if ranks < 2 or not elements:
                continue
            links, share = self._data_links(ranks), (ranks - 1) / ranks
            size, calls = elements * stack.gradient, 1.0 + elements * stack.gradient / 100e6
            if layout.reduces_once:
                kind, rounds = ("reduce_scatter", 1) if layout.zero else ("all_reduce", 2)
                total += self._seconds(links, kind, rounds * size * share, calls)
            if layout.zero and layout.gathers_once:
                total += self._seconds(links, "all_gather", elements * self.first.itemsize * share, calls)
        return _most(0, total - stack.hidden.get("dp", 0.8) * backward)

    def _optimizer(self, groups: Sequence[tuple[float, int]]) -> float:
        local = sum(n / (ranks if self.layout.zero else 1) for n, ranks in groups)
        return self.device.optimizer_seconds(local, self.layout.optimizer_cpu_offload)

    def _pipeline(self, each: Sequence[Expr], gathers: Sequence[Expr]) -> Expr:
        """Seconds that the slowest rank waits, and of transfers. gathers: exposed, of each rank and microbatch."""
        layout, p, v = self.layout, self.layout.pp, self.layout.virtual_stages
        if p == 1:
            return sympy.S.Zero
        hop = self._seconds(self._links("pp"), "send", self._affine(lambda c: c.hop), 1.0)
        exposed = 1 - self.stack.hidden.get("pp", 0.0)
        times = self._times([gather / v + hop * exposed for gather in gathers], hop * exposed, hop * (1 - exposed))
        points = self._points(times)

        def seconds(path: CriticalPath) -> Expr:
            found = dict.fromkeys(tuple(sorted(path.path(point).items())) for point in points)
            return _most(*(sum((count * times[part] for part, count in one), sympy.S.Zero) for one in found))

        sums = [sum((times[kind, k] for k in parts for kind in "FBW"), sympy.S.Zero) for parts in self.held]
        request = Request(p, layout.microbatches, v)
        few, of_few, more = steady_pipeline(layout.schedule or "1f1b", request, seconds, _most(*sums), _most)
        hops = 2 * hop * (v * self.m + p - 1) * exposed
        bubble = _most(0, of_few + (self.m - few) * more - self.m * _most(*each) - hops)
        return bubble + hops

    def _times(self, beside: Sequence[Expr], sent: Expr, comm: Expr) -> dict[Part, Expr]:
        """Seconds of the parts' actions. beside: of each rank, more seconds of a backward, and sent: of a forward."""
        found: dict[Part, Expr] = {COMM: comm}
        for k in range(self.layout.parts):
            forward, backward, again = (self._of_rank([k], way) for way in range(3))
            found["F", k] = forward.seconds + sent
            found["W", k] = forward.products
            (rank,) = ranks_of_part(k, self.layout)
            found["B", k] = backward.seconds + again.seconds - forward.products + beside[rank]
        return found

    def _points(self, times: Mapping[Part, Expr]) -> list[dict[Part, float]]:
        """Times at some sequences and speeds of links."""
        shared, left = sympy.cse([*times.values()], sympy.numbered_symbols("x"))
        speeds = itertools.product(sorted(self.costs)[:LENGTHS], SPEEDS, SPEEDS)
        found = []
        for seq, inside, card in speeds:
            values: dict[Any, Any] = {BATCH: self.layout.batch, SEQ: seq, INSIDE: inside, CARD: card}
            for name, value in shared:
                values[name] = value.xreplace(values)
            found.append(dict(zip(times, (float(one.xreplace(values)) for one in left), strict=True)))
        return found

    # --- memory -----------------------------------------------------------------------------------------------

    def _memory(self, rank: int, held: Sequence[int]) -> Expr:
        layout, stack = self.layout, self.stack
        total: Expr = sympy.Float(stack.reserved, 17)
        for elements, ranks in self._groups(held):
            shards = ranks if layout.zero else 1
            total += elements * (0 if layout.optimizer_cpu_offload else stack.states) / shards
            total += elements * stack.weight / (ranks if layout.zero and not layout.gathers_once else 1)
            total += elements * stack.gradient / (ranks if layout.zero and not layout.reduces_once else 1)
            if layout.zero and not layout.gathers_once:
                total += 2 * stack.weight * elements / max(1, sum(len(self.parts[k]) for k in held))
        kinds = [kind for k in held for kind in self.parts[k]]
        saved = sum((kinds.count(i) * self._affine(lambda c, i=i: c.layers[i].saved) for i in set(kinds)), sympy.S.Zero)  # type: ignore[misc]
        total += saved * stack.kept * self._in_flight(rank)
        total += self._affine(lambda c: c.hop) * (2 if layout.pp > 1 else 0)
        temporaries = self._affine(lambda c: c.layer_peak)
        if layout.parts - 1 in held:
            if stack.logits:
                wide = layout.tp if stack.whole_logits else 1
                of_loss = self._affine(lambda c: c.logits) * stack.logits * wide
            else:
                of_loss = self._affine(lambda c: c.rest.saved) + self._affine(lambda c: c.peak)
            temporaries = _most(temporaries, of_loss)
        return total + temporaries

    def _in_flight(self, rank: int) -> Any:
        layout = self.layout
        p, v, name = layout.pp, layout.virtual_stages, layout.schedule or "1f1b"
        if p == 1:
            return 1
        if name == "1f1b":
            return _least(self.m, p - rank)
        if name == "interleaved":
            return _least(self.m * v, 2 * (p - rank - 1) + (v - 1) * p + 1) / v
        values = {"p": p, "m": self.m, "v": v, "n": 1, "F": 1.0, "B": 1.0, "W": 1.0, "FB": 3.0}
        formula = SCHEDULES[name].memory
        return _least(self.m, _filled(formula, values) if formula else p)


def _filled(formula: str, values: Mapping[str, Any]) -> Expr:
    return expression(formula).subs([(sympy.Symbol(name), value) for name, value in values.items()], simultaneous=True)
