"""Schedules are data: which rank does what in which order.

    2F0      stage 2 runs the forward of micro-batch 0
    2B0      backward to inputs        2W0    backward to weights        2BW0    both in one
    2F0.1    the same for token slice 1
    2SF0>3   stage 2 sends activations of micro-batch 0 to stage 3       3RF0<2  stage 3 receives them
    3SB0>2   stage 3 sends gradients back                                2RB0<3  stage 2 receives them
    2G       gather the parameters of stage 2                            2R      reduce its gradients

A schedule is a pure function that gives an `Order` of F, B, W and BW; `lower` adds the transfers, gathers and
reductions; `simulate` runs either on given costs. The executor runs the lowered Order, and pictures show the same.

A *stage* runs one *part* of the model on one rank. Parts follow each other along a *chain* of stages. All schedules
have one chain, but for dual_pipe: there every part has two stages, on mirrored ranks, and each micro-batch takes one
of two chains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from autopar.registry import Registry

COMPUTE = ("F", "B", "W", "BW")
TRANSFERS = ("SF", "RF", "SB", "RB")
PARAMETERS = ("G", "R")


@dataclass(frozen=True)
class Action:
    """One step of one rank. ``peer``: the other stage of a transfer. ``paired``: runs as one cell with the action
    behind it (DualPipe's overlapped forward and backward)."""

    stage: int
    kind: str
    micro_batch: int = 0
    slice: int = 0
    peer: int = -1
    paired: bool = False


@dataclass(frozen=True)
class Order:
    """What every rank does, in order.

    ranks: rank -> actions. chains: the stages along which micro-batches flow, first part first. rank_of: stage -> rank.
    chain_of: micro-batch -> index of its chain. slices: token slices per micro-batch (1: none).
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    chains: tuple[tuple[int, ...], ...]
    rank_of: tuple[int, ...]
    chain_of: tuple[int, ...]
    slices: int = 1

    @property
    def micro_batches(self) -> int:
        return len(self.chain_of)

    @property
    def parts(self) -> int:
        """Number of parts that the model is cut into."""
        return len(self.chains[0])

    def part_of(self, stage: int) -> int:
        """The part of the model that a stage runs."""
        return next(chain.index(stage) for chain in self.chains if stage in chain)


@dataclass(frozen=True)
class Hop:
    """A value goes from one part to a later one; with ``gradient`` its gradient comes back the same way.

    shapes: of one micro-batch on one rank; one shape per token slice where there are slices.
    """

    value: str
    source: int
    target: int
    gradient: bool = True
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Request:
    """What a schedule is asked for.

    ranks: size of the pp axis. chunks: parts per rank. slices: token slices per micro-batch. costs, memory_limit: for
    schedules that search (limit in units of one micro-batch's activations on one rank).
    """

    ranks: int
    micro_batches: int
    chunks: int = 1
    slices: int = 1
    costs: Costs | None = None
    memory_limit: float | None = None


@dataclass(frozen=True)
class Schedule:
    """An entry of `SCHEDULES`.

    make: the pure function. chunks: parts per rank (of the default request). splits: whether B and W are apart.
    sliced: whether it runs token slices. copies: how many ranks hold each part.
    """

    name: str
    make: Callable[[Request], Order]
    summary: str
    chunks: int = 1
    splits: bool = False
    sliced: bool = False
    copies: int = 1


@dataclass(frozen=True)
class Costs:
    """Seconds (any unit) and memory of actions; a tuple gives one value per part.

    F, B, W: times; BW takes B + W. comm: latency of a transfer between ranks. FB: a paired cell (default: F + BW).
    scale: time of token slice i relative to the whole micro-batch. activations: what F keeps until B or BW;
    stash: what B leaves for W.
    """

    F: float | tuple[float, ...] = 1.0
    B: float | tuple[float, ...] = 1.0
    W: float | tuple[float, ...] = 1.0
    comm: float = 0.0
    FB: float | None = None
    scale: tuple[float, ...] = field(default=(1.0,))
    activations: float | tuple[float, ...] = 1.0
    stash: float | tuple[float, ...] = 0.0


SCHEDULES: Registry[Schedule] = Registry("schedule")
