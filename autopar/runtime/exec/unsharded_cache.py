"""Gathered weights that are kept across steps while weights do not change: `ParallelModule.keep_unsharded`.

The first F of a step is an instruction with two forms: with and without the gathers. Not every change of a weight can
be detected: writes through ``.data``, and those of kernels outside torch, do not change a tensor's version. So a step
never skips gathers by itself; a change that is detected is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from autopar.adapters.autograd import version_of
from autopar.ir.traffic import Ledger, add_ledgers, ledger_between
from autopar.runtime.comm.context_parallel_comm import Comms
from autopar.runtime.exec.instructions import Instruction, Slots
from autopar.runtime.exec.lowering import Lowered


@dataclass(slots=True)
class Gathering(Instruction):
    """An F that gathers. ``others``: F alone, whose graph ``bind`` makes runnable. used: (index of the result, slot) of
    what is gathered. held: None where every step gathers; empty before the first one that keeps it; else by slot."""

    used: list[tuple[int, int]] = field(default_factory=list)
    bind: Callable[[], Lowered] | None = None
    held: dict[int, Any] | None = None
    skipped: bool = False

    def run(self, slots: Slots) -> Sequence[Any]:
        self.skipped = bool(self.held)
        if self.held:
            for i, x in self.held.items():
                slots[i] = x
            return self.plain.run(slots)
        found = Instruction.run(self, slots)
        if self.held is not None:
            self.held = {i: found[k] for k, i in self.used}
        return found

    @property
    def plain(self) -> Instruction:
        (plain,) = self.others
        if self.bind is not None:
            plain.apply, self.bind = self.bind(), None
        return plain

    def saved(self) -> Ledger:
        """What the last run did not send, as a ledger to add; empty if it gathered."""
        if not self.skipped:
            return {}
        with_gathers, alone = self.apply, self.plain.apply
        assert isinstance(with_gathers, Lowered) and isinstance(alone, Lowered)
        return ledger_between(with_gathers.traffic, alone.traffic)


Places = tuple[list[int], list[int]]  # reads and writes


def gathering(
    both: Lowered,
    places: Places,
    alone: Places,
    made: Sequence[str | None],
    gathered: Collection[str],
    bind: Callable[[], Lowered],
) -> Gathering:
    """``both``: F with gathers, which makes the values named in ``made``; F ``alone`` is bound when it is needed."""
    used = [(k, places[1][k]) for k, name in enumerate(made) if name in gathered]
    return Gathering(both, *places, others=[Instruction(_unbound, *alone)], used=used, bind=bind)


def _unbound(_: list[Any]) -> list[Any]:
    raise AssertionError("F alone is bound before it runs")


class UnshardedCache:
    """What the gathering instructions of a step keep."""

    def __init__(self, instructions: Iterable[Instruction]) -> None:
        self._gatherings = [one for one in instructions if isinstance(one, Gathering)]
        self._seen: dict[str, tuple[int, ...]] = {}
        self.on = False

    def keep(self, on: bool) -> None:
        """From now on steps keep what they gather, or let go of it."""
        if on != self.on:
            self.on, self._seen = on, {}
            for gathering in self._gatherings:
                gathering.held = {} if on else None

    def check(self, parameters: Mapping[str, Tensor], pieces: Mapping[str, Tensor]) -> None:
        """Raises RuntimeError for a weight that has seen a write, or is another one, since it was gathered. ``pieces``:
        of the same names, the tensors within the parameters: each has a version of its own."""
        if not self.on or not self._gatherings:
            return
        for name, piece in pieces.items():
            facts = piece.data_ptr(), version_of(piece), version_of(parameters[name])
            if self._seen.setdefault(name, facts) != facts:
                raise RuntimeError(
                    f"keep_unsharded: parameter {name} was written to, or replaced, inside "
                    "`with model.keep_unsharded()`, whose steps use the weights that the first one gathered; leave it "
                    "before weights change (optimizer.step)"
                )

    @property
    def comms(self) -> set[Comms]:
        alone = (one.apply for gathering in self._gatherings for one in gathering.others)
        return {bound.comms for bound in alone if isinstance(bound, Lowered)}

    def saved(self) -> Ledger:
        """What the last step did not send, as a ledger to add."""
        return add_ledgers(*(gathering.saved() for gathering in self._gatherings))
