"""ZB-H1: 1F1B whose backward to weights waits until it fills a bubble (Zero Bubble, Qi et al. 2024, section 3.1).

    p = 3, m = 4:
    rank 0  0F0 0F1 0F2 --  --  0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
    rank 1  --  1F0 1F1 --  1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3
    rank 2  --  --  2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3

F and B come as in 1F1B; rank i keeps i of W waiting. A third of 1F1B's bubble for F = B = W; rank i holds
(p-i) M_B + i M_W, no more than 1F1B's p M_B.
"""

from __future__ import annotations

from autopar.runtime.schedules.common import check, one_chain
from autopar.schedule.order import Action, Order
from autopar.schedule.request import SCHEDULES, Request, Schedule


def zb_h1(request: Request) -> Order:
    """Any number of ranks and microbatches."""
    check(request, "zb_h1")
    return one_chain("zb_h1", request, (_row(request, rank) for rank in range(request.ranks)))


def _row(request: Request, rank: int) -> list[Action]:
    m = request.microbatches
    warm_up = min(m, request.ranks - 1 - rank)
    row = [Action(rank, "F", k) for k in range(warm_up)]
    for k in range(m):
        if warm_up + k < m:
            row.append(Action(rank, "F", warm_up + k))
        row.append(Action(rank, "B", k))
        if k >= rank:
            row.append(Action(rank, "W", k - rank))
    return row + [Action(rank, "W", k) for k in range(max(0, m - rank), m)]


SCHEDULES.add(
    "zb_h1",
    Schedule(
        "zb_h1",
        zb_h1,
        "1F1B with W apart: a third of its bubble, its memory",
        candidate=True,
        bubble="(p - 1)*(F + B - W)",
        memory="p",
    ),
)
