"""The inputs of a schedule (sizes and costs), and the table of all schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autopar.registry import Registry
from autopar.schedule.order import Order


@dataclass(frozen=True)
class Request:
    """The sizes for which a schedule is made.

    ranks: size of the pp axis. virtual_stages: parts per rank. token_slices: per microbatch. costs, memory_limit: for
    schedules that search (limit in units of one microbatch's activations on one rank).
    """

    ranks: int
    microbatches: int
    virtual_stages: int = 1
    token_slices: int = 1
    costs: Costs | None = None
    memory_limit: float | None = None


@dataclass(frozen=True)
class Schedule:
    """An entry of `SCHEDULES`.

    make: the pure function. virtual_stages: parts per rank (of the default request). sliced: whether it runs token
    slices. copies: how many ranks hold each part. searches: it asks for costs and a memory limit. candidate: it is
    simulated where the user names no schedule. bubble, memory: formulas of `autopar.schedule.formulas`; "": not known.
    """

    name: str
    make: Callable[[Request], Order]
    summary: str
    virtual_stages: int = 1
    sliced: bool = False
    copies: int = 1
    searches: bool = False
    candidate: bool = False
    bubble: str = ""
    memory: str = ""


@dataclass(frozen=True)
class Costs:
    """Seconds (any unit) and memory of actions of a whole microbatch; a tuple gives one value per part.

    F, B, W: times; BW takes B + W. comm: latency of a transfer between ranks. FB: a paired cell (default: F + BW);
    one value, or one per part of F and part of BW.
    G, R: gather and reduce. scale: time of token slice i relative to the whole microbatch; tokens: its share of the
    tokens, and so of the memory (default of both: equal slices). activations: what F keeps until B or BW; stash: what
    B leaves for W.
    """

    F: float | tuple[float, ...] = 1.0
    B: float | tuple[float, ...] = 1.0
    W: float | tuple[float, ...] = 1.0
    comm: float = 0.0
    FB: float | tuple[tuple[float, ...], ...] | None = None
    G: float | tuple[float, ...] = 0.0
    R: float | tuple[float, ...] = 0.0
    scale: tuple[float, ...] = ()
    tokens: tuple[float, ...] = ()
    activations: float | tuple[float, ...] = 1.0
    stash: float | tuple[float, ...] = 0.0

    def divided(self, chunks: int) -> Costs:
        """Costs of one of ``chunks`` equal parts. Tuples, which have one value per part, are unchanged."""
        changed: dict[str, Any] = {}
        for name in ("F", "B", "W", "FB", "G", "R", "activations", "stash"):
            value = getattr(self, name)
            if isinstance(value, (int, float)):
                changed[name] = value / chunks
        return replace(self, **changed)


SCHEDULES: Registry[Schedule] = Registry("schedule")
