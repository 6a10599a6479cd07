"""ZB-H2: no bubble at all for F = B = W, with twice 1F1B's activations (Zero Bubble, Qi et al. 2024, section 3.2).

    p = 3, m = 4:
    rank 0  0F0 0F1 0F2 0F3 --  0B0 0W0 0B1 0W1 0B2 0W2 0B3 0W3 --
    rank 1  --  1F0 1F1 1F2 1B0 1F3 1B1 --  1B2 1W0 1B3 1W1 1W2 1W3
    rank 2  --  --  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2W0 2W1 2W2 2W3

Enough forwards fill the time until the first backward comes; rank i keeps 2i of W waiting for the time when no more
comes, so ranks end as late as they started late: every rank may start its next step when it is done. Rank i holds
(2p-2i-1) M_B + 2i M_W.
"""

from __future__ import annotations

from autopar.runtime.schedules.common import check, one_chain
from autopar.schedule.order import Action, Order
from autopar.schedule.request import SCHEDULES, Request, Schedule


def zb_h2(request: Request) -> Order:
    """Any number of ranks and microbatches."""
    check(request, "zb_h2")
    return one_chain("zb_h2", request, (_row(request, rank) for rank in range(request.ranks)))


def _row(request: Request, rank: int) -> list[Action]:
    m = request.microbatches
    warm_up = min(m, 2 * (request.ranks - rank) - 1)
    row = [Action(rank, "F", k) for k in range(warm_up)]
    for k in range(m):
        row.append(Action(rank, "B", k))
        if k >= 2 * rank:
            row.append(Action(rank, "W", k - 2 * rank))
        if warm_up + k < m:
            row.append(Action(rank, "F", warm_up + k))
    return row + [Action(rank, "W", k) for k in range(max(0, m - 2 * rank), m)]


SCHEDULES.add(
    "zb_h2",
    Schedule(
        "zb_h2",
        zb_h2,
        "W apart and more warm-up forwards: almost no bubble",
        bubble="Max(0, (p - 1)*(F + B - 2*W))",
        memory="2*p - 1",
    ),
)
