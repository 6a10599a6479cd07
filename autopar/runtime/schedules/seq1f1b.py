"""Seq1F1B: 1F1B over slices of tokens (Sun et al. 2024).

    p = 2, m = 2, 2 slices:
    rank 0  0F0    0F0.1  0F1    --     0BW0.1 0F1.1  0BW0   --     0BW1.1 0BW1
    rank 1  --     1F0    1F0.1  1BW0.1 1F1    1BW0   1F1.1  1BW1.1 1BW1   --

Slices of a microbatch run backward from the last to the first. Rank i holds p-i-1+n slices where 1F1B holds p-i whole
microbatches, and the bubble shrinks with the size of a slice.
"""

from __future__ import annotations

from autopar.runtime.schedules.common import check, one_chain
from autopar.schedule.order import Action, Order
from autopar.schedule.request import SCHEDULES, Request, Schedule


def seq1f1b(request: Request) -> Order:
    """Any number of ranks, microbatches and slices."""
    check(request, "seq1f1b", sliced=True)
    return one_chain("seq1f1b", request, (_row(request, rank) for rank in range(request.ranks)))


def _row(request: Request, rank: int) -> list[Action]:
    slices = range(request.token_slices)
    forward = [Action(rank, "F", k, s) for k in range(request.microbatches) for s in slices]
    backward = [Action(rank, "BW", k, s) for k in range(request.microbatches) for s in reversed(slices)]
    warm_up = min(len(forward), request.ranks - 2 - rank + request.token_slices)
    row = forward[:warm_up]
    for first, second in zip(forward[warm_up:], backward):
        row += [first, second]
    return row + backward[len(forward) - warm_up :]


SCHEDULES.add(
    "seq1f1b",
    Schedule(
        "seq1f1b",
        seq1f1b,
        "1F1B over slices of tokens: a smaller bubble",
        sliced=True,
        bubble="(p - 1)*(F + B + W)/n",
        memory="(p - 1 + n)/n",
    ),
)
