"""Adds the transfers, gathers and reductions to an order of F, B, W and BW: `lower`.

rank 0    0F0              0F1                        0BW0            0BW1
rank 1            1F0             1BW0    1F1                 1BW1
-->
rank 0    0F0 0SF0>1   0RB0<1 0F1 0SF1>1   0RB1<1 0BW0   0BW1
rank 1    1RF0<0   1RF1<0 1F0   1BW0 1SB0>0   1F1   1BW1 1SB1>0
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from autopar.schedule.order import COMPUTE, Action, Order, P2PEdge
from autopar.schedule.order_checks import counterpart, validate

Channel = tuple[int, int]  # sending rank, receiving rank


def lower(
    order: Order,
    edges: Iterable[P2PEdge],
    gathers: Set[int] = frozenset(),
    reductions: Set[int] = frozenset(),
    joined: Set[int] = frozenset(),
) -> Order:
    """The order with transfers for ``edges``, and with G and R of the parts in ``gathers`` and ``reductions``; the last
    BW of the parts in ``joined`` becomes BWR.

    One transfer moves all values of a pair of stages for a microbatch (and slice), gradients only if some edge has one;
    stages of one rank need none. A send comes right after the action that computes its values, also inside a cell. A
    receive comes one compute action before its use, so that it overlaps, or earlier: on every channel (ordered pair of
    ranks) receives have the order of the sends, because NCCL has no tags. G comes right before the first F of a stage,
    R right after its last W or BW (outside a cell).
    Raises ScheduleError for an incomplete order.
    """
    assert not order.lowered, f"{order.name} is lowered already"
    validate(order)
    ways = _ways(order, edges)
    cells = [_cells(actions) for actions in order.ranks]
    sends = [[_sends(order, action, ways) for action in actions] for actions in order.ranks]
    arriving = _arriving(order, sends)
    posted = [_receives(rank, rows, arriving[rank]) for rank, rows in enumerate(cells)]
    ranks = []
    for rank, rows in enumerate(cells):
        made = {action: moved for action, moved in zip(order.ranks[rank], sends[rank])}
        gather, reduce = _parameters(order, rows, gathers, reductions)
        out: list[Action] = []
        for index, cell in enumerate(rows):
            out += posted[rank][index] + gather.get(index, [])
            for action in cell:
                out += [action, *made[action]]
            out += reduce.get(index, [])
        ranks.append(tuple(_joined(order, out, joined)))
    return replace(order, ranks=tuple(ranks))


def _joined(order: Order, actions: list[Action], parts: Set[int]) -> list[Action]:
    """The actions of a rank, with BWR for the last BW of each stage that runs one of ``parts``."""
    last = {a.stage: i for i, a in enumerate(actions) if a.kind == "BW" and order.part_of(a.stage) in parts}
    return [replace(a, kind="BWR") if last.get(a.stage) == i else a for i, a in enumerate(actions)]


def _ways(order: Order, edges: Iterable[P2PEdge]) -> dict[tuple[str, int], list[int]]:
    """(F or B, stage that makes values) -> stages on other ranks that they go to, nearest part first."""
    ways: dict[tuple[str, int], set[int]] = {}
    for edge in edges:
        assert 0 <= edge.source < edge.target < order.parts, f"{edge} does not fit {order.parts} parts"
        for chain in order.chains:
            source, target = chain[edge.source], chain[edge.target]
            if order.rank_of[source] != order.rank_of[target]:
                ways.setdefault(("F", source), set()).add(target)
                if edge.gradient:
                    ways.setdefault(("B", target), set()).add(source)
    return {(way, stage): sorted(peers, key=order.part_of, reverse=way == "B") for (way, stage), peers in ways.items()}


def _sends(order: Order, action: Action, ways: dict[tuple[str, int], list[int]]) -> list[Action]:
    """The sends after an action."""
    way = "B" if action.kind == "BW" else action.kind
    peers = ways.get((way, action.stage), [])
    return [Action(action.stage, f"S{way}", action.microbatch, action.slice, peer) for peer in peers]


def _cells(actions: Iterable[Action]) -> list[list[Action]]:
    """Actions in groups that run together."""
    cells: list[list[Action]] = []
    joins = False
    for action in actions:
        assert action.kind in COMPUTE, action
        if joins:
            cells[-1].append(action)
        else:
            cells.append([action])
        joins = action.paired
    return cells


def _arriving(order: Order, sends: list[list[list[Action]]]) -> list[list[tuple[int, Action]]]:
    """receiving rank -> (sending rank, send), in the order of the sends."""
    found: list[list[tuple[int, Action]]] = [[] for _ in order.ranks]
    for source, moved in enumerate(sends):
        for group in moved:
            for send in group:
                found[order.rank_of[send.peer]].append((source, send))
    return found


def _receives(rank: int, cells: list[list[Action]], arriving: list[tuple[int, Action]]) -> list[list[Action]]:
    """cell -> receives to post ahead of it."""
    queues: dict[Channel, list[Action]] = {}  # receives of this rank, in the order of the sends, last first
    users: dict[tuple[str, int, int, int], list[tuple[Channel, Action]]] = {}
    for source, send in arriving:
        channel, receive = (source, rank), counterpart(send)
        queues.setdefault(channel, []).append(receive)
        unit = (receive.kind[1], receive.stage, receive.microbatch, receive.slice)
        users.setdefault(unit, []).append((channel, receive))
    for queue in queues.values():
        queue.reverse()
    posted: list[list[Action]] = [[] for _ in cells]
    done: set[Action] = set()
    for index, cell in enumerate(cells):
        for action in cell:
            way = "B" if action.kind == "BW" else action.kind
            for channel, receive in users.get((way, action.stage, action.microbatch, action.slice), []):
                while receive not in done:
                    first = queues[channel].pop()  # what was sent earlier on the channel must be posted earlier
                    done.add(first)
                    posted[max(0, index - 1)].append(first)
    return posted


def _parameters(
    order: Order, cells: list[list[Action]], gathers: Set[int], reductions: Set[int]
) -> tuple[dict[int, list[Action]], dict[int, list[Action]]]:
    """Gathers ahead of cells, and reductions behind cells, of one rank."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, cell in enumerate(cells):
        for action in cell:
            if action.kind == "F":
                first.setdefault(action.stage, index)
            if action.kind in ("W", "BW"):
                last[action.stage] = index
    gather: dict[int, list[Action]] = {}
    reduce: dict[int, list[Action]] = {}
    for stage, index in first.items():
        if order.part_of(stage) in gathers:
            gather.setdefault(index, []).append(Action(stage, "G"))
    for stage, index in last.items():
        if order.part_of(stage) in reductions:
            reduce.setdefault(index, []).append(Action(stage, "R"))
    return gather, reduce
