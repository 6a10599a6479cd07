"""`autopar::watch`: a value as it is, with an eye on its range, or on how many of its entries are true.

    ids = watch(ids, 0, 49, None, "...")       an id out of range is noted, and told once the step has run
    mask = watch_count(mask, 8, "...")         another number of true entries than 8 is, too

A kernel cannot raise for a value that lies on an accelerator without waiting for it. So it notes the least and the
greatest value there, and `autopar.runtime.exec.value_checks` reads the notes when that costs nothing. On the CPU only
what is out of range is noted.
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
    """least and greatest [2] of values that should lie in low .. high. text: what that means, with {found} for the
    value that does not; fatal: whether it is an error, or only worth saying."""

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


_notes: deque[ValueNote] = deque(maxlen=4096)  # of what nobody reads, the newest are enough


def note(values: Tensor, low: float, high: float, text: str, fatal: bool = True) -> None:
    """Remember the range of some values; see `ValueNote`."""
    if not values.numel():
        return
    made = ValueNote(torch.stack(torch.aminmax(values)), low, high, text, fatal)
    if values.device.type != "cpu" or made.problem(made.extremes):
        _notes.append(made)


def put_notes(notes: Iterable[ValueNote]) -> None:
    """Notes whose ranges somebody has computed anew."""
    _notes.extend(notes)


def take_notes() -> list[ValueNote]:
    """All notes since the last call."""
    found = list(_notes)
    _notes.clear()
    return found


@operator("(Tensor x, float low, float high, int? ignored, str text, bool fatal) -> Tensor", alike)
def watch(x: Tensor, low: float, high: float, ignored: int | None, text: str, fatal: bool) -> Tensor:
    """x, unchanged. Entries that are neither ``ignored`` nor in low .. high are noted."""
    values = x.detach()
    if ignored is not None:
        values = values.masked_fill(values == ignored, int(low))
    note(values, low, high, text, fatal)
    return x.clone()


@operator("(Tensor mask, int count, str text) -> Tensor", alike)
def watch_count(mask: Tensor, count: int, text: str) -> Tensor:
    """mask (bool), unchanged. Another number of true entries is noted."""
    note(mask.sum(), count, count, text)
    return mask.clone()


@operator(fake=alike)
def checked(value: Tensor, info: Tensor, name: str, is_matrix: bool) -> Tensor:
    """The value of a factorisation, unchanged, once its report says that there is one: torch checks with an operator
    that has no result, which nobody takes once a graph is cut. info: per matrix 0, or what is wrong with it. name:
    of the function, for the error's words; is_matrix: whether it was given one matrix and not a batch of them."""
    check_factorisation(info, name, is_matrix=is_matrix)
    return value.clone()


CHECKED = torch.ops.autopar.checked.default
