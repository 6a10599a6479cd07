"""Prices of layouts on one cluster with one stack, for a search: each once, and bounds of those not compiled yet."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.auto import scaled_costs
from autopar.auto.costed_model import CostedModel
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import Stack
from autopar.cost.layer_costs import ModelCosts
from autopar.cost.layout import Layout, Placement
from autopar.cost.layout_price import Known, Price, layer_seconds, price
from autopar.zero_stages import ZERO_STAGES

AVOIDABLE = ("dp", "optimizer", "jitter", "bubble", "pp")  # causes that depend on ZeRO, replicas and schedule
MOST_CUTS, BISECTIONS = 12, 40


@dataclass
class Pricing:
    """Prices of a model's layouts. what_if: arguments of `autopar.cost.layout_price.price`. memory_limit: bytes of a
    rank that the user allows; 0: those of the chip."""

    model: CostedModel
    cluster: Cluster
    stack: Stack
    what_if: Mapping[str, Any] = field(default_factory=dict)
    memory_limit: float = 0.0

    def __post_init__(self) -> None:
        self._prices: dict[tuple[Layout, bool], Price] = {}
        self._cuts: dict[Layout, Layout] = {}
        self._known: Known = {}
        self._tried: dict[Placement, str] = {}
        self._compiled: defaultdict[Placement, list[Placement]] = defaultdict(list)
        self._bounds: dict[tuple[Placement, Placement, int], tuple[ModelCosts, Known]] = {}
        self._elements = float(sum(p.numel() for p in self.model.model.parameters()))

    def price(self, layout: Layout, simulated: bool = False) -> Price:
        """The price; compiles the layers on their placement when that is first asked for. simulated: the pipeline runs
        action by action."""
        key = layout, simulated and layout.pp > 1
        if key not in self._prices:
            reason = self._refusal(layout.placement)
            found = (
                Price.of_refusal(reason)
                if reason
                else self._of(self.cut(layout), self._costs(layout), simulated=key[1], known=self._known)
            )
            self._prices[key] = self._limited(found)
        return self._prices[key]

    def cut(self, layout: Layout) -> Layout:
        """The layout with the layers of each stage, where chips of stages differ: by their speed and memory."""
        if self.cluster.is_uniform or layout.parts != layout.pp or layout.pp == 1 or layout.layers:
            return layout
        if layout not in self._cuts:
            self._cuts[layout] = self._balanced(layout)
        return self._cuts[layout]

    def _balanced(self, layout: Layout) -> Layout:
        costs, (cluster, stack) = self._costs(layout), (self.cluster, self.stack)
        if self._of(layout, costs).refused:
            return layout
        each = layer_seconds(layout, costs, cluster, stack, **self.what_if)
        seconds = [[of_rank[kind] for kind in costs.kinds] for of_rank in each]
        most = [len(costs.kinds)] * layout.pp
        for _ in range(MOST_CUTS):
            counts = balanced(seconds, each[-1][-1], most)
            if not counts:
                break
            found = replace(layout, layers=counts)
            over = self._limited(self._of(found, costs)).over
            if max(over) <= 1:
                return found
            most = [n - 1 if share > 1 else m for n, share, m in zip(counts, over, most, strict=True)]
        return layout

    def bound(self, layout: Layout) -> Price | None:
        """A price that is at most the layout's, up to `autopar.auto.search.SLACK`, from placements that are compiled;
        None for a layout whose own is, or of which nothing is known."""
        near = self._bounding(layout.placement)
        return None if near is None else self.bound_from(near, layout)

    def is_close(self, layout: Layout) -> bool:
        """Whether the bound is from a placement that differs in loss chunks alone."""
        return any(
            scaled_costs.is_alike(p, layout.placement) for p in self._compiled[scaled_costs.axes(layout.placement)]
        )

    def memory(self, layout: Layout) -> Price:
        """A price without seconds, of at most the memory that the layout takes."""
        near = self._bounding(layout.placement)
        return self.price(layout) if near is None else self.bound_from(near, layout, memory_only=True)

    def bound_from(self, near: Placement, layout: Layout, memory_only: bool = False) -> Price:
        """The bound by costs on a placement within the layout's (`autopar.auto.scaled_costs.is_within`)."""
        placement, rows = layout.placement, layout.micro_batch
        key = near, placement, rows
        if key not in self._bounds:
            found = scaled_costs.at_size(self.model.costs(near, rows), placement)
            if placement.policy != "none" or placement.loss_chunks > 1:
                saving = self.model.costs(scaled_costs.unsharded(placement), rows)
                found = scaled_costs.with_policy(found, saving, near.policy == placement.policy)
            self._bounds[key] = found, {}
        costs, known = self._bounds[key]
        return self._limited(self._of(layout, costs, memory_only=memory_only, known=known))

    def _bounding(self, placement: Placement) -> Placement | None:
        """A placement whose costs bound those of one that is not compiled."""
        if placement in self._tried:
            return None
        near = self._nearest(placement)
        if near == placement or any(map(self._refusal, (near, scaled_costs.unsharded(placement)))):
            return None
        return near

    def _nearest(self, placement: Placement) -> Placement:
        """One that is compiled: with other loss chunks alone, or the largest of those whose axes are smaller."""
        compiled = self._compiled[scaled_costs.axes(placement)]
        if alike := [p for p in compiled if scaled_costs.is_alike(p, placement)]:
            return alike[0]
        known = [p for p in compiled if scaled_costs.is_within(p, placement)]
        return max([scaled_costs.seed(placement), *known], key=lambda p: p.tp * p.cp * p.ep)

    def weights(self, layout: Layout) -> float:
        """Bytes of parameters, gradients and optimizer states of a rank, at least."""
        stack, stage = self.stack, ZERO_STAGES[layout.zero]
        shards = layout.dp * layout.cp * layout.ep
        local = self._elements / (layout.tp * layout.ep * layout.pp)
        gathers_once = (
            stage.gathers_once if layout.reshard_after_forward == "auto" else not layout.reshard_after_forward
        )
        reduces_once = stage.reduces_once if layout.reduce_grads == "auto" else layout.reduce_grads == "step"
        weight = stack.weight / (shards if layout.zero and not gathers_once else 1)
        gradient = stack.gradient / (shards if layout.zero and not reduces_once else 1)
        states = 0.0 if layout.optimizer_cpu_offload else stack.states / (shards if layout.zero else 1)
        return local * (weight + gradient + states)

    @property
    def limit(self) -> float:
        """Bytes of a rank, of the chip with the most."""
        return min(max(g.data.capacity for g in self.cluster.groups), self.memory_limit or math.inf)

    def _costs(self, layout: Layout) -> ModelCosts:
        return self.model.costs(layout.placement, layout.micro_batch)

    def _refusal(self, placement: Placement) -> str:
        """Why the layers do not compile; "" if they do."""
        if placement not in self._tried:
            try:
                self.model.costs(placement)
                self._tried[placement] = ""
                self._compiled[scaled_costs.axes(placement)].append(placement)
            except ValueError as error:
                self._tried[placement] = " ".join(str(error).split())
        return self._tried[placement]

    def _of(self, layout: Layout, costs: ModelCosts, **how: Any) -> Price:
        return price(layout, costs, self.cluster, self.stack, **how, **self.what_if)

    def _limited(self, found: Price) -> Price:
        return found.limited(self.memory_limit) if self.memory_limit else found


def balanced(seconds: Sequence[Sequence[float]], last: float, most: Sequence[int]) -> tuple[int, ...]:
    """How many of the layers, in their order, each stage has, so that the slowest takes the least time; () if they do
    not hold all. seconds: of each stage, of each layer. last: seconds that the last stage takes besides. most: layers
    of each stage, at most."""
    low, high = 0.0, sum(max(column) for column in zip(*seconds, strict=True)) + last
    best = _filled(seconds, last, most, high)
    for _ in range(BISECTIONS if best else 0):
        limit = (low + high) / 2
        if counts := _filled(seconds, last, most, limit):
            best, high = counts, limit
        else:
            low = limit
    return best


def _filled(seconds: Sequence[Sequence[float]], last: float, most: Sequence[int], limit: float) -> tuple[int, ...]:
    """Layers for each stage, as many as it computes within a limit; () if some are left."""
    at, counts = 0, list[int]()
    for k, row in enumerate(seconds):
        others = len(seconds) - 1 - k  # stages that need a layer as well
        used, count = last if not others else 0.0, 0
        while at < len(row) - others and count < most[k] and used + row[at] <= limit:
            used, at, count = used + row[at], at + 1, count + 1
        if not count:
            return ()
        counts.append(count)
    return tuple(counts) if at == len(seconds[0]) else ()


def certain(price: Price) -> float:
    """Seconds without the causes that other members of a family may avoid."""
    return sum(cause.exposed for cause in price.causes if cause.name not in AVOIDABLE)


def exposed(price: Price, *names: str) -> float:
    """Seconds of some causes that add to the step."""
    return sum(cause.exposed for cause in price.causes if cause.name in names)
