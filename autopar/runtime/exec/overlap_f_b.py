"""A forward and a backward of two microbatches that run as one: while one waits for tokens, the other computes.

    0F3     x ........ start, pause             wait, products, start, pause                wait ...
    1BW2                         y ... start, pause                         wait, products ...

A cell of an order (`autopar.schedule.order.Action.paired`) whose graphs pause (`autopar.runtime.exec.lowering`)
runs both by turns, each up to its next pause. Turns follow from the graphs, so all ranks that exchange with each other
take the same; what each graph computes, and in which order gradients are added up, is as if they ran one after the
other.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field

from autopar.runtime.exec.instructions import BoundAction, Instruction, Slots, Within
from autopar.schedule.order import COMPUTE, Action


@dataclass
class OverlappedActions:
    """``ahead``: the first half, with its sends. ``back``: the second. dead: slots read by both, then by none."""

    ahead: list[BoundAction]
    back: BoundAction
    dead: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        halves = [one for entry in self.ahead for one in entry.instructions], self.back.instructions
        for mine, others in (halves, halves[::-1]):
            read = {i for one in others for i in one.reads}
            for one in mine:
                self.dead += [i for i in one.dead if i in read]
                one.dead = [i for i in one.dead if i not in read]

    def __str__(self) -> str:
        return f"{self.ahead[0]}&{self.back}"

    @property
    def actions(self) -> list[Action]:
        return [action for entry in (*self.ahead, self.back) for action in entry.actions]

    def run(self, slots: Slots, within: Within = nullcontext) -> float:
        """Returns when it no longer waited for other stages. ``within``: entered whenever the first half goes on."""
        for entry in (*self.ahead, self.back):
            for instruction in entry.waits:
                instruction.run(slots)
        start = time.perf_counter()
        first = _steps((one for entry in self.ahead for one in entry.instructions), slots)
        second, going = _steps(self.back.instructions, slots), [True, True]
        while any(going):
            with within():
                going[0] = going[0] and _goes_on(first)
            going[1] = going[1] and _goes_on(second)
        for i in self.dead:
            slots[i] = None
        return start


def _steps(instructions: Iterable[Instruction], slots: Slots) -> Generator[None, None, None]:
    for instruction in instructions:
        yield from instruction.steps(slots)


def _goes_on(steps: Generator[None, None, None]) -> bool:
    """Up to the next pause; False at the end."""
    return next(steps, False) is None


def with_overlaps(entries: list[BoundAction]) -> list[BoundAction | OverlappedActions]:
    """The entries of a rank, of which those of a cell that can run by turns are one."""
    out: list[BoundAction | OverlappedActions] = []
    left = list(reversed(entries))
    while left:
        entry = left.pop()
        if entry.action is None or not entry.action.paired:
            out.append(entry)
            continue
        ahead = [entry]
        while left[-1].action is None or left[-1].action.kind not in COMPUTE:
            ahead.append(left.pop())
        back = left.pop()
        out += [OverlappedActions(ahead, back)] if _can_take_turns(ahead, back) else [*ahead, back]
    return out


def _can_take_turns(ahead: list[BoundAction], back: BoundAction) -> bool:
    """One of them pauses, and neither takes what the other makes."""
    halves = [[one for entry in ahead for one in entry.instructions], back.instructions]
    if not any(entry.pauses for entry in (*ahead, back)) or any(one.others for half in halves for one in half):
        return False
    made = [{i for one in half for i in one.writes if i >= 0} for half in halves]
    takes = [*halves[0], *_waits(ahead)], [*halves[1], *back.waits]
    read = [{i for one in half for i in one.reads} for half in takes]
    return not (made[0] & (read[1] | made[1]) or made[1] & read[0])


def _waits(entries: list[BoundAction]) -> list[Instruction]:
    return [one for entry in entries for one in entry.waits]
