"""Whether an order ends on GPUs, where a transfer keeps its stream until the other end has come: `check_streams`.

On NCCL the host waits for nothing: every action of a rank goes to a stream, and runs once all that is ahead of it in
the stream has ended.

    compute     F, B, W, G, R of a rank run one after the other; those that take a received value wait for it
    transfers   wait for the computation that was started ahead of them, for what is ahead of them in their stream,
                and for the other end: a send and its receive run as one

Which transfers of a rank share a stream is a matter of how communicators are made. A process group whose communicators
are made at first use (lazily) has one per pair of its ranks. One that is made with ``device_id=`` has a single one:
unbatched sends and receives with all ranks of the group stand in one queue, in the order in which they were started.

In a group of two ranks for one direction both are the same, and hold transfers that both ends list in the same order:
then an order that `autopar.schedule.simulate` ends has no circle of waits here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from autopar.schedule.order import BACKWARD, TRANSFERS, Action, Order, ScheduleError
from autopar.schedule.order_checks import channels

COMPUTATION = "computation"  # the stream that is no transfer's
Unit = tuple[str, int, int, int] | tuple[str, int, int, int, int]
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
        self._transfers: dict[Unit, int] = {}
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
                (action.kind[1], *ends, action.microbatch, action.slice), len(self._open)
            )
            if number < len(self._open):
                return number
        self._open.append(0)
        self._behind.append([])
        return len(self._open) - 1

    def _add_rank(self, rank: int, actions: Sequence[Action], numbers: Sequence[int]) -> None:
        last: dict[Hashable, int] = {}  # stream -> what was started on it last
        arriving: dict[Unit, list[int]] = {}  # what computes a unit takes these receives
        for action, number in zip(actions, numbers):
            kind, unit = action.kind, (action.stage, action.microbatch, action.slice)
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
