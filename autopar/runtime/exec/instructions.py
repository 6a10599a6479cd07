"""A step as a flat list of instructions over slots: values have numbers, so that running one costs next to nothing.

The list is made once, when a pipeline is bound. `set_lifetimes` then finds out after which instruction nobody reads a
slot any more: it is emptied before the instruction runs, so a graph that empties its list of inputs frees them in
between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.adapters.foreach import add_all
from autopar.runtime.exec.lowering import Lowered
from autopar.schedule.order import Action

Slots = list[Any]
Within = Callable[[], AbstractContextManager[Any]]
NOWHERE = -1  # a result that has no name


@dataclass(slots=True)
class Instruction:
    """``apply`` takes the values of ``reads`` as one list and returns those of ``writes``.

    dead: slots of ``reads`` that nobody reads later, or that it writes. stores: (index of the result, slot) of what
    somebody reads. Both are set by `set_lifetimes`, and those of ``others``: what may run in its place.
    """

    apply: Callable[[list[Any]], Sequence[Any]]
    reads: list[int]
    writes: list[int] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    stores: list[tuple[int, int]] = field(default_factory=list)
    others: list[Instruction] = field(default_factory=list)

    def run(self, slots: Slots) -> Sequence[Any]:
        """What ``apply`` returned."""
        found = self.apply(self._taken(slots))
        self._store(found, slots)
        return found

    def steps(self, slots: Slots) -> Generator[None, None, None]:
        """`run`, with pauses where the graph that it applies has some."""
        if isinstance(self.apply, Lowered) and self.apply.paused is not None:
            found = yield from self.apply.steps(self._taken(slots))
            self._store(found, slots)
        else:
            self.run(slots)

    def _taken(self, slots: Slots) -> list[Any]:
        inputs = [slots[i] for i in self.reads]
        for i in self.dead:
            slots[i] = None
        return inputs

    def _store(self, found: Sequence[Any], slots: Slots) -> None:
        for k, i in self.stores:
            slots[i] = found[k]


def set_lifetimes(instructions: Sequence[Instruction], kept: Collection[int]) -> None:
    """Set ``dead`` and ``stores``; slots in ``kept`` are read at the end."""
    later = set(kept)
    for instruction in reversed(instructions):
        for one in (instruction, *instruction.others):
            one.stores = [(k, i) for k, i in enumerate(one.writes) if i in later]
            one.dead = [i for i in dict.fromkeys(one.reads) if i not in later or i in one.writes]
        later.update(instruction.reads)


@dataclass
class BoundAction:
    """One action (None: before all of them) with this rank's instructions. waits: those that wait for received values,
    which run first. graphs: the lowered graphs that it runs."""

    action: Action | None
    waits: list[Instruction] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    graphs: list[Lowered] = field(default_factory=list)

    def run(self, slots: list[Any], within: Within = nullcontext) -> float:
        """Returns when (`time.perf_counter`) it no longer waited. ``within``: entered around what it does."""
        for instruction in self.waits:
            instruction.run(slots)
        start = time.perf_counter()
        with within():
            for instruction in self.instructions:
                instruction.run(slots)
        return start

    def __str__(self) -> str:
        return str(self.action) if self.action is not None else "prologue"

    @property
    def actions(self) -> list[Action]:
        return [self.action] if self.action is not None else []

    @property
    def pauses(self) -> bool:
        return any(graph.paused is not None for graph in self.graphs)


@dataclass
class Program:
    """What one rank runs in a step.

    size: number of slots. loads: (slot, placeholder, microbatch) to fill from outside. constants: slot -> value.
    tangents: output -> slots for its gradient, one per backward; ones are among the constants. gradients: placeholder
    of a stored parameter -> slot. losses: name -> slot. results: what else leaves F -> slot. saved: slot -> name of
    what F and B keep.
    """

    size: int
    entries: list[BoundAction]
    loads: list[tuple[int, str, int]]
    constants: dict[int, Any]
    tangents: dict[str, list[int]]
    gradients: dict[str, int]
    losses: dict[str, int]
    results: dict[str, int]
    saved: dict[int, str]


# --- what instructions do besides running graphs ------------------------------------------------------


def total(values: list[Any]) -> list[Tensor]:
    """The sum of all, in storage of its own."""
    out = values[0] + values[1]
    for value in values[2:]:
        out += value
    return [out]


def accumulate(values: list[Any]) -> list[Tensor]:
    """Takes sums (None: nothing yet) and as many addends; adds in place. The first addends are copied."""
    count = len(values) // 2
    sums, addends = values[:count], values[count:]
    if any(so_far is None for so_far in sums):
        return [more.clone() if so_far is None else so_far.add_(more) for so_far, more in zip(sums, addends)]
    add_all(sums, addends)  # one call: there are many small ones
    return sums


def no_sums(like: Iterable[Tensor], device: torch.device, dense: bool) -> Callable[[list[Any]], list[Tensor]]:
    """Makes zeros of the shapes and dtypes of some values. Unless they are ``dense``, they take no memory."""
    kinds = [(tuple(x.shape), x.dtype) for x in like]

    def zeros(_: list[Any]) -> list[Tensor]:
        whole = [shape if dense else () for shape, _ in kinds]
        made = [torch.zeros(size, dtype=dtype, device=device) for size, (_, dtype) in zip(whole, kinds)]
        return [x.expand(shape) for x, (shape, _) in zip(made, kinds)]

    return zeros


def filled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[list[Any]], list[Tensor]]:
    """Makes zeros."""
    return lambda _: [torch.zeros(shape, dtype=dtype, device=device)]


def rows(dim: int, start: int, length: int) -> Callable[[list[Any]], list[Tensor]]:
    """A view of some rows of a buffer along ``dim``."""
    return lambda values: [values[0].narrow(dim, start, length)]


def cast_rows(dim: int, start: int, length: int, dtype: torch.dtype) -> Callable[[list[Any]], list[Tensor]]:
    """Some rows as a contiguous tensor of another dtype, in storage of their own."""

    def cut(values: list[Any]) -> list[Tensor]:
        piece = values[0].narrow(dim, start, length)
        return [torch.empty(piece.shape, dtype=dtype, device=piece.device).copy_(piece)]

    return cut


def change_rows(change: str, dim: int, start: int, length: int) -> Callable[[list[Any]], list[Tensor]]:
    """Takes (buffer, piece): the rows of the buffer are ``change``d by the piece, "copy_" or "add_"."""

    def run(values: list[Any]) -> list[Tensor]:
        getattr(values[0].narrow(dim, start, length), change)(values[1])
        return []

    return run
