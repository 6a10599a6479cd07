"""ZB-V: two parts per rank along a V, no bubble for F = B = W, with 1F1B's memory (Zero Bubble, Qi et al. 2024,
section 6).

    p = 2, m = 4:
    rank 0  0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0F3 0B0 0W0 3F2 3B2 3W2 0B1 0W1 3F3 3B3 3W3 0B2 0W2 0B3 0W3 --
    rank 1  --  1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1F3 1B1 1W1 2F3 2B2 2W2 1B2 2B3 1B3 1W2 2W3 1W3

Rank i has stages i and 2p-1-i, so that the first microbatch comes back soon and all ranks hold p microbatches.
"""

from __future__ import annotations

from autopar.runtime.schedules.common import check, one_chain, vee
from autopar.schedule.order import Action, Order
from autopar.schedule.request import SCHEDULES, Request, Schedule


def zb_v(request: Request) -> Order:
    """Any number of ranks and microbatches, two parts per rank.

    The paper's order needs 2p-1 microbatches. With fewer it is the same order without the missing ones, which cannot
    deadlock either, because microbatches do not wait for each other.
    """
    check(request, "zb_v", virtual_stages=2)
    rows = (_row(request, rank) for rank in range(request.ranks))
    return one_chain("zb_v", request, rows, vee(request.ranks))


def _row(request: Request, rank: int) -> list[Action]:
    p, m = request.ranks, max(2 * request.ranks - 1, request.microbatches)
    down, up = rank, 2 * p - 1 - rank
    row: list[Action] = []
    made: dict[tuple[int, str], int] = {}

    def add(stage: int, *kinds: str) -> None:
        for kind in kinds:
            k = made.get((stage, kind), 0)
            made[stage, kind] = k + 1
            row.append(Action(stage, kind, k))

    for _ in range(2 * (p - rank) - 1):
        add(down, "F")
    for _ in range(rank):
        add(up, "F")
        add(down, "F")
    for _ in range(p - rank):
        add(up, "F", "B", "W")
    while made[up, "F"] < m:
        if made[down, "F"] < m:
            add(down, "F")
        add(down, "B", "W")
        add(up, "F", "B", "W")
    for _ in range(rank):  # W waits here, while B is what other ranks wait for
        add(down, "B")
        add(up, "B")
    for _ in range(p - rank):
        add(down, "B", "W")
    for stage in (up, down):
        while made.get((stage, "W"), 0) < m:
            add(stage, "W")
    return [action for action in row if action.microbatch < request.microbatches]


SCHEDULES.add(
    "zb_v",
    Schedule(
        "zb_v",
        zb_v,
        "two parts per rank along a V: almost no bubble",
        virtual_stages=2,
        candidate=True,
        bubble="Max((p - 1)*Max(B - W, F - W, Abs(F - B)/2), (p - 2)*Max(W - F, W - B)/2)",
        memory="p",
    ),
)
