"""Says what kernels noted about values (`autopar.ops.value_checks`), without waiting for an accelerator.

watch = Watch(groups)
... a step ...
watch.settle(7)      on the CPU: at once.     Else: the ranges start for the host, and the first call that finds them
                     there says it, with step 7: the next step's, as a rule
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.errors import refusal_like
from autopar.ops.value_checks import ValueNote, take_notes
from autopar.runtime.exec.op_errors import OpError
from autopar.runtime.mesh.async_copies import to_host
from autopar.runtime.mesh.process_groups import Groups


@dataclass
class Arriving:
    """Ranges on their way to the host."""

    notes: list[ValueNote]
    extremes: Tensor  # [notes, 2] on the host
    there: torch.Event | None  # None: they are there
    step: int


@dataclass
class ValueChecks:
    """What one model's steps noted. What is no error is said once, by one rank of those that compute the same."""

    groups: Groups
    _arriving: list[Arriving] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the run of a step: an operator's error gets its number, and what kernels noted is taken."""
        try:
            yield
        except OpError as error:
            raise refusal_like(error.__cause__ or error, f"step {number}: {error.said}") from error.__cause__
        self.settle(number)

    def settle(self, step: int) -> None:
        """Take the notes of a step that has run. Raises ValueError for the first error among those that are here, with
        the step that they are of."""
        notes = take_notes()
        if notes:
            self._arriving.append(self._send(notes, step))
        self.look()

    def _send(self, notes: list[ValueNote], step: int) -> Arriving:
        """Start the ranges for the host."""
        extremes = torch.stack([note.extremes.to(torch.float64) for note in notes])
        return Arriving(notes, *to_host(extremes), step)

    def check_size(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Warn of a batch without examples, the first time."""
        empty = [f"{name} {list(x.shape)}" for name, x in tensors.items() if not x.numel()]
        if empty:
            self.said_once(f"the batch is empty ({', '.join(empty)}), so that a mean over it is 0/0 = nan", step)

    def look(self) -> None:
        """Say what has arrived from earlier steps."""
        while self._arriving and ((event := self._arriving[0].there) is None or event.query()):
            found = self._arriving.pop(0)
            for note, extremes in zip(found.notes, found.extremes, strict=True):
                self._say(note, extremes, found.step)

    def said_once(self, text: str, step: int) -> None:
        """Warn of a step, the first time only."""
        if text not in self._said and self._is_first():
            warnings.warn(f"step {step}: {text}", stacklevel=3)
        self._said.add(text)

    def _say(self, note: ValueNote, extremes: Tensor, step: int) -> None:
        problem = note.problem(extremes)
        if problem and note.fatal:
            raise ValueError(f"step {step}: {problem}; correct the batch")
        if problem:
            self.said_once(problem, step)

    def _is_first(self) -> bool:
        return all(index == 0 for axis, index in self.groups.coordinate.items() if axis != "pp")
