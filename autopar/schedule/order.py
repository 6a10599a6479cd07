"""Schedules are data: which rank does what in which order.

    2F0      stage 2 runs the forward of microbatch 0
    2B0      backward to inputs        2W0    backward to weights        2BW0    both in one
    2F0.1    the same for token slice 1
    0F3&     runs as one cell with the next compute action; rows print the cell as 0F3&1BW2
    2SF0>3   stage 2 sends activations of microbatch 0 to stage 3       3RF0<2  stage 3 receives them
    3SB0>2   stage 3 sends gradients back                                2RB0<3  stage 2 receives them
    2G       gather the parameters of stage 2                            2R      reduce its gradients
    2BWR3    2BW3 and 2R in one, so that the reductions overlap

A schedule is a pure function that gives an `Order` of F, B, W and BW. `autopar.schedule.lowering.lower` adds the
transfers, gathers and reductions; `autopar.schedule.simulate.simulate` runs either on given costs and proves that it
does not deadlock; `autopar.schedule.order_checks.validate` checks that every action occurs once. The executor runs the
lowered Order, and pictures show the same. The schedules themselves are in `autopar.runtime.schedules`, whose import
fills `SCHEDULES`.

A *stage* runs one *part* of the model on one rank. Parts follow each other along a *chain* of stages. All schedules
have one chain except dual_pipe, where every part has two stages, on mirrored ranks, and each microbatch takes one of
two chains.
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

COMPUTE = ("F", "B", "W", "BW", "BWR")
BACKWARD = ("B", "BW", "BWR")  # what makes the gradients of received values
TRANSFERS = ("SF", "RF", "SB", "RB")
PARAMETERS = ("G", "R")


@dataclass(frozen=True)
class Action:
    """One action of one rank. ``peer``: the other stage of a transfer. ``paired``: runs as one cell with the next
    compute action of the rank (DualPipe's overlapped forward and backward); only transfers may be between them."""

    stage: int
    kind: str
    microbatch: int = 0
    slice: int = 0
    peer: int = -1
    paired: bool = False

    def __str__(self) -> str:
        if self.kind in PARAMETERS:
            return f"{self.stage}{self.kind}"
        unit = f"{self.microbatch}.{self.slice}" if self.slice else str(self.microbatch)
        peer = f"{'>' if self.kind[0] == 'S' else '<'}{self.peer}" if self.kind in TRANSFERS else ""
        return f"{self.stage}{self.kind}{unit}{peer}{'&' if self.paired else ''}"


def row_text(actions: Iterable[Action]) -> str:
    """The actions of one rank on one line: '0F0 0F1&1BW0'."""
    return " ".join(map(str, actions)).replace("& ", "&")


@dataclass(frozen=True)
class Order:
    """What every rank does, in order.

    ranks: rank -> actions. chains: the stages along which microbatches flow, first part first. rank_of: stage -> rank.
    chain_of: microbatch -> index of its chain. slices: token slices per microbatch (1: none).
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    chains: tuple[tuple[int, ...], ...]
    rank_of: tuple[int, ...]
    chain_of: tuple[int, ...]
    slices: int = 1

    @property
    def microbatches(self) -> int:
        return len(self.chain_of)

    @property
    def parts(self) -> int:
        """Number of parts that the model is split into."""
        return len(self.chains[0])

    def part_of(self, stage: int) -> int:
        """The part of the model that a stage runs."""
        return self._parts[stage]

    @cached_property
    def _parts(self) -> dict[int, int]:
        return {stage: part for chain in self.chains for part, stage in enumerate(chain)}

    @cached_property
    def lowered(self) -> bool:
        """Whether what `autopar.schedule.lowering.lower` adds is part of the order."""
        return any(action.kind not in ("F", "B", "W", "BW") for actions in self.ranks for action in actions)

    @cached_property
    def lowerings(self) -> dict[Hashable, Order]:
        """What `autopar.steps.of_rank.lowered_order` has made of it, by what a pipeline adds."""
        return {}

    def text(self) -> str:
        """One line per rank."""
        return "\n".join(row_text(actions) for actions in self.ranks)

    def show(self, marks: Mapping[int, int] | None = None, around: int | None = None) -> str:
        """A grid to print: one labelled line per rank, in columns.

        marks: rank -> index of an action to put in [brackets]. around: show only so many actions before and after the
        marked one (without a mark: the last ones).
        """
        marks = marks or {}
        rows = [_window(actions, marks.get(rank), around) for rank, actions in enumerate(self.ranks)]
        width = max((len(word) for row in rows for word in row), default=0)
        label = len(str(len(rows) - 1))
        lines = (
            f"rank {rank:<{label}}  " + " ".join(word.center(width) for word in row) for rank, row in enumerate(rows)
        )
        return "\n".join(line.rstrip() for line in lines)


def _window(actions: Sequence[Action], mark: int | None, around: int | None) -> list[str]:
    """Words of one row of the grid, with dots for what is left out."""
    words = [f"[{action}]" if i == mark else f" {action} " for i, action in enumerate(actions)]
    if around is None:
        return words
    middle = len(words) if mark is None else mark
    first, last = max(0, middle - around), middle + around + 1
    return ["..."] * (first > 0) + words[first:last] + ["..."] * (last < len(words))


class ScheduleError(ValueError):
    """An order that cannot run. The message shows the grid with the failing actions in [brackets]."""

    def __init__(self, order: Order, message: str, marks: Mapping[int, int] | None = None) -> None:
        """``marks``: rank -> index of the action at fault."""
        super().__init__(f"schedule: {order.name}: {message}\n{order.show(marks, around=6)}")


@dataclass(frozen=True)
class P2PEdge:
    """A value goes from one part to a later one; with ``gradient`` its gradient comes back the same way.

    shapes: of one microbatch on one rank; one shape per token slice where there are slices.
    """

    value: str
    source: int
    target: int
    gradient: bool = True
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype = field(default_factory=lambda: importlib.import_module("torch").float32)
