"""DualPipeV: DualPipe folded to a V, which needs no second copy of the parameters ("cut in half";
deepseek-ai/DualPipe).

    p = 2, m = 4:
    rank 0  0F0      0F1      0F2      3F0      3B0      3W0      3F1      0F3&3BW1 ..       ..       -- ...
    rank 1  --       1F0      2F0      1F1      2F1      1F2      2BW0     ..       2F2&1BW0 ..       .. ...

Rank i has stages i and 2p-1-i. A forward on the way down runs in one cell with a backward of the way up, and the other
way round. Every rank holds as much as DualPipe on 2p ranks.
"""

from __future__ import annotations

from autopar.runtime.schedules.bidirectional import Direction, bidirectional_row
from autopar.runtime.schedules.common import check, one_chain, vee
from autopar.schedule.order import Order
from autopar.schedule.request import SCHEDULES, Request, Schedule


def dual_pipe_v(request: Request) -> Order:
    """Any number of ranks p, two parts per rank, microbatches m >= 2p."""
    check(request, "dual_pipe_v", virtual_stages=2)
    p, m = request.ranks, request.microbatches
    if m < 2 * p:
        raise ValueError(
            f"schedule: dual_pipe_v needs at least {2 * p} microbatches (twice the ranks), found {m}; "
            "use more, or zb_v, which runs any number"
        )
    rows = (
        bidirectional_row(Direction(rank, range(m)), Direction(2 * p - 1 - rank, range(m)), depth=p, place=rank)
        for rank in range(p)
    )
    return one_chain("dual_pipe_v", request, rows, vee(p))


SCHEDULES.add(
    "dual_pipe_v",
    Schedule(
        "dual_pipe_v",
        dual_pipe_v,
        "cells of a forward and a backward along a V",
        virtual_stages=2,
        bubble="(p - 1)*(FB + B - 2*W)/v",
        memory="p + 1/v",
    ),
)
