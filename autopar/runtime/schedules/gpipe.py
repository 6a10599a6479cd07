"""GPipe: all forwards, then all backwards (Huang et al. 2019).

    p = 2, m = 4:
    rank 0  0F0  0F1  0F2  0F3  --   --   0BW0 0BW1 0BW2 0BW3
    rank 1  --   1F0  1F1  1F2  1F3  1BW0 1BW1 1BW2 1BW3 --

Every rank holds the activations of all m microbatches.
"""

from __future__ import annotations

from autopar.runtime.schedules.common import check, one_chain
from autopar.schedule.order import Action, Order
from autopar.schedule.request import SCHEDULES, Request, Schedule


def gpipe(request: Request) -> Order:
    """Any number of ranks and microbatches."""
    check(request, "gpipe")
    microbatches = range(request.microbatches)
    rows = (
        [Action(rank, "F", k) for k in microbatches] + [Action(rank, "BW", k) for k in microbatches]
        for rank in range(request.ranks)
    )
    return one_chain("gpipe", request, rows)


SCHEDULES.add(
    "gpipe", Schedule("gpipe", gpipe, "all forwards, then all backwards", bubble="(p - 1)*(F + B + W)", memory="m")
)
