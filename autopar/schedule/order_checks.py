"""Whether an order does every action once, in its place, and moves everything that it says it moves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

from autopar.schedule.order import BACKWARD, COMPUTE, TRANSFERS, Action, Order, ScheduleError

Unit = tuple[int, int, int]  # stage, micro-batch, slice
Place = tuple[int, int]  # rank, index


def validate(order: Order) -> None:
    """Check an order, lowered or not: every unit (stage of its micro-batch's chain, micro-batch, slice) has one F and
    one BW, or one F, one B and one W, in this order and on the rank of its stage; or F alone, when there is no backward
    at all. Raises ScheduleError."""
    _check_chains(order)
    units: dict[Unit, dict[str, Place]] = {}
    for rank, actions in enumerate(order.ranks):
        for index, action in enumerate(actions):
            _check_action(order, rank, index)
            if action.kind in COMPUTE:
                unit = units.setdefault((action.stage, action.micro_batch, action.slice), {})
                kind = "BW" if action.kind == "BWR" else action.kind
                if kind in unit:
                    raise ScheduleError(order, f"{action} is there twice", {rank: index})
                unit[kind] = (rank, index)
    complete = [["BW", "F"], ["B", "F", "W"]] if any(unit.keys() != {"F"} for unit in units.values()) else [["F"]]
    for micro_batch, chain in enumerate(order.chain_of):
        for stage in order.chains[chain]:
            for piece in range(order.slices):
                unit = units.get((stage, micro_batch, piece), {})
                if sorted(unit) not in complete:
                    _raise_incomplete(order, Action(stage, "F", micro_batch, piece), unit)
                _check_sequence(order, unit)
    if order.lowered:
        check_channels(order)


def _check_chains(order: Order) -> None:
    """Every stage is in one chain, and all chains have the same parts."""
    if not order.chains or not order.chain_of:
        raise ScheduleError(order, "needs at least one chain of stages and one micro-batch")
    stages = sorted(stage for chain in order.chains for stage in chain)
    if stages != list(range(len(order.rank_of))):
        raise ScheduleError(order, f"every stage 0..{len(order.rank_of) - 1} must be in one chain, found {stages}")
    if len({len(chain) for chain in order.chains}) != 1:
        raise ScheduleError(order, f"chains must have equally many parts, found {order.chains}")
    if not all(0 <= chain < len(order.chains) for chain in order.chain_of):
        raise ScheduleError(order, f"micro-batches take chains 0..{len(order.chains) - 1}, found {order.chain_of}")
    if not all(0 <= rank < len(order.ranks) for rank in order.rank_of):
        raise ScheduleError(order, f"stages run on ranks 0..{len(order.ranks) - 1}, found {order.rank_of}")


def _check_action(order: Order, rank: int, index: int) -> None:
    """It names what exists, on the right rank; a cell has a second half."""
    action, here = order.ranks[rank][index], {rank: index}
    for stage in (action.stage, action.peer) if action.kind in TRANSFERS else (action.stage,):
        if not 0 <= stage < len(order.rank_of):
            raise ScheduleError(order, f"{action} names stage {stage}; there are {len(order.rank_of)}", here)
    if order.rank_of[action.stage] != rank:
        raise ScheduleError(order, f"{action} is on rank {rank}; its rank is {order.rank_of[action.stage]}", here)
    if not 0 <= action.micro_batch < order.micro_batches or not 0 <= action.slice < order.slices:
        most = f"{order.micro_batches} micro-batches of {order.slices} token slices"
        raise ScheduleError(order, f"{action} is beyond the {most}", here)
    if action.kind in COMPUTE and action.stage not in order.chains[order.chain_of[action.micro_batch]]:
        raise ScheduleError(order, f"{action}: micro-batch {action.micro_batch} takes another chain", here)
    if action.paired:
        behind = next((a for a in order.ranks[rank][index + 1 :] if a.kind not in TRANSFERS), None)
        if action.kind not in COMPUTE or behind is None or behind.kind not in COMPUTE or behind.paired:
            raise ScheduleError(order, f"{action} needs a compute action behind it to run as one cell with", here)


def _raise_incomplete(order: Order, forward: Action, found: dict[str, Place]) -> None:
    kinds = ", ".join(found) or "nothing"
    marks = {rank: index for rank, index in found.values()}
    raise ScheduleError(order, f"the unit of {forward} needs F and BW, or F, B and W; found {kinds}", marks)


def _check_sequence(order: Order, found: dict[str, Place]) -> None:
    """F, B, W of a unit are in this order."""
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
    return Action(transfer.peer, way + transfer.kind[1], transfer.micro_batch, transfer.slice, transfer.stage)


def acknowledged(order: Order, rank: int) -> dict[Action, list[Action]]:
    """Receive of a rank -> sends of it that have arrived by then.

    A message of a peer tells that the peer has run what is ahead of it in its list, and so has received what that took.
    A gradient that comes back is the common case.
    """
    found: dict[Action, list[Action]] = {}
    for peer in {order.rank_of[a.peer] for a in order.ranks[rank] if a.kind in TRANSFERS}:
        waiting: dict[tuple[str, int, int, int], list[Action]] = {}
        taken: list[Action] = []
        for action in order.ranks[peer]:
            unit = (action.kind[-1 if action.kind in TRANSFERS else 0], action.stage, action.micro_batch, action.slice)
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

COMPUTATION = "computation"  # the stream that is no transfer's
StreamUnit = tuple[str, int, int, int] | tuple[str, int, int, int, int]
Link = tuple[int, int]  # sending rank, receiving rank
Groups = Callable[[Link], Hashable]  # the process group that a link's transfers go through


def links(order: Order) -> list[Link]:
    """The links of a lowered order, sorted."""
    return sorted(channels(order))


def own_group(link: Link) -> Hashable:
    """A process group of two ranks for every link: how the runtime makes them."""
    return link


def check_streams(order: Order, group: Groups = own_group) -> None:
    """That a lowered order ends, whether communicators are made lazily or not. Raises ScheduleError with every rank's
    place."""
    pairs: dict[Hashable, set[frozenset[int]]] = {}
    for link in links(order):
        pairs.setdefault(group(link), set()).add(frozenset(link))
    for eager in (False, True) if any(len(found) > 1 for found in pairs.values()) else (True,):
        left = _Waits(order, group, eager).left()
        if left:
            stuck = ", ".join(str(order.ranks[rank][index]) for rank, index in left.items())
            how = "one communicator per process group" if eager else "one communicator per pair of ranks"
            raise ScheduleError(order, f"with {how}, transfers wait for each other: {stuck}", left)


class _Waits:
    """Who waits for whom. Every computation has a number, and so has every transfer: the same at both ends."""

    def __init__(self, order: Order, group: Groups, eager: bool) -> None:
        self._group, self._eager, self._rank_of = group, eager, order.rank_of
        self._numbers: list[list[int]] = []  # rank -> numbers of its actions
        self._transfers: dict[StreamUnit, int] = {}
        self._behind: list[list[int]] = []  # number -> what waits for it
        self._open: list[int] = []  # number -> how many it waits for
        for actions in order.ranks:
            self._numbers.append([self._number(action) for action in actions])
        for rank, actions in enumerate(order.ranks):
            self._add_rank(rank, actions, self._numbers[rank])

    def _number(self, action: Action) -> int:
        if action.kind in TRANSFERS:
            ends = (action.stage, action.peer) if action.kind[0] == "S" else (action.peer, action.stage)
            number = self._transfers.setdefault(
                (action.kind[1], *ends, action.micro_batch, action.slice), len(self._open)
            )
            if number < len(self._open):
                return number
        self._open.append(0)
        self._behind.append([])
        return len(self._open) - 1

    def _add_rank(self, rank: int, actions: Sequence[Action], numbers: Sequence[int]) -> None:
        last: dict[Hashable, int] = {}  # stream -> what was started on it last
        arriving: dict[StreamUnit, list[int]] = {}  # what computes a unit takes these receives
        for action, number in zip(actions, numbers):
            kind, unit = action.kind, (action.stage, action.micro_batch, action.slice)
            if kind in TRANSFERS:
                peer = self._rank_of[action.peer]
                group = self._group((rank, peer) if kind[0] == "S" else (peer, rank))
                stream: Hashable = group if self._eager else (group, peer)
                ahead = [last[s] for s in (COMPUTATION, stream) if s in last]
                last[stream] = number
                if kind[0] == "R":
                    arriving.setdefault((kind[1], *unit), []).append(number)
            else:
                ahead = [last[COMPUTATION]] if COMPUTATION in last else []
                ahead += arriving.get(("B" if kind in BACKWARD else kind, *unit), ())
                last[COMPUTATION] = number
            for other in ahead:
                self._behind[other].append(number)
            self._open[number] += len(ahead)

    def left(self) -> dict[int, int]:
        """Rank -> index of its first action that never ends."""
        waits_for = list(self._open)
        ready, ended = [n for n, count in enumerate(waits_for) if not count], [False] * len(waits_for)
        while ready:
            number = ready.pop()
            ended[number] = True
            for other in self._behind[number]:
                waits_for[other] -= 1
                if not waits_for[other]:
                    ready.append(other)
        rows = enumerate(self._numbers)
        stuck = {rank: next((i for i, number in enumerate(row) if not ended[number]), -1) for rank, row in rows}
        return {rank: index for rank, index in stuck.items() if index >= 0}
