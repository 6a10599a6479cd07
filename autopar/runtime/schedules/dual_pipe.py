"""DualPipe: microbatches enter at both ends, and a forward of one direction runs in one cell with a backward of the
other (DeepSeek-V3 report, 2024, figure 5).

    p = 4, m = 8:
    rank 0  0F0      0F1      0F2      7F4      7B4      7W4      7F5      0F3&7BW5 ..       ..       -- ...
    rank 1  --       1F0      6F4      1F1      6F5      1F2      6BW4     ..       6F6&1BW0 ..       .. ...
    rank 2  --       5F4      2F0      5F5      2F1      5F6      2BW0     ..       2F2&5BW4 ..       .. ...
    rank 3  4F4      4F5      4F6      3F0      3B0      3W0      3F1      4F7&3BW1 ..       ..       -- ...

Every rank i holds two parts: part i for the microbatches that go down (stage i), and part p-1-i for those that go up
(stage 2p-1-i). So each part has two copies, whose gradients must be summed. The first half of the microbatches goes
down.
"""

from __future__ import annotations

from autopar.runtime.schedules.bidirectional import Direction, bidirectional_row
from autopar.runtime.schedules.common import check
from autopar.schedule.order import Action, Order
from autopar.schedule.request import SCHEDULES, Request, Schedule


def dual_pipe(request: Request) -> Order:
    """An even number of ranks p, an even number of microbatches m >= 2p."""
    check(request, "dual_pipe")
    p, m = request.ranks, request.microbatches
    if p % 2:
        raise ValueError(f"schedule: dual_pipe needs an even number of ranks, found {p}; use zb_v or dual_pipe_v")
    if m % 2 or m < 2 * p:
        raise ValueError(
            f"schedule: dual_pipe needs an even number of microbatches, at least {2 * p} (twice the ranks), "
            f"found {m}; use {max(2 * p, m + m % 2)}"
        )
    down, up = tuple(range(p)), tuple(range(p, 2 * p))
    rows = tuple(_row(p, m, rank) for rank in range(p))
    return Order("dual_pipe", rows, (down, up), down + down[::-1], (0,) * (m // 2) + (1,) * (m // 2))


def _row(p: int, m: int, rank: int) -> tuple[Action, ...]:
    down, up = Direction(rank, range(m // 2)), Direction(2 * p - 1 - rank, range(m // 2, m))
    near, far = (down, up) if rank < p // 2 else (up, down)
    return bidirectional_row(near, far, depth=p // 2, place=min(rank, p - 1 - rank))


SCHEDULES.add(
    "dual_pipe",
    Schedule(
        "dual_pipe",
        dual_pipe,
        "from both ends at once, two copies of every part",
        copies=2,
        bubble="(p/2 - 1)*(FB + B - 2*W)",
        memory="p + 1",
    ),
)
