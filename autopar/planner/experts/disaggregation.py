"""Whether to serve attention and experts on GPUs of their own: the best deployment of each kind, by estimate.

Each generates most tokens per second and GPU, or per price, of those whose steps keep a limit and which fit in memory.
More tokens per node are never worse: a step's time is a sum of maxima of fixed + rows * seconds. So each combination
of tp, nodes and microbatches takes as many tokens as limit and memory allow, found by bisection.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from autopar.chips import Chip
from autopar.cost.ping_pong import LayerTimes, exposed_seconds, overlapped_seconds, step_seconds
from autopar.cost.roles import ExpertLayers, RoleCost

APART, EXPOSED, OVERLAPPED = "disaggregated", "colocated", "colocated, two half batches"
NODES, MICROBATCHES = 64, 4  # most of both
_MOST_TOKENS = 1 << 20  # of a node and microbatch


@dataclass(frozen=True)
class RoleChip:
    """The chip of a role. price: of one per hour, in any currency; 0: not given."""

    name: str
    chip: Chip
    price: float = 0.0


@dataclass(frozen=True)
class Deployment:
    """How a model is served, and what that gives. nodes: with attention; each has ``tp[0]`` ranks. tokens: per node and
    microbatch. rows: of one expert and microbatch. times: of a layer and microbatch. seconds: of a step, in which each
    request gets one token. price: of the GPUs of each role per hour."""

    kind: str
    chips: tuple[str, str]
    tp: tuple[int, int]
    nodes: int
    microbatches: int
    tokens: int
    rows: float
    times: LayerTimes
    seconds: float
    gpus: tuple[int, int]  # with attention, with experts alone
    price: tuple[float, float]

    @property
    def tokens_per_second(self) -> float:
        return self.nodes * self.microbatches * self.tokens / self.seconds

    @property
    def per_gpu(self) -> float:
        return self.tokens_per_second / sum(self.gpus)

    @property
    def per_price(self) -> float:
        """Tokens per unit of the price; 0 without prices."""
        return 3600 * self.tokens_per_second / sum(self.price) if any(self.price) else 0.0


def best_apart(
    layers: ExpertLayers,
    chips: tuple[RoleChip, RoleChip],
    limit: float,
    *,
    most_nodes: int = NODES,
    microbatches: Sequence[int] = range(1, MICROBATCHES + 1),
) -> Deployment:
    """Attention on ``chips[0]``, a node for each expert on ``chips[1]``; steps take at most ``limit`` seconds. Raises
    ValueError if nothing fits in memory or keeps the limit."""
    found, nodes = _Best(APART, layers, chips, limit), np.arange(1, most_nodes + 1)
    tps = list(itertools.product(layers.attention, layers.experts))
    for tp, m in itertools.product(tps, microbatches):
        fits = layers.experts[tp[1]].weights <= chips[1].chip.capacity
        room = _room(layers.attention[tp[0]], chips[0].chip) // m if fits else 0
        times = partial(layers.apart, nodes=nodes, tp=tp, chips=(chips[0].chip, chips[1].chip))
        seconds = partial(step_seconds, layers=layers.layers, microbatches=m)
        found.add(tp, m, nodes, room, times, seconds, (nodes * tp[0], layers.num_experts * tp[1] + 0 * nodes))
    return found.deployment()


def best_together(layers: ExpertLayers, on: RoleChip, limit: float, overlapped: bool) -> Deployment:
    """Attention and experts on the same GPUs, experts over two nodes or more. Raises ValueError as `best_apart`."""
    m, kind = (2, OVERLAPPED) if overlapped else (1, EXPOSED)
    found = _Best(kind, layers, (on, on), limit)
    seconds = partial(overlapped_seconds if overlapped else exposed_seconds, layers=layers.layers)
    tps = [tp for tp in layers.attention if tp in layers.experts]
    for tp, nodes in itertools.product(tps, _divisors(layers.num_experts)):
        others = layers.num_experts / nodes * layers.experts[tp].weights
        room = _room(layers.attention[tp], on.chip, others) // m
        times, count = partial(layers.together, nodes=nodes, tp=tp, chip=on.chip), np.array([nodes])
        found.add((tp, tp), m, count, room, times, seconds, (count * tp, 0 * count))
    return found.deployment()


def _divisors(experts: int) -> list[int]:
    """Numbers of nodes that have equally many experts, two or more."""
    return [n for n in range(2, experts + 1) if experts % n == 0]


def _room(attention: RoleCost, chip: Chip, others: float = 0.0) -> int:
    """Requests whose keys and values fit beside the weights."""
    left = chip.capacity - attention.weights - others
    if left <= 0:
        return 0
    return min(int(left / attention.cache), _MOST_TOKENS) if attention.cache else _MOST_TOKENS


def most_tokens(fits: Callable[[Any], Any], most: Any) -> Any:
    """The largest whole numbers up to ``most`` that fit, elementwise; 0 where none does."""
    low, high = np.zeros_like(most), most + 1
    while (high - low > 1).any():
        middle = (low + high) // 2
        good = fits(middle)
        low, high = np.where(good, middle, low), np.where(good, high, middle)
    return low


class _Best:
    """The best of the deployments that were added."""

    def __init__(self, kind: str, layers: ExpertLayers, chips: tuple[RoleChip, RoleChip], limit: float) -> None:
        self.kind, self.layers, self.chips, self.limit = kind, layers, chips, limit
        self.value, self.least = 0.0, np.inf  # the latter: seconds of a step with one token per node
        self.found: Deployment | None = None

    def add(
        self, tp: tuple[int, int], m: int, nodes: Any, room: int,
        times: Callable[[Any], LayerTimes], seconds: Callable[[LayerTimes], Any], gpus: tuple[Any, Any],
    ) -> None:  # fmt: skip
        """Deployments on ``nodes``, an array; ``room``: most tokens per node and microbatch."""
        if not room:
            return
        self.least = min(self.least, seconds(times(np.ones_like(nodes))).min())
        tokens = most_tokens(lambda count: seconds(times(count)) <= self.limit, np.full(nodes.shape, room))
        layer = times(tokens)
        took, prices = seconds(layer), [count * chip.price for count, chip in zip(gpus, self.chips, strict=True)]
        paid = sum(prices if any(chip.price for chip in self.chips) else gpus)
        values = nodes * m * tokens / (took * paid)
        i = int(values.argmax())
        if values[i] > self.value:
            self.value = values[i]
            self.found = Deployment(
                self.kind, (self.chips[0].name, self.chips[1].name), tp, int(nodes[i]), m, int(tokens[i]),
                float(self.layers.rows_of_expert(nodes[i] * tokens[i])), LayerTimes(*(float(x[i]) for x in layer)),
                float(took[i]), (int(gpus[0][i]), int(gpus[1][i])), (float(prices[0][i]), float(prices[1][i])),
            )  # fmt: skip

    def deployment(self) -> Deployment:
        if self.found is not None:
            return self.found
        if np.isfinite(self.least):
            raise ValueError(
                f"limit: needs steps of at least {self.least * 1e3:.3g} ms ({self.kind}), found "
                f"{self.limit * 1e3:.3g} ms; raise it, or use faster chips"
            )
        a, e = (cost[max(cost)].weights / 1e9 for cost in (self.layers.attention, self.layers.experts))
        have = " and ".join(dict.fromkeys(f"{c.chip.capacity / 1e9:.3g} GB ({c.name})" for c in self.chips))
        raise ValueError(
            f"experts: needs memory for {a:.3g} GB of attention's weights and a request beside them, and {e:.3g} GB "
            f"of an expert's, per rank at the largest tp ({self.kind}), found {have}; use chips with more memory or a "
            "smaller dtype"
        )
