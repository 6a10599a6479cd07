"""TeraPipe: microbatches are cut into slices of tokens, which follow each other down the stages (Li et al. 2021).

    p = 2, m = 2, 2 slices:
    rank 0  0F0    0F0.1  0F1    0F1.1  --     --     0BW0.1 0BW0   0BW1.1 0BW1
    rank 1  --     1F0    1F0.1  1F1    1F1.1  1BW0.1 1BW0   1BW1.1 1BW1   --

Causal attention lets slice s run when the slices before it have run on the same stage; backward goes from the last
slice to the first, because keys and values get gradients from all later tokens. All forwards come before all backwards.
Forwards take sum t + (p-1) max t over all slices (exact for equal stages); every rank holds all m microbatches.
"""

from __future__ import annotations

from autopar.runtime.schedules.common import check, one_chain
from autopar.schedule.order import Action, Order
from autopar.schedule.request import SCHEDULES, Request, Schedule


def tera_pipe(request: Request) -> Order:
    """Any number of ranks, microbatches and slices."""
    check(request, "tera_pipe", sliced=True)
    slices = range(request.token_slices)
    forward = [(k, s) for k in range(request.microbatches) for s in slices]
    backward = [(k, s) for k in range(request.microbatches) for s in reversed(slices)]
    rows = (
        [Action(rank, "F", k, s) for k, s in forward] + [Action(rank, "BW", k, s) for k, s in backward]
        for rank in range(request.ranks)
    )
    return one_chain("tera_pipe", request, rows)


SCHEDULES.add(
    "tera_pipe",
    Schedule(
        "tera_pipe", tera_pipe, "GPipe over slices of tokens", sliced=True, bubble="(p - 1)*(F + B + W)/n", memory="m"
    ),
)
