"""Whether an order runs every action once, on the right rank, with both ends of every transfer, without deadlocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import pairwise

from autopar.schedule.order import BACKWARD, COMPUTE, TRANSFERS, Action, Order, ScheduleError

Unit = tuple[int, int, int]  # stage, microbatch, slice
Place = tuple[int, int]  # rank, index


def validate(order: Order) -> None:
    """Check an order, lowered or not: every unit (stage of its microbatch's chain, microbatch, slice) has one F and
    one BW, or one F, one B and one W, in this order and on the rank of its stage; or F alone, if the order has no
    backward. Raises ScheduleError."""
    _check_chains(order)
    units: dict[Unit, dict[str, Place]] = {}
    for rank, actions in enumerate(order.ranks):
        for index, action in enumerate(actions):
            _check_action(order, rank, index)
            if action.kind in COMPUTE:
                unit = units.setdefault((action.stage, action.microbatch, action.slice), {})
                kind = "BW" if action.kind == "BWR" else action.kind
                if kind in unit:
                    raise ScheduleError(order, f"{action} occurs twice", {rank: index})
                unit[kind] = (rank, index)
    complete = [["BW", "F"], ["B", "F", "W"]] if any(unit.keys() != {"F"} for unit in units.values()) else [["F"]]
    for microbatch, chain in enumerate(order.chain_of):
        for stage in order.chains[chain]:
            for piece in range(order.slices):
                unit = units.get((stage, microbatch, piece), {})
                if sorted(unit) not in complete:
                    _raise_incomplete(order, Action(stage, "F", microbatch, piece), unit)
                _check_sequence(order, unit)
    if order.lowered:
        check_channels(order)


def _check_chains(order: Order) -> None:
    """Check that every stage is in one chain, and that all chains have the same parts."""
    if not order.chains or not order.chain_of:
        raise ScheduleError(order, "needs at least one chain of stages and one microbatch")
    stages = sorted(stage for chain in order.chains for stage in chain)
    if stages != list(range(len(order.rank_of))):
        raise ScheduleError(order, f"every stage 0..{len(order.rank_of) - 1} must be in one chain, found {stages}")
    if len({len(chain) for chain in order.chains}) != 1:
        raise ScheduleError(order, f"chains must have equally many parts, found {order.chains}")
    if not all(0 <= chain < len(order.chains) for chain in order.chain_of):
        raise ScheduleError(order, f"microbatches take chains 0..{len(order.chains) - 1}, found {order.chain_of}")
    if not all(0 <= rank < len(order.ranks) for rank in order.rank_of):
        raise ScheduleError(order, f"stages run on ranks 0..{len(order.ranks) - 1}, found {order.rank_of}")


def _check_action(order: Order, rank: int, index: int) -> None:
    """Check that it names existing stages, on the right rank, and that a cell has a second half."""
    action, here = order.ranks[rank][index], {rank: index}
    for stage in (action.stage, action.peer) if action.kind in TRANSFERS else (action.stage,):
        if not 0 <= stage < len(order.rank_of):
            raise ScheduleError(order, f"{action} names stage {stage}; there are {len(order.rank_of)}", here)
    if order.rank_of[action.stage] != rank:
        raise ScheduleError(order, f"{action} is on rank {rank}; its rank is {order.rank_of[action.stage]}", here)
    if not 0 <= action.microbatch < order.microbatches or not 0 <= action.slice < order.slices:
        most = f"{order.microbatches} microbatches of {order.slices} token slices"
        raise ScheduleError(order, f"{action} is beyond the {most}", here)
    if action.kind in COMPUTE and action.stage not in order.chains[order.chain_of[action.microbatch]]:
        raise ScheduleError(order, f"{action}: microbatch {action.microbatch} takes another chain", here)
    if action.paired:
        behind = next((a for a in order.ranks[rank][index + 1 :] if a.kind not in TRANSFERS), None)
        if action.kind not in COMPUTE or behind is None or behind.kind not in COMPUTE or behind.paired:
            raise ScheduleError(order, f"{action} needs a compute action after it to run as one cell with", here)


def _raise_incomplete(order: Order, forward: Action, found: dict[str, Place]) -> None:
    kinds = ", ".join(found) or "nothing"
    marks = {rank: index for rank, index in found.values()}
    raise ScheduleError(order, f"the unit of {forward} needs F and BW, or F, B and W; found {kinds}", marks)


def _check_sequence(order: Order, found: dict[str, Place]) -> None:
    """Check that F, B, W of a unit are in this order."""
    kinds = sorted(found, key=["F", "B", "BW", "W"].index)
    for first, second in pairwise(kinds):
        if found[first] > found[second]:
            rank, index = found[second]
            raise ScheduleError(order, f"{order.ranks[rank][index]} comes before its {first}", {rank: index})


def channels(order: Order) -> dict[tuple[int, int], tuple[list[Place], list[Place]]]:
    """(sending rank, receiving rank) -> places of the sends, and of the receives, in order."""
    out: dict[tuple[int, int], tuple[list[Place], list[Place]]] = {}
    for rank, actions in enumerate(order.ranks):
        for index, action in enumerate(actions):
            if action.kind in TRANSFERS:
                peer, send = order.rank_of[action.peer], action.kind[0] == "S"
                channel = (rank, peer) if send else (peer, rank)
                out.setdefault(channel, ([], []))[0 if send else 1].append((rank, index))
    return out


def check_channels(order: Order) -> None:
    """On every channel the receives come in the order of the sends: NCCL matches by order. Raises ScheduleError."""
    for (source, target), (sends, receives) in channels(order).items():
        if source == target:
            rank, index = (sends or receives)[0]
            raise ScheduleError(order, f"{order.ranks[rank][index]} stays on rank {rank}: no transfer", {rank: index})
        for (_, i), (_, j) in zip(sends, receives):
            send, receive = order.ranks[source][i], order.ranks[target][j]
            if receive != counterpart(send):
                message = f"from rank {source} to rank {target}, {send} meets {receive}"
                raise ScheduleError(order, message, {source: i, target: j})
        if len(sends) != len(receives):
            rank, index = sends[len(receives)] if len(sends) > len(receives) else receives[len(sends)]
            raise ScheduleError(order, f"{order.ranks[rank][index]} has no other end", {rank: index})


def counterpart(transfer: Action) -> Action:
    """The receive of a send, the send of a receive."""
    way = "R" if transfer.kind[0] == "S" else "S"
    return Action(transfer.peer, way + transfer.kind[1], transfer.microbatch, transfer.slice, transfer.stage)


def acknowledged(order: Order, rank: int) -> dict[Action, list[Action]]:
    """Receive of a rank -> its sends that are known to have arrived by then.

    A message of a peer shows that the peer has run the actions before it, and so has received what these read. The
    common case is a gradient that comes back.
    """
    found: dict[Action, list[Action]] = {}
    for peer in {order.rank_of[a.peer] for a in order.ranks[rank] if a.kind in TRANSFERS}:
        waiting: dict[tuple[str, int, int, int], list[Action]] = {}
        taken: list[Action] = []
        for action in order.ranks[peer]:
            unit = (action.kind[-1 if action.kind in TRANSFERS else 0], action.stage, action.microbatch, action.slice)
            if action.kind not in TRANSFERS:
                taken += waiting.pop(unit, [])
            elif order.rank_of[action.peer] == rank:
                if action.kind[0] == "R":
                    waiting.setdefault(unit, []).append(counterpart(action))
                else:
                    found[counterpart(action)] = taken
                    taken = []
    return found


# --- streams -------------------------------------------------------------------------------------------

COMPUTATION = "computation"  # the stream without transfers
Link = tuple[int, int]  # sending rank, receiving rank
Groups = Callable[[Link], Hashable]  # the process group that a link's transfers go through


def links(order: Order) -> list[Link]:
    """The links of a lowered order, sorted."""
    return sorted(channels(order))


def check_streams(order: Order, group: Groups = lambda link: link) -> None:
    """Check that a lowered order ends if a transfer blocks its stream until the other end arrives. Raises ScheduleError
    with every rank's place. ``group``: by default one of two ranks for every link, as the runtime makes them.

    On NCCL the host does not wait: every action of a rank is enqueued on a stream, and runs after all actions before it
    on that stream.

        compute     F, B, W, G, R of a rank run one after the other; those that read a received value wait for it
        transfers   wait for the computation that was started before them, for the transfers before them on their
                    stream, and for the other end: a send and its receive run as one

    A process group whose communicators are created at first use (lazily) has one stream per pair of its ranks; one that
    is created with ``device_id=`` has a single stream, on which unbatched transfers run in the order in which they were
    started. In a group of two ranks for one direction both are the same.
    """
    pairs: dict[Hashable, set[frozenset[int]]] = {}
    for link in links(order):
        pairs.setdefault(group(link), set()).add(frozenset(link))
    for eager in (False, True) if any(len(found) > 1 for found in pairs.values()) else (True,):
        cycle, stuck = _stuck(order, group, eager)
        if stuck:
            how = "one communicator per process group" if eager else "one communicator per pair of ranks"
            raise ScheduleError(order, f"with {how}, transfers wait for each other: {' waits for '.join(cycle)}", stuck)


def _stuck(order: Order, group: Groups, eager: bool) -> tuple[list[str], dict[int, int]]:
    """(actions that wait for each other, from one back to it; rank -> index of its first action that never ends). Both
    ends of a transfer are one node."""
    import networkx as nx  # not for commands that check no streams

    waits, rows = nx.DiGraph(), list[list[Hashable]]()
    for rank, actions in enumerate(order.ranks):
        last: dict[Hashable, Hashable] = {}  # stream -> what was started on it last
        arriving: dict[Hashable, list[Hashable]] = {}  # what computes a unit takes these receives
        rows.append([])
        for index, action in enumerate(actions):
            kind, unit, node = action.kind, (action.stage, action.microbatch, action.slice), (rank, index)
            streams: list[Hashable] = [COMPUTATION]
            if kind in TRANSFERS:
                peer, sends = order.rank_of[action.peer], kind[0] == "S"
                ends = (action.stage, action.peer) if sends else (action.peer, action.stage)
                node = (kind[1], *ends, action.microbatch, action.slice)  # type: ignore[assignment]
                used = group((rank, peer) if sends else (peer, rank))
                streams.append(used if eager else (used, peer))
                if not sends:
                    arriving.setdefault((kind[1], *unit), []).append(node)
            ahead = [last[stream] for stream in streams if stream in last]
            if kind not in TRANSFERS:
                ahead += arriving.get(("B" if kind in BACKWARD else kind, *unit), ())
            waits.add_node(node, action=action)
            waits.add_edges_from((before, node) for before in ahead)
            last[streams[-1]] = node
            rows[-1].append(node)
    ended: set[Hashable] = set()
    with suppress(nx.NetworkXUnfeasible):  # a cycle, once all that does not wait for it is found
        for ready in nx.topological_generations(waits):
            ended.update(ready)
    if len(ended) == len(waits):
        return [], {}
    stuck = {rank: next((i for i, node in enumerate(row) if node not in ended), -1) for rank, row in enumerate(rows)}
    cycle = nx.find_cycle(waits.reverse(copy=False))
    names = [str(waits.nodes[node]["action"]) for node, _ in (*cycle, cycle[0])]
    return names, {rank: index for rank, index in stuck.items() if index >= 0}
