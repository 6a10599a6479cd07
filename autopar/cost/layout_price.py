"""The price of a layout: seconds of a step by cause, and memory of each rank of pp against the chip, in closed form.

A layer's products, attention, element-wise operators and exchanges come from its graphs (`autopar.cost.layer_costs`),
what a stack reaches of the chip from a table (`autopar.cost.efficiency`), links from the cluster
(`autopar.cost.cluster`). A pipeline takes

    microbatches x the slowest rank + bubble + transfers that nothing hides

where the bubble is what the critical path of its schedule takes besides (`autopar.schedule.critical_path`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar.cost.cluster import AxisLinks, Cluster, NodeGroup
from autopar.cost.efficiency import Stack, stack_named
from autopar.cost.extremes import least, most
from autopar.cost.hardware import Device, Links
from autopar.cost.layer_costs import LayerCosts, ModelCosts, Work, plain
from autopar.cost.layout import DATA_AXES, Layout, Placement, known_schedule
from autopar.cost.parts import layers_of_parts, ranks_of_part
from autopar.cost.topology import NamedLinks, Topologies
from autopar.schedule.critical_path import CriticalPath, Part, by_part, order_of_few, steady_pipeline
from autopar.schedule.request import SCHEDULES, Costs, Request
from autopar.schedule.simulate import simulate

SCORE_BYTES = 13  # moved per element of the scores by attention without a fused kernel
PLAIN_KERNELS = (4, 7)  # more than one, forward and backward, that attention without a fused kernel takes
ENDS = 2  # parts that may have no layer: the first has the embeddings, the last the head
MOST_ACTIONS = 20_000  # of a pipeline that is simulated: with more microbatches the critical path is as good
TRAINED = 3  # FLOPs of forward and backward, of those of the forward


@dataclass(frozen=True)
class Cause:
    """Seconds of one cause in a step. axis: of the mesh, for exchanges. exposed: of these, what adds to the step."""

    name: str
    axis: str
    seconds: float
    exposed: float


@dataclass(frozen=True)
class Price:
    """seconds: of a step. mfu: of the chip's peak in half precision, without recomputation. flops: of the model, per
    step. causes: their exposed seconds sum up to ``seconds``. memory: bytes of each rank of pp; limit: of the chip.
    limits: of each rank of pp, where chips differ. refused: why there is no price; then all else is zero. guesses:
    values that nobody measured."""

    seconds: float = 0.0
    mfu: float = 0.0
    flops: float = 0.0
    causes: tuple[Cause, ...] = ()
    memory: tuple[float, ...] = ()
    limit: float = 0.0
    refused: str = ""
    guesses: tuple[str, ...] = ()
    limits: tuple[float, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every rank's memory is within the limit."""
        return not self.refused and self.most_memory <= self.limit

    @property
    def over(self) -> tuple[float, ...]:
        """The share of its limit that each rank of pp takes."""
        limits = self.limits or (self.limit,) * len(self.memory)
        return tuple(size / limit for size, limit in zip(self.memory, limits, strict=True))

    @property
    def fullest(self) -> int:
        """The rank of pp that is nearest to its limit, of which ``limit`` is."""
        return max(range(len(self.memory)), key=lambda rank: self.over[rank])

    @property
    def most_memory(self) -> float:
        """Bytes of the fullest rank; 0 without a price."""
        return self.memory[self.fullest] if self.memory else 0.0

    def limited(self, most: float) -> Price:
        """With ranks that may not use more bytes than these."""
        return replace(self, limit=min(self.limit, most), limits=tuple(min(one, most) for one in self.limits))

    @classmethod
    def of_refusal(cls, reason: str) -> Price:
        """The price of what cannot run."""
        return cls(refused=reason)


@dataclass
class _Pass:
    """Seconds of one pass of a layer, a part or a rank, for one microbatch."""

    products: float = 0.0
    attention: float = 0.0
    element_wise: float = 0.0
    host: float = 0.0
    sent: dict[str, float] = field(default_factory=dict)  # axis -> seconds of exchanges
    exposed: dict[str, float] = field(default_factory=dict)

    @property
    def computing(self) -> float:
        return self.products + self.attention + self.element_wise + self.host

    @property
    def seconds(self) -> float:
        return self.computing + sum(self.exposed.values())

    def __add__(self, other: _Pass) -> _Pass:
        return _Pass(
            self.products + other.products,
            self.attention + other.attention,
            self.element_wise + other.element_wise,
            self.host + other.host,
            {a: self.sent.get(a, 0.0) + other.sent.get(a, 0.0) for a in {**self.sent, **other.sent}},
            {a: self.exposed.get(a, 0.0) + other.exposed.get(a, 0.0) for a in {**self.exposed, **other.exposed}},
        )


Passes = tuple[tuple[_Pass, _Pass, _Pass], ...]


@dataclass(frozen=True)
class _Step:
    """Of each rank of pp: way: what it computes of a microbatch in each pass; gathers: (seconds, exposed) of gathers
    and reductions of a microbatch, outside and inside of experts; each: seconds of a microbatch; once: (seconds,
    exposed) of gathers and reductions of a step. pipeline: bubble and transfers. optimizer: seconds of the slowest."""

    way: list[list[_Pass]]
    gathers: list[tuple[tuple[float, float], ...]]
    each: list[float]
    pipeline: list[Cause]
    once: list[tuple[float, float]]
    optimizer: float


@dataclass
class _LayerSeconds:
    """Seconds of the layers of a placement. parts: (kinds of its layers, way, whether it is the last) -> sum."""

    passes: Passes
    parts: dict[tuple[tuple[int, ...], int, bool], _Pass] = field(default_factory=dict)


Known = dict[tuple[Placement, int, tuple[NodeGroup, ...]], _LayerSeconds]  # placement, rows, nodes
Held = tuple[tuple[tuple[int, ...], bool, bool], ...]  # of each part of a rank: kinds of layers, whether it is the ends


def price(
    layout: Layout,
    costs: ModelCosts,
    cluster: Cluster,
    stack: Stack,
    *,
    kernel: str = "",
    compute: str = "",
    topology: str = "",
    simulated: bool = False,
    memory_only: bool = False,
    known: Known | None = None,
) -> Price:
    """The price of a layout. kernel: of attention (`autopar.cost.efficiency.KERNELS`), by default the stack's. compute:
    "fp8" for products in float8. topology: links that replace the cluster's, by axis. simulated: the pipeline is run
    action by action, instead of on the critical path of a few microbatches. memory_only: without seconds and causes.
    known: for many layouts of one model on one cluster.

    Raises ValueError for a cluster with another number of chips."""
    kernel = kernel or stack.kernel
    reason = _refusal(layout, costs, cluster, stack, kernel, compute)
    if reason := reason or ("" if memory_only else _no_order(layout)):
        return Price.of_refusal(reason)
    pricing = _pricing(layout, costs, cluster, stack, kernel, compute, topology, simulated, known)
    return pricing.memory() if memory_only else pricing.price()


def layer_seconds(
    layout: Layout, costs: ModelCosts, cluster: Cluster, stack: Stack, *, kernel: str = "", compute: str = "",
    topology: str = "",
) -> list[list[float]]:  # fmt: skip
    """For each rank of pp, seconds of a layer of each kind for one microbatch, then of everything outside of layers."""
    pricing = _pricing(layout, costs, cluster, stack, kernel or stack.kernel, compute, topology)
    return [[sum(one.seconds for one in passes) for passes in at.passes] for at in pricing.at]


def _pricing(
    layout: Layout,
    costs: ModelCosts,
    cluster: Cluster,
    stack: Stack,
    kernel: str,
    compute: str,
    topology: str,
    simulated: bool = False,
    known: Known | None = None,
) -> LayoutPricing:
    cluster, named = cluster.with_ranks(layout.ranks), Topologies.parse(topology)
    shared = {} if known is None else known

    def on(nodes: Cluster) -> LayoutPricing:
        own = stack if nodes.chip_name == stack.chip else stack_named(stack.name, nodes.chip_name)
        own = own.with_kernel(kernel)
        device = Device(nodes.chip_name, nodes.chip, own, kernel, compute == "fp8")
        return LayoutPricing(layout, costs, device, Links(layout.mesh, nodes, own, named), simulated, shared)

    found = on(cluster)
    if not cluster.is_uniform:
        spans = cluster.spans(layout.pp)
        made = {nodes: on(nodes) for nodes in spans}
        found.at = tuple(made[nodes] for nodes in spans)
    return found


def _refusal(layout: Layout, costs: ModelCosts, cluster: Cluster, stack: Stack, kernel: str, compute: str) -> str:
    layers = len(costs.kinds)
    if layout.pp > 1 and layout.parts > layers + ENDS:
        return f"pp: {layout.parts} stages need as many layers, or {ENDS} less, found {layers}"
    if layout.layers and (len(layout.layers) != layout.parts or sum(layout.layers) != layers):
        return f"layers: {layout.parts} parts need counts that sum up to {layers} layers, found {list(layout.layers)}"
    if kernel not in stack.attention:
        return f"attention: stack {stack.name} knows {', '.join(stack.attention)}, found {kernel!r}"
    if compute not in ("", "fp8"):
        return f"compute: expected fp8 or nothing, found {compute!r}"
    if compute == "fp8" and not cluster.chip.float8:
        return f"compute: {cluster.chip_name} has no products in float8; leave fp8 out"
    return known_schedule(layout) or _unequal(layout, cluster)


def _no_order(layout: Layout) -> str:
    """Why its schedule does not run so many microbatches on so many ranks; "" if it does."""
    if layout.pp > 1:
        try:
            order_of_few(layout.schedule or "1f1b", _request(layout))
        except ValueError as error:
            return str(error)
    return ""


def _request(layout: Layout) -> Request:
    return Request(layout.pp, layout.microbatches, layout.virtual_stages)


def _unequal(layout: Layout, cluster: Cluster) -> str:
    """Why ranks of one stage cannot work together; "" if their chips are equal."""
    spans = cluster.spans(layout.pp) if not cluster.is_uniform and cluster.ranks == layout.ranks else ()
    for k, nodes in enumerate(spans):
        chips = list(dict.fromkeys(group.chip for group in nodes.groups))
        if len(chips) > 1:
            where = f"stage {k} of pp={layout.pp}" if layout.pp > 1 else "one stage"
            return (
                f"cluster: replicas of unequal speed would wait for each other, found {' and '.join(chips)} in {where};"
                " use a pp whose stages have one kind of chip each"
            )
    return ""


class LayoutPricing:
    """The formulas of a price. Costs, speeds of links and ``microbatches`` are numbers, or expressions of sympy."""

    def __init__(
        self, layout: Layout, costs: ModelCosts, device: Device, links: Links, simulated: bool, known: Known
    ) -> None:
        self.layout, self.costs, self.device, self.links, self.simulated = layout, costs, device, links, simulated
        self.known = known
        self.stack = device.stack
        self.rows = float(layout.micro_batch)
        self.microbatches = layout.microbatches
        self.data_ranks = math.prod(getattr(layout, axis) for axis in DATA_AXES)
        self.expert_ranks = max(1, self.data_ranks // max(1, self._experts_on()))
        self.parts = layers_of_parts(layout, costs.kinds)
        self.at: tuple[LayoutPricing, ...] = (self,) * layout.pp  # with the chips of each rank of pp

    def _experts_on(self) -> int:
        axis = self.layout.expert_axis
        return int(getattr(self.layout, axis)) if axis in ("ep", "dp", "cp") else 1

    # --- one layer -----------------------------------------------------------------------------------------

    @property
    def passes(self) -> Passes:
        """Forward, backward and recomputation of each kind of layer, then of the rest."""
        return self._of_layers.passes

    @functools.cached_property
    def _of_layers(self) -> _LayerSeconds:
        key = self.layout.placement, self.layout.micro_batch, self.links.cluster.groups
        if key not in self.known:
            layers = (*self.costs.layers, self.costs.rest)
            self.known[key] = _LayerSeconds(
                tuple((self._pass(c.forward), self._pass(c.backward), self._pass(c.again)) for c in layers)
            )
        return self.known[key]

    def _pass(self, work: Work) -> _Pass:
        device, stack, rows = self.device, self.stack, self.rows
        found = _Pass()
        count, padded, _, moved = work.of_products(rows)
        if len(count):
            found.products = plain(count @ _most_of_each(padded / device.products, moved / device.memory))
        extra = 0.0
        count, causal, full, scores, backward = work.of_attention(rows)
        if len(count):
            unfused = device.kernel == "plain"
            peak = device.chip.flops
            speed = np.where(backward > 0, peak * device.attention_share(True), peak * device.attention_share(False))
            found.attention = plain(count @ ((full if unfused else causal) / speed))
            extra = plain(count @ scores) * SCORE_BYTES if unfused else 0.0
        bytes_moved = work.scalar("fused" if stack.fused else "moved", rows)
        found.attention += extra / device.memory
        found.element_wise = bytes_moved / device.memory
        launches = work.scalar("kernels", rows) + sum(self._affine(values[0]) for values in work.sent.values())
        if len(count) and device.kernel == "plain":
            launches += plain(count @ np.where(backward > 0, PLAIN_KERNELS[1], PLAIN_KERNELS[0]))
        found.host = most(0.0, launches * stack.launch - found.computing)
        for (axis, kind), values in work.sent.items():
            self._send(found, axis, kind, values)
        return found

    def _send(self, found: _Pass, axis: str, kind: str, values: np.ndarray) -> None:
        calls, size = map(self._affine, values)
        name = re.split("[%/]", axis)[0]  # of a level, such as cp%4
        if name in ("cp", "ep"):  # gradients of weights, summed over these axes, do not grow with rows
            size = self.rows * plain(values[1][1])
            if _is_none(size) or _is_none(calls):
                return
        seconds = 0.0 if _is_none(size) else self._axis(axis).seconds(kind, size, most(calls, 1.0))
        axis = name
        hidden = self.stack.hidden.get(axis, 0.0)
        beside = found.attention if axis == "cp" else found.computing
        found.sent[axis] = found.sent.get(axis, 0.0) + seconds
        left = most(seconds * (1 - hidden), seconds - beside) if axis != "tp" else seconds * (1 - hidden)
        found.exposed[axis] = found.exposed.get(axis, 0.0) + left

    @functools.lru_cache(maxsize=16)  # noqa: B019  (as short-lived as the object)
    def _axis(self, name: str) -> AxisLinks | NamedLinks:
        return self.links.axis(name)

    def _data_links(self, ranks: int) -> AxisLinks | NamedLinks:
        """Links of the ranks that sum gradients: they are neighbours at a distance of tp."""
        return self.links.between("dp", ranks, self.layout.tp * (self.data_ranks // ranks))

    def _affine(self, values: np.ndarray) -> Any:
        """The value for the rows of a microbatch, of [constant, slope]."""
        const, slope = values
        return plain(const + self.rows * slope)

    # --- a rank --------------------------------------------------------------------------------------------

    def _of_part(self, part: Sequence[int], way: int, last: bool) -> _Pass:
        key = tuple(part), way, last
        if key not in self._of_layers.parts:
            self._of_layers.parts[key] = self._sum_of_part(part, way, last)
        return self._of_layers.parts[key]

    def _sum_of_part(self, part: Sequence[int], way: int, last: bool) -> _Pass:
        found = _Pass()
        for kind in sorted(set(part)):
            found += _scaled(self.passes[kind][way], list(part).count(kind))
        return found + self.passes[-1][way] if last else found

    def _sizes(self, part: Sequence[int], first: bool, last: bool) -> tuple[float, float]:
        """Elements of parameters of a part: outside and inside of experts."""
        layers: list[LayerCosts] = [self.costs.layers[k] for k in part]
        rest = self.costs.rest
        dense = sum(c.dense for c in layers) + rest.first * first + (rest.dense - rest.first) * last
        return dense, sum(c.experts for c in layers) + rest.experts * last

    @functools.cached_property
    def held(self) -> list[list[int]]:
        """The parts of each rank of pp."""
        held: list[list[int]] = [[] for _ in range(self.layout.pp)]
        for part in range(self.layout.parts):
            for rank in ranks_of_part(part, self.layout):
                held[rank].append(part)
        return held

    @functools.cached_property
    def alike(self) -> list[int]:
        """For each rank of pp, the first with the same chips and parts."""
        last, known = self.layout.parts - 1, dict[tuple[int, Held], int]()
        kinds = [tuple(part) for part in self.parts]
        keys = [tuple((kinds[k], k == 0, k == last) for k in parts) for parts in self.held]
        return [known.setdefault((id(at), key), r) for r, (at, key) in enumerate(zip(self.at, keys, strict=True))]

    @functools.cached_property
    def sizes(self) -> list[tuple[float, float]]:
        """Elements of parameters of each rank of pp."""
        return self._each(self.alike, lambda r: self._of_rank_sizes(self.held[r]))

    def memory(self) -> Price:
        """The price without seconds and causes."""
        memory, limits = self.bytes_of_ranks(), tuple(one.links.cluster.capacity for one in self.at)
        limit = max(zip(memory, limits, strict=True), key=lambda pair: pair[0] / pair[1])[1]
        return Price(
            memory=memory, limit=limit, guesses=self.stack.guesses, limits=limits if len(set(limits)) > 1 else ()
        )

    def bytes_of_ranks(self) -> tuple[Any, ...]:
        """Bytes of each rank of pp at its peak."""
        held, sizes, at = self.held, self.sizes, self.at
        saved = self._each(self.alike, lambda r: self._saved(held[r]))
        return tuple(at[r]._memory(r, held[r], sizes[r], saved[r]) for r in range(self.layout.pp))

    def price(self) -> Price:
        """The price."""
        layout, m, step, flops = self.layout, self.microbatches, self.step(), self.flops
        slowest = max(range(layout.pp), key=lambda r: step.each[r])
        at, way = self.at[slowest], [of_ranks[slowest] for of_ranks in step.way]
        ordinary, again = way[0] + way[1], way[2]
        head = _scaled(
            at._of_part((), 0, True) + at._of_part((), 1, True),
            self._copy if layout.parts - 1 in self.held[slowest] else 0.0,
        )
        body = ordinary + _scaled(head, -1.0)
        computing = {
            "products": body.products, "attention": body.attention, "element-wise": body.element_wise,
            "host": body.host, "head": head.computing, "recomputation": again.computing,
        }  # fmt: skip
        causes = [Cause(name, "", m * seconds, m * seconds) for name, seconds in computing.items()]
        both = ordinary + again
        for axis in both.sent:
            causes.append(Cause(axis, axis, m * both.sent[axis], m * both.exposed.get(axis, 0.0)))
        for name, (all_of, exposed) in zip(("dp", "ep"), step.gathers[slowest], strict=True):
            if all_of:
                causes.append(Cause("dp", name, m * all_of, m * exposed))
        causes += step.pipeline
        reduced = max(step.once, key=lambda pair: pair[1])
        if reduced[0]:
            causes.append(Cause("dp", "dp", *reduced))
        causes.append(Cause("optimizer", "", step.optimizer, step.optimizer))
        seconds = sum(c.exposed for c in causes)
        jitter = seconds * self._jitter
        if jitter:
            causes.append(Cause("jitter", "", jitter, jitter))
        seconds += jitter
        shown = tuple(c for c in causes if c.seconds > 0)
        mfu = flops / (seconds * self.peak)
        return replace(self.memory(), seconds=seconds, mfu=mfu, flops=flops, causes=shown)

    def step(self) -> _Step:
        """What the ranks of pp do in a step."""
        ranks, held, sizes, of, at = range(self.layout.pp), self.held, self.sizes, self.alike, self.at
        way = [self._each(of, functools.partial(lambda w, r: at[r]._of_rank(held[r], w), w)) for w in range(3)]
        gathers = self._each(of, lambda r: at[r]._sharded(held[r], way, r))
        shown = [sum(exposed for _, exposed in gathers[r]) for r in ranks]
        each = [way[0][r].seconds + way[1][r].seconds + way[2][r].seconds + shown[r] for r in ranks]
        once = self._each(of, lambda r: at[r]._once(sizes[r], way[1][r].computing + way[2][r].computing))
        optimizer = max(at[r]._optimizer(sizes[r]) for r in set(of))
        return _Step(way, gathers, each, self._of_pipeline(each, shown), once, optimizer)

    def seconds(self) -> Any:
        """Those of the price."""
        step = self.step()
        computing = self.microbatches * most(*step.each) + most(*(exposed for _, exposed in step.once))
        pipeline = sum(cause.exposed for cause in step.pipeline)
        return (computing + pipeline + step.optimizer) * (1 + self._jitter)

    @property
    def _jitter(self) -> float:
        """Of a step, the share that ranks wait for each other."""
        return self.stack.jitter * max(0.0, math.log2(self.layout.ranks / 8))

    @property
    def flops(self) -> Any:
        """Of the model, in a step."""
        layout = self.layout
        ranks = layout.data_size * layout.tp * layout.cp
        return TRAINED * self.costs.flops(self.rows) * self.microbatches * ranks

    @property
    def peak(self) -> float:
        """FLOPs per second of all chips, on paper."""
        return sum(one.device.chip.flops for one in self.at) * self.layout.ranks / self.layout.pp

    @staticmethod
    def _each(of: Sequence[int], value: Callable[[int], Any]) -> list[Any]:
        """The value of every rank, computed once for ranks that have the same."""
        known = {r: value(r) for r in dict.fromkeys(of)}
        return [known[r] for r in of]

    def _of_rank_sizes(self, held: Sequence[int]) -> tuple[float, float]:
        """Elements of parameters of a rank: outside and inside of experts."""
        last = self.layout.parts - 1
        parts = [self._sizes(self.parts[k], k == 0, k == last) for k in held]
        return sum(dense for dense, _ in parts), sum(experts for _, experts in parts)

    def _of_rank(self, held: Sequence[int], way: int) -> _Pass:
        last = self.layout.parts - 1
        passes = [self._of_part(self.parts[k], way, k == last) for k in held]
        found = functools.reduce(lambda a, b: a + b, passes, _Pass())
        return found if self._copy == 1 else _scaled(found, self._copy)

    @functools.cached_property
    def _copy(self) -> float:
        """The share of the microbatches that one copy of a part runs."""
        return 1 / SCHEDULES[self.layout.schedule].copies if self.layout.schedule and self.layout.pp > 1 else 1.0

    # --- data parallelism ----------------------------------------------------------------------------------

    def _groups(self, sizes: Sequence[float]) -> list[tuple[float, int]]:
        """(elements, ranks that sum their gradients): outside and inside of experts."""
        return [(sizes[0], self.data_ranks), (sizes[1], self.expert_ranks)]

    def _sharded(self, held: Sequence[int], way: list[list[_Pass]], rank: int) -> tuple[tuple[float, float], ...]:
        """(seconds, exposed) of gathers and reductions of each microbatch, outside and inside of experts, for one rank
        of pp."""
        layout, stack, n = self.layout, self.stack, self.layout.parts
        found = []
        for which in (0, 1):
            sizes = [self._sizes(self.parts[k], k == 0, k == n - 1)[which] for k in held]
            elements, (_, ranks) = sum(sizes), self._groups((0.0, 0.0))[which]
            all_of = exposed = 0.0
            if ranks > 1 and elements:
                links, share = self._data_links(ranks), (ranks - 1) / ranks
                calls = float(sum(len(self.parts[k]) for k in held) + 1)
                gather = links.seconds("all_gather", elements * self.costs.itemsize * share, calls) * self._copy
                reduce = links.seconds("reduce_scatter", elements * stack.gradient * share, calls) * self._copy
                hidden = stack.hidden.get("zero", 0.8)
                if layout.zero and not layout.gathers_once:
                    forward, backward = way[0][rank].computing, way[1][rank].computing + way[2][rank].computing
                    back = gather + (0.0 if layout.reduces_once else reduce)
                    all_of += gather + back
                    exposed += most(0.0, gather - hidden * forward) + most(0.0, back - hidden * backward)
                elif not layout.reduces_once:
                    back = reduce if layout.zero else 2 * reduce
                    all_of += back
                    exposed += most(0.0, back - hidden * (way[1][rank].computing + way[2][rank].computing))
            found.append((all_of, exposed))
        return tuple(found)

    def _once(self, sizes: Sequence[float], backward: float) -> tuple[float, float]:
        """(seconds, exposed) of gathers and reductions of a step, for one rank of pp."""
        layout, stack = self.layout, self.stack
        total = 0.0
        for elements, ranks in self._groups(sizes):
            if ranks < 2 or not elements:
                continue
            links, share = self._data_links(ranks), (ranks - 1) / ranks
            calls = 1.0 + elements * stack.gradient / 100e6
            if layout.reduces_once:
                if layout.zero:
                    total += links.seconds("reduce_scatter", elements * stack.gradient * share, calls)
                else:
                    total += links.seconds("all_reduce", 2 * elements * stack.gradient * share, calls)
            if layout.zero and layout.gathers_once:
                total += links.seconds("all_gather", elements * self.costs.itemsize * share, calls)
        return total, most(0.0, total - stack.hidden.get("dp", 0.8) * backward)

    def _optimizer(self, sizes: Sequence[float]) -> float:
        """Seconds of the optimizer's step."""
        local = sum(n / (ranks if self.layout.zero else 1) for n, ranks in self._groups(sizes))
        return self.device.optimizer_seconds(local, self.layout.optimizer_cpu_offload)

    # --- the pipeline --------------------------------------------------------------------------------------

    def _of_pipeline(self, each: Sequence[float], gathers: Sequence[float]) -> list[Cause]:
        """Bubble and transfers. gathers: exposed seconds of each rank and microbatch."""
        layout, p, m = self.layout, self.layout.pp, self.microbatches
        if p == 1:
            return []
        hop = self._axis("pp").seconds("send", self._affine(self.costs.hop), 1.0)
        hops = 2 * hop * (layout.virtual_stages * m + p - 1)
        shown = 1 - self.stack.hidden.get("pp", 0.0)
        run = self._simulated if self.simulated and layout.parts * m <= MOST_ACTIONS else self._on_critical_path
        bubble = most(0.0, run(self._times(gathers, hop, hop * shown)) - m * most(*each) - hops * shown)
        return [Cause("bubble", "pp", bubble, bubble), Cause("pp", "pp", hops, hops * shown)]

    def _times(self, gathers: Sequence[float], hop: float, shown: float) -> Costs:
        """Seconds of the parts' actions. gathers: of a rank and microbatch. shown: of a hop, what nothing hides."""
        layout, n = self.layout, self.layout.parts
        at = [self.at[ranks_of_part(k, layout)[0]] for k in range(n)]
        passes = [[at[k]._of_part(self.parts[k], way, k == n - 1) for way in range(3)] for k in range(n)]
        more = [gathers[ranks_of_part(k, layout)[0]] / layout.virtual_stages + shown for k in range(n)]
        return Costs(
            F=tuple(forward.seconds + shown for forward, _, _ in passes),
            B=tuple(b.seconds + a.seconds - f.products + x for (f, b, a), x in zip(passes, more, strict=True)),
            W=tuple(forward.products for forward, _, _ in passes),
            comm=hop - shown,
        )

    def _simulated(self, costs: Costs) -> float:
        """Seconds of all microbatches, action by action."""
        return simulate(SCHEDULES[self.layout.schedule or "1f1b"].make(_request(self.layout)), costs).cost

    def _on_critical_path(self, costs: Costs) -> float:
        """Seconds of all microbatches, by those of a few."""
        times = by_part(costs)
        each = [sum(times[kind, k] for k in parts for kind in "FBW") for parts in self.held]
        slowest, schedule = most(*each) * self._copy, self.layout.schedule or "1f1b"
        of_path = self._seconds_of_paths(times)
        few, seconds, more = steady_pipeline(schedule, _request(self.layout), of_path, slowest, most)
        return seconds + (self.microbatches - few) * more

    def _seconds_of_paths(self, times: Mapping[Part, Any]) -> Callable[[CriticalPath], Any]:
        """What an order takes, of times of its parts."""
        return lambda path: path.seconds(times)

    # --- memory --------------------------------------------------------------------------------------------

    def _saved(self, held: Sequence[int]) -> float:
        """Bytes that the parts of a rank keep of a microbatch."""
        saved = 0.0
        for k in held:
            layers = [self.costs.layers[kind].saved for kind in self.parts[k]]
            saved += sum(map(self._affine, layers))
        return saved * self._copy

    def _memory(self, rank: int, held: Sequence[int], sizes: Sequence[float], saved: float) -> float:
        """Bytes of one rank of pp at its peak."""
        layout, stack, costs = self.layout, self.stack, self.costs
        total = stack.reserved
        for elements, ranks in self._groups(sizes):
            shards = ranks if layout.zero else 1
            total += elements * (stack.states if not layout.optimizer_cpu_offload else 0) / shards
            total += elements * stack.weight / (ranks if layout.zero and not layout.gathers_once else 1)
            total += elements * stack.gradient / (ranks if layout.zero and not layout.reduces_once else 1)
            if layout.zero and not layout.gathers_once:
                total += 2 * stack.weight * elements / max(1, sum(len(self.parts[k]) for k in held))
        n = layout.parts
        total += saved * stack.kept * self._in_flight(rank)
        total += self._affine(costs.hop) * (2 if layout.pp > 1 else 0)
        temporaries = self._affine(costs.layer_peak)
        if n - 1 in held:
            of_loss = self._affine(costs.logits) * stack.logits * (layout.tp if stack.whole_logits else 1)
            if not stack.logits:
                of_loss = self._affine(costs.rest.saved) + self._affine(costs.peak)
            temporaries = most(temporaries, of_loss)
        return total + temporaries

    def _in_flight(self, rank: int) -> Any:
        """Microbatches whose activations a rank keeps at once, in units of its share of the model."""
        p, m, v = self.layout.pp, self.microbatches, self.layout.virtual_stages
        name = self.layout.schedule or "1f1b"
        if p == 1:
            return 1.0
        if name == "1f1b":
            return least(m, p - rank)
        if name == "interleaved":
            return least(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1) / v
        return least(m, _held_by(name)(p, m, v))


def _most_of_each(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger of each two entries."""
    if object in (a.dtype, b.dtype):
        return np.array([most(*pair) for pair in zip(a, b, strict=True)], dtype=object)
    found: np.ndarray = np.maximum(a, b)
    return found


def _is_none(amount: Any) -> bool:
    """Whether it is not above 0, as an expression always is."""
    return isinstance(amount, (int, float)) and amount <= 0


def _scaled(one: _Pass, count: float) -> _Pass:
    return _Pass(
        count * one.products, count * one.attention, count * one.element_wise, count * one.host,
        {a: count * s for a, s in one.sent.items()}, {a: count * s for a, s in one.exposed.items()},
    )  # fmt: skip


@functools.cache
def _held_by(name: str) -> Callable[[int, Any, int], Any]:
    """Microbatches in flight: (p, m, v) -> number."""
    formula = SCHEDULES[name].memory
    made = _compiled(formula) if formula else None
    return lambda p, m, v: made(p=p, m=m, v=v, n=1, F=1.0, B=1.0, W=1.0, FB=3.0) if made else p


def _compiled(formula: str) -> Callable[..., Any]:
    import sympy  # slow to import

    from autopar.schedule.formulas import SYMBOLS, expression

    functions = [{"Max": most, "Min": least}, "math"]
    made: Callable[..., Any] = sympy.lambdify([sympy.Symbol(s) for s in SYMBOLS], expression(formula), functions)
    return made
