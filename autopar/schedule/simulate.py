"""When every action of an order runs, on given costs, and the proof that there is no deadlock.

Each rank runs its list in order. An action starts when its rank is free and its inputs have arrived: at once from the
same rank, ``costs.comm`` after the end of the action (or after the send) from another one. Transfers are pure latency
and keep no rank busy. This is the model of Zero Bubble (Qi et al. 2024); it reproduces Table 5 to four decimals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from autopar.schedule.order import BACKWARD, COMPUTE, PARAMETERS, TRANSFERS, Action, Order, ScheduleError
from autopar.schedule.order_checks import check_channels
from autopar.schedule.request import Costs

UNIT_COSTS = Costs()


@dataclass(frozen=True)
class Timeline:
    """An order with times. start, end: per rank, one per action of ``order.ranks[rank]``; the two actions of a fused
    cell share them. busy: per rank, the time in which it computes. live: per rank, the most units (stage, microbatch,
    slice) whose F has run and whose B or BW has not. memory: per rank, the peak in the units of the costs."""

    order: Order
    costs: Costs
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]
    live: tuple[int, ...]
    memory: tuple[float, ...]
    window: tuple[tuple[float, float], ...] = field(repr=False)  # rank -> first start, last end of what takes time

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end over all ranks."""
        return max(last for _, last in self.window) - min(first for first, _ in self.window)

    @property
    def cost(self) -> float:
        """The longest time that one rank takes, from its own first start (Zero Bubble, appendix G): the time of a step
        if the next one may start on each rank as soon as that rank is done."""
        return max(last - first for first, last in self.window)

    @property
    def bubble(self) -> float:
        """Idle share of ``cost``, averaged over ranks; for equal stages 1 - m (F + B + W) / cost, as in Table 5."""
        return 1 - sum(self.busy) / len(self.busy) / self.cost if self.cost else 0.0

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank, the part of the makespan in which it computes nothing."""
        return tuple(self.makespan - busy for busy in self.busy)


def simulate(order: Order, costs: Costs = UNIT_COSTS, *, fused: bool = True) -> Timeline:
    """Run an order, lowered or not, on ``costs``.

    fused: a paired cell waits for the inputs of both its actions, takes ``costs.FB`` and ends at once; otherwise its
    actions run one after the other, each as soon as its own input is there.
    Raises ScheduleError for a deadlock and for transfers that do not match; ValueError for costs of the wrong length.
    """
    check_costs(order, costs)
    if order.lowered:
        check_channels(order)
    run = _Simulation(order, costs, fused)
    run.finish()
    live, memory = peaks(order, costs)
    return Timeline(
        order,
        costs,
        tuple(map(tuple, run.starts)),
        tuple(map(tuple, run.ends)),
        tuple(run.busy),
        live,
        memory,
        tuple(_window(order, rank, run.starts[rank], run.ends[rank]) for rank in range(len(order.ranks))),
    )


def check_costs(order: Order, costs: Costs) -> None:
    """Raises ValueError when a tuple of costs does not have one value per part, or per slice."""
    for name in ("F", "B", "W", "G", "R", "activations", "stash"):
        value = getattr(costs, name)
        if isinstance(value, tuple) and len(value) != order.parts:
            raise ValueError(f"costs: {name} needs one value per part ({order.parts}), found {len(value)}")
    if isinstance(costs.FB, tuple) and {len(costs.FB), *map(len, costs.FB)} != {order.parts}:
        raise ValueError(f"costs: FB needs a value for each pair of {order.parts} parts, found {costs.FB}")
    for name in ("scale", "tokens"):
        value = getattr(costs, name)
        if value and len(value) != order.slices:
            raise ValueError(f"costs: {name} needs one value per token slice ({order.slices}), found {len(value)}")


def per_part(value: float | tuple[float, ...], part: int) -> float:
    """A cost of one part."""
    return value[part] if isinstance(value, tuple) else value


def duration(order: Order, costs: Costs, action: Action) -> float:
    """Time that an action keeps its rank busy (in a fused cell: what it adds without ``costs.FB``)."""
    if action.kind in TRANSFERS:
        return 0.0
    part = order.part_of(action.stage)
    if action.kind in PARAMETERS:
        return per_part(costs.G if action.kind == "G" else costs.R, part)
    time = sum(per_part(getattr(costs, kind), part) for kind in action.kind)  # BW: B, then W; BWR: then R
    return time * (costs.scale[action.slice] if costs.scale else 1 / order.slices)


def _window(order: Order, rank: int, starts: Sequence[float], ends: Sequence[float]) -> tuple[float, float]:
    """First start and last end of what takes time on a rank."""
    rows = zip(order.ranks[rank], starts, ends)
    spans = [(start, end) for action, start, end in rows if action.kind in COMPUTE or end > start]
    return (min(start for start, _ in spans), max(end for _, end in spans)) if spans else (0.0, 0.0)


class _Simulation:
    """Every rank runs until it has to wait, and continues when its input arrives."""

    def __init__(self, order: Order, costs: Costs, fused: bool) -> None:
        self.order, self.costs, self.fused = order, costs, fused
        self.rank_of = order.rank_of
        self.needs = Dependencies(order)
        self.done: dict[Key, float] = {}
        self.waiting: dict[Key, list[int]] = {}
        self.durations: dict[tuple[str, int, int], float] = {}
        self.clock = [0.0] * len(order.ranks)
        self.busy = [0.0] * len(order.ranks)
        self.position = [0] * len(order.ranks)
        self.starts = [[-1.0] * len(actions) for actions in order.ranks]
        self.ends = [[-1.0] * len(actions) for actions in order.ranks]

    def finish(self) -> None:
        ready = list(range(len(self.order.ranks)))
        while ready:
            ready += self.advance(ready.pop())
        if any(position < len(actions) for position, actions in zip(self.position, self.order.ranks)):
            raise self.deadlock()

    def advance(self, rank: int) -> list[int]:
        """Run a rank until it waits; returns the ranks that waited for what it did."""
        actions, ends = self.order.ranks[rank], self.ends[rank]
        woken: list[int] = []
        for index in range(self.position[rank], len(actions)):
            self.position[rank] = index
            if ends[index] >= 0:  # the second half of a cell, which has run
                continue
            cell = self.cell(rank, index)
            start, missing = self.arrival(rank, [key for i in cell for key in self.needs(actions[i])])
            if missing is not None:
                self.waiting.setdefault(missing, []).append(rank)
                return woken
            woken += self.execute(rank, cell, start)
        self.position[rank] = len(actions)
        return woken

    def cell(self, rank: int, index: int) -> tuple[int, ...]:
        """Indices of the actions that run together."""
        actions = self.order.ranks[rank]
        if not (actions[index].paired and self.fused):
            return (index,)
        return index, next(i for i in range(index + 1, len(actions)) if actions[i].kind in COMPUTE)

    def arrival(self, rank: int, needs: list[Key]) -> tuple[float, Key | None]:
        """(the time at which the rank is free and has all inputs, or an input that is not there yet)."""
        start = self.clock[rank]
        for key in needs:
            time = self.done.get(key)
            if time is None:
                return start, key
            if self.rank_of[key[1]] != rank:
                time += self.costs.comm
            if time > start:
                start = time
        return start, None

    def execute(self, rank: int, cell: tuple[int, ...], start: float) -> list[int]:
        """Record when a cell runs; returns the ranks that waited for it."""
        actions = self.order.ranks[rank]
        time = 0.0
        for i in cell:
            time += self.duration(actions[i])
        if len(cell) == 2 and self.costs.FB is not None:
            time = self.together(actions[cell[0]], actions[cell[1]], time)
        woken: list[int] = []
        for i in cell:
            key = key_of(actions[i])
            self.starts[rank][i] = start
            self.ends[rank][i] = self.done[key] = start + time
            if key in self.waiting:
                woken += self.waiting.pop(key)
        self.clock[rank] = start + time
        self.busy[rank] += time
        return woken

    def together(self, first: Action, second: Action, alone: float) -> float:
        """Time of a cell. ``alone``: of its actions one after the other."""
        if not isinstance(self.costs.FB, tuple):
            return alone if self.costs.FB is None else self.costs.FB
        ahead, back = self.order.part_of(first.stage), self.order.part_of(second.stage)
        return self.costs.FB[ahead][back] if (first.kind, second.kind) == ("F", "BW") else alone

    def duration(self, action: Action) -> float:
        unit = (action.kind, action.stage, action.slice)
        if unit not in self.durations:
            self.durations[unit] = duration(self.order, self.costs, action)
        return self.durations[unit]

    def deadlock(self) -> ScheduleError:
        """The error, with the position of every rank and what it waits for."""
        marks = {rank: at for rank, at in enumerate(self.position) if at < len(self.order.ranks[rank])}
        known = {key_of(action): action for actions in self.order.ranks for action in actions}
        stuck = []
        for key, ranks in self.waiting.items():
            kind, stage, microbatch, piece, peer = key
            absent = f"{Action(stage, kind, microbatch, piece, peer)}, which no rank runs"
            missing = str(known.get(key, absent))
            for rank in ranks:
                stuck.append((rank, f"rank {rank} at {self.order.ranks[rank][marks[rank]]} waits for {missing}"))
        return ScheduleError(self.order, "deadlock: " + "; ".join(text for _, text in sorted(stuck)), marks)


def peaks(order: Order, costs: Costs) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Per rank: most live units, and most memory. F adds ``activations``, B leaves ``stash``, W and BW free it."""
    each = [_rank_peaks(order, costs, actions) for actions in order.ranks]
    return tuple(live for live, _ in each), tuple(memory for _, memory in each)


def _rank_peaks(order: Order, costs: Costs, actions: Sequence[Action]) -> tuple[int, float]:
    changes: dict[tuple[str, int, int], float] = {}
    live = most_live = 0
    memory = most_memory = freed_with_cell = 0.0
    for action in actions:
        kind, unit = action.kind, (action.kind, action.stage, action.slice)
        if kind not in LIVE_CHANGE:
            continue
        if unit not in changes:
            changes[unit] = _memory_change(order, costs, action)
        change = changes[unit]
        live += LIVE_CHANGE[kind]
        if action.paired and change < 0:  # the other half of the cell runs before this one ends
            freed_with_cell, change = change, 0.0
        memory += change
        if live > most_live:
            most_live = live
        if memory > most_memory:
            most_memory = memory
        if not action.paired:
            memory, freed_with_cell = memory + freed_with_cell, 0.0
    return most_live, most_memory


LIVE_CHANGE = {"F": 1, "B": -1, "W": 0, "BW": -1, "BWR": -1}


def _memory_change(order: Order, costs: Costs, action: Action) -> float:
    part = order.part_of(action.stage)
    share = costs.tokens[action.slice] if costs.tokens else 1 / order.slices
    held, stash = per_part(costs.activations, part) * share, per_part(costs.stash, part) * share
    return {"F": held, "B": stash - held, "W": -stash, "BW": -held, "BWR": -held}[action.kind]


# --- what an action waits for --------------------------------------------------------------------------

Key = tuple[str, int, int, int, int]
"""(kind, stage, microbatch, slice, peer) of an action; BW and BWR count as B."""


def key_of(action: Action) -> Key:
    """The key that other actions wait for when they wait for this one."""
    kind = "B" if action.kind in BACKWARD else action.kind
    return kind, action.stage, action.microbatch, action.slice, action.peer


class Dependencies:
    """``dependencies(action)`` lists the keys that the action waits for, in a simulation and in a runtime.

        F(part)    F(part-1) of the same microbatch and slice; F of the slice before on the same stage
        B, BW, BWR own F; B(part+1); B of the slice behind on the same stage (backward runs slices in reverse)
        W          own B
        SF, SB     own F, own B
        RF, RB     nothing: they are posted, and the action that uses the value waits for the send at the other end

    In a lowered order, values from other ranks come only through transfers; between stages of one rank, F and B wait
    for the nearest stage of the same chain.
    """

    def __init__(self, order: Order) -> None:
        """``order``: lowered or not."""
        self.slices = order.slices
        self.before: dict[int, int] = {}  # stage -> stage whose F comes first without a transfer
        self.behind: dict[int, int] = {}
        for chain in order.chains:
            for i, stage in enumerate(chain):
                known = [s for s in chain[:i] if not order.lowered or order.rank_of[s] == order.rank_of[stage]]
                if known:
                    self.before[stage] = known[-1]
            for stage, following in pairwise(chain):
                if not order.lowered:
                    self.behind[stage] = following
        if order.lowered:
            self.behind = {first: second for second, first in self.before.items()}
        self.receives: dict[tuple[str, int, int, int], list[Key]] = {}
        for actions in order.ranks:
            for action in actions:
                if action.kind in ("RF", "RB"):
                    unit = (action.kind[1], action.stage, action.microbatch, action.slice)
                    self.receives.setdefault(unit, []).append(key_of(action))

    def __call__(self, action: Action) -> list[Key]:
        """The keys, the one that is usually last to be available first."""
        kind, stage, microbatch, piece = action.kind, action.stage, action.microbatch, action.slice
        if kind in ("W", "SB"):
            return [("B", stage, microbatch, piece, -1)]
        if kind == "SF":
            return [("F", stage, microbatch, piece, -1)]
        if kind != "F" and kind not in BACKWARD:
            return []
        way, nearest, beside = ("F", self.before, piece - 1) if kind == "F" else ("B", self.behind, piece + 1)
        posted = self.receives.get((way, stage, microbatch, piece), [])
        keys = [*posted, *((f"S{way}", peer, microbatch, piece, stage) for _, _, _, _, peer in posted)]
        if stage in nearest:
            keys.append((way, nearest[stage], microbatch, piece, -1))
        if 0 <= beside < self.slices:
            keys.append((way, stage, microbatch, beside, -1))
        return keys if way == "F" else [*keys, ("F", stage, microbatch, piece, -1)]
