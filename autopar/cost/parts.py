"""Which layers the stages of a pipeline have, and which ranks run them. Loads no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopar.cost.layout import Layout
from autopar.schedule.request import SCHEDULES

WAVES = ("zb_v", "dual_pipe_v")  # schedules whose parts go back and forth over the ranks


def way_of_parts(layout: Layout) -> tuple[int, bool, int]:
    """How parts are spread over the ranks of pp: equal for layouts with equal results of `ranks_of_part`."""
    copies = SCHEDULES[layout.schedule].copies if layout.schedule else 1
    return layout.virtual_stages, layout.schedule in WAVES, copies


def ranks_of_part(part: int, layout: Layout) -> list[int]:
    """The coordinates on pp of the ranks that run a part: in turns, back and forth in a V, or from both ends."""
    turn, place = divmod(part, layout.pp)
    last = layout.pp - 1 - place
    if layout.pp > 1 and layout.schedule and SCHEDULES[layout.schedule].copies > 1:
        return [place, last]
    return [last if layout.schedule in WAVES and turn % 2 else place]


def layers_of_parts(layout: Layout, kinds: Sequence[int]) -> list[Sequence[int]]:
    """The kinds of the layers of each part. Equal numbers; the first and the last parts have those that are missing."""
    n, layers = layout.parts, len(kinds)
    counts = list(layout.layers)
    if not counts:
        full = -(-layers // n)
        counts = [full] * n
        order = [k for pair in zip(range(n - 1, -1, -1), range(n), strict=True) for k in pair]
        for k in [*dict.fromkeys(order)][: full * n - layers]:
            counts[k] -= 1
    ends = itertools.accumulate(counts, initial=0)
    return [kinds[a:b] for a, b in itertools.pairwise(ends)]
