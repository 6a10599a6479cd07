"""The eight phases that DualPipe and DualPipeV share (DeepSeek-V3 report, 2024, figure 5; deepseek-ai/DualPipe).

A rank runs two stages. Microbatches reach its *near* stage first (in DualPipe those that enter at the nearer end, in
DualPipeV those on their way down) and its *far* stage later. F0 B0 W0 are of the near stage, F1 B1 W1 of the far one;
B is the full backward where W does not follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from autopar.schedule.order import Action


class Direction:
    """The microbatches of one stage of a rank, each kind of action in order."""

    def __init__(self, stage: int, microbatches: Sequence[int]) -> None:
        """``microbatches``: in the order in which they come."""
        self.stage = stage
        self.microbatches = microbatches
        self.forwards = self.backwards = 0

    def forward(self) -> Action:
        """F of the next microbatch."""
        self.forwards += 1
        return Action(self.stage, "F", self.microbatches[self.forwards - 1])

    def backward(self, kind: str = "BW") -> Action:
        """B or BW of the next microbatch."""
        self.backwards += 1
        return Action(self.stage, kind, self.microbatches[self.backwards - 1])


def bidirectional_row(near: Direction, far: Direction, depth: int, place: int) -> tuple[Action, ...]:
    """What one rank does. depth: ranks from where microbatches enter to the middle (or the turn of the V);
    place: this rank's distance from where they enter, 0 .. depth-1."""
    outside, inside = depth - 1 - place, place + 1
    row: list[Action] = []
    waiting: deque[Action] = deque()  # W of every B, first in first out

    def split(flow: Direction) -> None:
        row.append(flow.backward("B"))
        waiting.append(replace(row[-1], kind="W"))

    def cell(ahead: Direction, back: Direction) -> None:
        row.extend((replace(ahead.forward(), paired=True), back.backward()))

    # 1. F0 until microbatches come from the other side too
    row += [near.forward() for _ in range(2 * outside)]
    # 2. F0 F1
    for _ in range(inside):
        row += [near.forward(), far.forward()]
    # 3. B1 W1 F1: the first backwards, W apart so that the gradient leaves early
    for _ in range(outside):
        split(far)
        row += [waiting.popleft(), far.forward()]
    # 4. F0&B1 F1&B0: the main part. In the middle the first pair is no cell: its B1 needs nothing from other ranks
    for step in range(len(near.microbatches) - 2 * depth + inside):
        if step == 0 and outside == 0:
            row += [near.forward(), far.backward()]
        else:
            cell(near, far)
        cell(far, near)
    # 5. B1 F1&B0
    for _ in range(outside):
        row.append(far.backward())
        cell(far, near)
    # 6. B1 B0; the second half of them leaves W for the end
    for flow in ([far, near] * inside)[:inside]:
        row.append(flow.backward())
    for flow in ([far, near] * inside)[inside:]:
        split(flow)
    # 7. W B0
    for _ in range(outside):
        row.append(waiting.popleft())
        split(near)
    # 8. W
    return (*row, *waiting)
