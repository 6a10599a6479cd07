"""What the layers of all pipeline stages recompute, so that every rank stays below its memory limit at every moment.

While a rank runs an action of a part, it holds what its parts have saved for the microbatches in flight, and what is
alive in the part that runs. Early stages of 1F1B hold more microbatches than late ones, so they recompute more.

One price per byte for all parts gives a first choice; then each part in turn takes the best choice that the others
leave room for (`autopar.planner.recompute.layer_solver`). For a single part, this second step is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.planner.recompute.layer_solver import (
    MemoryBudget,
    RecomputeOption,
    alive_by,
    hosted_by,
    least_bytes,
    least_time,
    left_by,
    saved_by,
)
from autopar.schedule.order import BACKWARD, COMPUTE, Order

Layers = Sequence[Sequence[RecomputeOption]]
Choice = list[list[int]]  # part -> layer -> number of a way
ROUNDS, BISECTIONS = 2, 24


@dataclass(frozen=True)
class ScheduleSlot:
    """A moment at which a rank runs F or a backward of a part. held: microbatches of each part that wait for their
    backward, without the one that runs; split: those after B that wait for W. share: of a microbatch that runs (less
    than 1 for a token slice)."""

    rank: int
    part: int
    held: tuple[tuple[int, float], ...] = ()
    split: tuple[tuple[int, float], ...] = ()
    share: float = 1.0

    def copies(self, part: int) -> float:
        """Microbatches of a part that are held."""
        return dict(self.held).get(part, 0.0)

    def outdoes(self, other: ScheduleSlot) -> bool:
        """Whether the same part runs, and no less is held."""
        pairs = ((self.held, other.held), (self.split, other.split))
        more = all(n <= dict(mine).get(p, 0.0) for mine, its in pairs for p, n in its)
        return self.part == other.part and self.share >= other.share and more


def moments(order: Order, shares: Sequence[float] = (1.0,)) -> list[ScheduleSlot]:
    """The moments of an order that no other one of the same rank and part outdoes. shares: of the token slices."""
    found: list[ScheduleSlot] = []
    for rank, actions in enumerate(order.ranks):
        seen: dict[ScheduleSlot, None] = {}
        held: dict[int, float] = {}
        split: dict[int, float] = {}
        for action in actions:
            part, share = order.part_of(action.stage), shares[action.slice]
            if action.kind in BACKWARD:
                held[part] = held.get(part, 0.0) - share
            if action.kind == "W":
                split[part] = split.get(part, 0.0) - share
            if action.kind in COMPUTE:
                seen[ScheduleSlot(rank, part, _counts(held), _counts(split), share)] = None
            if action.kind == "F":
                held[part] = held.get(part, 0.0) + share
            if action.kind == "B":
                split[part] = split.get(part, 0.0) + share
        found += [a for a in seen if not any(b is not a and b.outdoes(a) for b in seen)]
    return found


def _counts(of_parts: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((part, round(n, 9)) for part, n in of_parts.items() if n > 1e-9))


def bytes_at(moment: ScheduleSlot, ways: Sequence[Layers], choice: Choice) -> float:
    """Bytes that a rank holds at a moment."""
    alive = moment.share * alive_by(ways[moment.part], choice[moment.part])
    return alive + held_beside(moment, ways, choice)


def held_beside(moment: ScheduleSlot, ways: Sequence[Layers], choice: Choice, but: int = -1) -> float:
    """Bytes held for later actions: for backwards of all parts except ``but``, and for W of all parts."""
    held = sum(n * saved_by(ways[p], choice[p]) for p, n in moment.held if p != but)
    return held + sum(n * left_by(ways[p], choice[p]) for p, n in moment.split)


def fullest(ways: Sequence[Layers], choice: Choice, events: Sequence[ScheduleSlot], rank: int) -> float:
    """The most bytes that a rank holds."""
    return max((bytes_at(e, ways, choice) for e in events if e.rank == rank), default=0.0)


def best_choice(ways: Sequence[Layers], events: Sequence[ScheduleSlot], limits: Sequence[float]) -> Choice | None:
    """The choice with the least total time under the limit of each rank; None if none was found."""
    choice = _by_price(ways, events, limits) or smallest_choice(ways, events)
    split = any(e.split for e in events)
    for _ in range(0 if split else ROUNDS if len(ways) > 1 else 1):
        for part in range(len(ways)):
            better = _best_of_part(part, ways, choice, events, limits)
            if better is None:
                return None
            choice[part] = better
    if not _fits(ways, choice, events, limits):
        return None
    return _filled(ways, choice, events, limits) if split else choice


# --- host memory ---------------------------------------------------------------------------------------------


def most_hosted(ways: Sequence[Layers], choice: Choice, events: Sequence[ScheduleSlot]) -> dict[int, float]:
    """Rank -> the most bytes that it holds in host memory: for microbatches that wait for their backward or for W, and
    for the one that runs."""
    found: dict[int, float] = {}
    for e in events:
        waiting = sum(n * hosted_by(ways[p], choice[p]) for p, n in (*e.held, *e.split))
        size = waiting + e.share * hosted_by(ways[e.part], choice[e.part])
        found[e.rank] = max(found.get(e.rank, 0.0), size)
    return found


def within_host(
    ways: Sequence[Layers], events: Sequence[ScheduleSlot], limits: Sequence[float], host: float
) -> Choice | None:
    """As `best_choice`, with at most ``host`` bytes of a rank in host memory. If that is too little for all layers of a
    part, its first layers use it: what they keep waits longest."""
    first = [len(layers) for layers in ways]  # layers of each part that may use host memory
    while True:
        kept = [
            [[k for k, w in enumerate(layer) if i < first[part] or not w.host] for i, layer in enumerate(layers)]
            for part, layers in enumerate(ways)
        ]
        found = _chosen_of(ways, kept, lambda fewer: best_choice(fewer, events, limits))
        if found is None and any(first):  # no choice with few layers: there may be one with none
            first = [0] * len(ways)
            continue
        if found is None:
            return None
        used = most_hosted(ways, found, events)
        over = {e.part: used[e.rank] for e in events if used[e.rank] > host and first[e.part]}
        if not over:
            return found if max(used.values(), default=0.0) <= host else None
        for part, size in over.items():
            first[part] = min(first[part] - 1, int(first[part] * host / size))


def _chosen_of(
    ways: Sequence[Layers], kept: Sequence[Sequence[Sequence[int]]], choose: Callable[[Sequence[Layers]], Choice | None]
) -> Choice | None:
    """A choice among some of the ways, as indices into all ways."""
    fewer = [[[ws[k] for k in ks] for ws, ks in zip(*pair, strict=True)] for pair in zip(ways, kept, strict=True)]
    found = choose(fewer)
    return found and [[ks[k] for ks, k in zip(*pair, strict=True)] for pair in zip(kept, found, strict=True)]


def smallest_within_host(ways: Sequence[Layers], events: Sequence[ScheduleSlot], host: float) -> Choice:
    """As `smallest_choice`, with at most an equal share of host memory for every layer."""
    copies = max((sum(n for _, n in (*e.held, *e.split)) + e.share for e in events), default=1.0)
    share = host / (copies * max((len(layers) for layers in ways), default=1))
    kept = [[[k for k, w in enumerate(layer) if w.host <= share] for layer in layers] for layers in ways]
    found = _chosen_of(ways, kept, lambda fewer: smallest_choice(fewer, events))
    assert found is not None
    return found


def _filled(ways: Sequence[Layers], choice: Choice, events: Sequence[ScheduleSlot], limits: Sequence[float]) -> Choice:
    """For each layer the fastest way that still fits, starting with the layers that recompute longest."""
    places = [(part, i) for part, layers in enumerate(ways) for i in range(len(layers))]
    places.sort(key=lambda at: -ways[at[0]][at[1]][choice[at[0]][at[1]]].seconds)
    for part, i in places:
        at = choice[part][i]
        for k in sorted(range(len(ways[part][i])), key=lambda k, w=ways[part][i]: w[k].seconds):  # type: ignore[misc]
            if k == at:
                break
            before, choice[part][i] = choice[part][i], k
            if _fits(ways, choice, events, limits):
                break
            choice[part][i] = before
    return choice


def _fits(ways: Sequence[Layers], choice: Choice, events: Sequence[ScheduleSlot], limits: Sequence[float]) -> bool:
    return all(bytes_at(e, ways, choice) <= limits[e.rank] * (1 + 1e-9) for e in events)


def _by_price(ways: Sequence[Layers], events: Sequence[ScheduleSlot], limits: Sequence[float]) -> Choice | None:
    """The best ways at the lowest price per byte for which every rank stays below its limit."""
    weights = [_weights(p, events) for p in range(len(ways))]
    seconds = sum(max(w.seconds for w in layer) for layers in ways for layer in layers)
    size = max((max(w.saved for w in layer) for layers in ways for layer in layers), default=0)
    if not size or not seconds:
        return None

    def cheapest(layer: Sequence[RecomputeOption], price: float, weight: tuple[float, float]) -> int:
        costs = [w.seconds + price * (weight[0] * w.saved + weight[1] * w.left) for w in layer]
        return min(range(len(layer)), key=costs.__getitem__)

    def at(price: float) -> Choice:
        return [[cheapest(w, price, weight) for w in layers] for layers, weight in zip(ways, weights, strict=True)]

    low, high, found = math.log(1e-9 * seconds / size), math.log(1e6 * seconds / size), None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        choice = at(math.exp(middle))
        if _fits(ways, choice, events, limits):
            high, found = middle, choice
        else:
            low = middle
    return found


def _weights(part: int, events: Sequence[ScheduleSlot]) -> tuple[float, float]:
    """(most microbatches for which a rank holds what a part saves, most for which it holds what its B leaves for W)."""
    mine = [e for e in events if e.part == part]
    return (
        max((e.copies(part) + e.share for e in mine), default=1.0),
        max((dict(e.split).get(part, 0.0) for e in mine), default=0.0),
    )


def _best_of_part(
    part: int, ways: Sequence[Layers], choice: Choice, events: Sequence[ScheduleSlot], limits: Sequence[float]
) -> list[int] | None:
    """The best ways of a part, given the choices of the others; None if none fits."""
    rooms, most = [], math.inf
    for e in events:
        others, copies = held_beside(e, ways, choice, but=part), e.copies(part)
        if e.part == part:
            rooms.append(MemoryBudget(limits[e.rank] - others, copies, e.share))
        elif copies:
            rest = limits[e.rank] - others - e.share * alive_by(ways[e.part], choice[e.part])
            most = min(most, rest / copies)
    return least_time(ways[part], rooms, most)


def smallest_choice(ways: Sequence[Layers], events: Sequence[ScheduleSlot]) -> Choice:
    """The choice with which each part holds least at its fullest moment."""
    return [_smallest_of_part(part, layers, events) for part, layers in enumerate(ways)]


def _smallest_of_part(part: int, layers: Layers, events: Sequence[ScheduleSlot]) -> list[int]:
    mine = [e for e in events if e.part == part]
    by_saved = least_bytes(layers, [MemoryBudget(0.0, e.copies(part), e.share) for e in mine] or [MemoryBudget(0.0)])
    saved, left = _weights(part, events)
    if not left:
        return by_saved
    held = [[saved * w.saved + left * w.left for w in ways] for ways in layers]
    by_both = [min(range(len(ways)), key=costs.__getitem__) for ways, costs in zip(layers, held, strict=True)]

    def most(choice: list[int]) -> float:
        total, rest, alive = saved_by(layers, choice), left_by(layers, choice), alive_by(layers, choice)
        return max(e.copies(part) * total + dict(e.split).get(part, 0.0) * rest + e.share * alive for e in mine)

    return min([by_saved, by_both, [0] * len(layers)], key=most)
