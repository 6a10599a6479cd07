"""What a step has made, in order, as hashes: two runs of one step are equal bit by bit, or differ at a first note.

What ranks exchange is noted where it leaves a rank and where it arrives, so that a rank whose first difference has
arrived is not taken for the one that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Note:
    """``what`` in words was made in ``action``; whether it was ``received`` from other ranks; its hash, on the
    device."""

    what: str
    action: str
    received: bool
    hashed: Tensor

    def __str__(self) -> str:
        return f"{self.what}, action {self.action}" if self.action else self.what


class StepNotes:
    """The notes of one run. ``hash_of``: of a tensor. ``action``: that runs now."""

    def __init__(self, hash_of: Callable[[Tensor], Tensor]) -> None:
        self.notes: list[Note] = []
        self.action = ""
        self._hash_of = hash_of

    def note(self, what: Any, values: Iterable[Any], received: bool = False) -> None:
        """Note the tensors among the values; ``what`` is made a text."""
        for i, x in enumerate(values):
            if isinstance(x, Tensor):
                self.notes.append(
                    Note(f"{what}, tensor {i}" if i else str(what), self.action, received, self._hash_of(x))
                )


_open: list[StepNotes] = []


@contextmanager
def noting(notes: StepNotes) -> Iterator[None]:
    """Context manager: what is made goes into ``notes``."""
    _open.append(notes)
    try:
        yield
    finally:
        _open.remove(notes)


def open_notes() -> StepNotes | None:
    """The notes of the step that runs, if some are taken."""
    return _open[-1] if _open else None
