"""`autopar::watch`: the identity on a value, with a check of its range, or of how many of its entries are true.

    ids = watch(ids, 0, 49, None, "...")       an id out of range is recorded, and reported after the step
    mask = watch_count(mask, 8, "...")         so is a number of true entries other than 8

A kernel cannot raise for a value on an accelerator without synchronizing. So it records the least and the greatest
value there, and `autopar.runtime.exec.value_checks` reads the records when that costs nothing. On the CPU only values
out of range are recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.adapters.operators import check_factorisation
from autopar.ops.declare import alike, operator


@dataclass(frozen=True)
class ValueNote:
    """least and greatest [2] of values that should be in low .. high. text: what that means, with {found} for a value
    that is not; fatal: whether it is an error, or a warning."""

    extremes: Tensor
    low: float
    high: float
    text: str
    fatal: bool

    def problem(self, extremes: Tensor) -> str | None:
        """The text, if the extremes (on the CPU) are out of range."""
        least, greatest = extremes.tolist()
        if self.low <= least and greatest <= self.high:
            return None
        found = least if least < self.low else greatest
        return self.text.format(found=int(found) if float(found).is_integer() else found)


_notes: deque[ValueNote] = deque(maxlen=4096)  # of unread notes, the newest are enough


def note(values: Tensor, low: float, high: float, text: str, fatal: bool = True) -> None:
    """Record the range of some values; see `ValueNote`."""
    if not values.numel():
        return
    made = ValueNote(torch.stack(torch.aminmax(values)), low, high, text, fatal)
    if values.device.type != "cpu" or made.problem(made.extremes):
        _notes.append(made)


def put_notes(notes: Iterable[ValueNote]) -> None:
    """Add notes with ranges computed elsewhere."""
    _notes.extend(notes)


def take_notes() -> list[ValueNote]:
    """All notes since the last call."""
    found = list(_notes)
    _notes.clear()
    return found


@operator("(Tensor x, float low, float high, int? ignored, str text, bool fatal) -> Tensor", alike)
def watch(x: Tensor, low: float, high: float, ignored: int | None, text: str, fatal: bool) -> Tensor:
    """x, unchanged. Entries that are neither ``ignored`` nor in low .. high are recorded."""
    values = x.detach()
    if ignored is not None:
        values = values.masked_fill(values == ignored, int(low))
    note(values, low, high, text, fatal)
    return x.clone()


@operator("(Tensor mask, int count, str text) -> Tensor", alike)
def watch_count(mask: Tensor, count: int, text: str) -> Tensor:
    """mask (bool), unchanged. A number of true entries other than ``count`` is recorded."""
    note(mask.sum(), count, count, text)
    return mask.clone()


@operator(fake=alike)
def checked(value: Tensor, info: Tensor, name: str, is_matrix: bool) -> Tensor:
    """The value of a factorization, unchanged, with a check of its info: torch checks with an operator without result,
    which a split graph would drop. info: per matrix 0, or the error code. name: of the function, for the message;
    is_matrix: whether its operand was one matrix and not a batch."""
    check_factorisation(info, name, is_matrix=is_matrix)
    return value.clone()


CHECKED = torch.ops.autopar.checked.default
