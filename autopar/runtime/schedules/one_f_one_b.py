"""1F1B: the fewest warm-up forwards that keep the last rank busy (PipeDream-Flush, Narayanan et al. 2021).

    p = 2, m = 4:
    rank 0  0F0  0F1  --   0BW0 0F2  0BW1 0F3  0BW2 --   0BW3
    rank 1  --   1F0  1BW0 1F1  1BW1 1F2  1BW2 1F3  1BW3 --

The bubble of GPipe; rank i holds the activations of min(m, p-i) microbatches.
"""

from __future__ import annotations

from autopar.runtime.schedules.common import check, one_chain
from autopar.schedule.order import Action, Order
from autopar.schedule.request import SCHEDULES, Request, Schedule


def one_f_one_b(request: Request) -> Order:
    """Any number of ranks and microbatches."""
    check(request, "1f1b")
    return one_chain("1f1b", request, (_row(request, rank) for rank in range(request.ranks)))


def _row(request: Request, rank: int) -> list[Action]:
    m = request.microbatches
    warm_up = min(m, request.ranks - 1 - rank)
    row = [Action(rank, "F", k) for k in range(warm_up)]
    for k in range(m - warm_up):
        row += [Action(rank, "F", warm_up + k), Action(rank, "BW", k)]
    return row + [Action(rank, "BW", k) for k in range(m - warm_up, m)]


SCHEDULES.add(
    "1f1b",
    Schedule(
        "1f1b",
        one_f_one_b,
        "forward and backward in turn, few microbatches alive",
        candidate=True,
        bubble="(p - 1)*(F + B + W)",
        memory="Min(m, p)",
    ),
)
