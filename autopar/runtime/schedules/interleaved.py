"""Interleaved 1F1B: v parts per rank, so that the pipeline fills v times as fast (Megatron-LM, Narayanan et al. 2021).

    p = 2, m = 2, v = 2:
    rank 0  0F0  0F1  2F0  2F1  --   2BW0 --   2BW1 0BW0 0BW1
    rank 1  --   1F0  1F1  3F0  3BW0 3F1  3BW1 1BW0 1BW1 --

Microbatches go in groups of p: a rank runs a group through one of its parts, then through the next part; backward the
parts come in reverse. When p does not divide m, some groups are larger than p; the bubble stays the same.
Rank 0 holds the most; a group of g > p adds (g-p)(v-1)/v microbatches. v times as many transfers.
"""

from __future__ import annotations

from itertools import pairwise

from autopar.runtime.schedules.common import check, loop, one_chain
from autopar.schedule.order import Action, Order
from autopar.schedule.request import SCHEDULES, Request, Schedule


def interleaved(request: Request) -> Order:
    """Any number of ranks and microbatches, two parts per rank or more."""
    check(request, "interleaved", virtual_stages=None)
    if request.virtual_stages < 2:
        raise ValueError(
            f"schedule: interleaved needs 2 parts per rank or more, found {request.virtual_stages}; use 1f1b"
        )
    rows = (_row(request, rank) for rank in range(request.ranks))
    return one_chain("interleaved", request, rows, loop(request.ranks, request.virtual_stages))


def _row(request: Request, rank: int) -> list[Action]:
    p, v = request.ranks, request.virtual_stages
    groups = groups_of(request.microbatches, p)
    forward = [(chunk, k) for group in groups for chunk in range(v) for k in group]
    backward = [(chunk, k) for group in groups for chunk in reversed(range(v)) for k in group]
    forwards = [Action(chunk * p + rank, "F", k) for chunk, k in forward]
    backwards = [Action(chunk * p + rank, "BW", k) for chunk, k in backward]
    warm_up = min(len(forwards), 2 * (p - 1 - rank) + (v - 1) * len(groups[0]))
    row = forwards[:warm_up]
    for first, second in zip(forwards[warm_up:], backwards):
        row += [first, second]
    return row + backwards[len(forwards) - warm_up :]


def groups_of(microbatches: int, least: int) -> list[range]:
    """Consecutive groups of ``least`` or more, as many and as equal as can be, larger ones first: 7 in threes is 4 + 3.
    Smaller groups would let a group come back to rank 0 before its first microbatch has gone round: a deadlock."""
    count = max(1, microbatches // least)
    small, larger = divmod(microbatches, count)
    starts = [small * i + min(i, larger) for i in range(count + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


SCHEDULES.add(
    "interleaved",
    Schedule(
        "interleaved",
        interleaved,
        "1F1B with several parts per rank: a smaller bubble",
        virtual_stages=2,
        candidate=True,
        bubble="(p - 1)*(F + B + W)/v",
        memory="p*(1 + (p - 1)/(p*v))",
    ),
)
