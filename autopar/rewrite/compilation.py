"""What passes know besides the graph, and the observers of a compilation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from torch.fx import GraphModule, Node

from autopar.ir.mesh import Mesh, TokenSlice
from autopar.plan import Plan

T = TypeVar("T")


def timed(timings: dict[str, float], name: str, call: Callable[[], T]) -> T:
    """The result of ``call``; its seconds are added to those of ``name``."""
    start = time.perf_counter()
    result = call()
    timings[name] = timings.get(name, 0.0) + time.perf_counter() - start
    return result


@dataclass
class Compilation:
    """What a pass may know besides the graph: the mesh, the plan, and the observers."""

    mesh: Mesh
    plan: Plan | None = None
    observers: list[Observer] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    checks: bool = True  # whether invariants are checked: not of graphs that never run
    checked: dict[Node, list[Any]] = field(default_factory=dict)  # node whose types are right -> what was read of it

    # Names of the calls of a graph -> the order that its collectives were given: slices have the same.
    orders: dict[tuple[str, ...], list[str]] = field(default_factory=dict)
    draft: bool = False  # whether step graphs are compared by their memory and never run
    alternatives: bool = False  # whether another way is compiled where this one does not fit a memory limit
    bound: float = math.inf  # seconds of recomputation of another way: one that takes longer is given up
    prefix: str = ""  # of the names that observers see: the step graph that the passes run on

    def of_slice(self, part: TokenSlice, watched: bool) -> Compilation:
        """The compilation of one slice of the tokens. ``watched``: for the same observers."""
        mesh = replace(self.mesh, slice=part)
        observers = self.observers if watched else []
        return replace(self, mesh=mesh, observers=observers, checked={})

    @contextmanager
    def within(self, prefix: str) -> Iterator[None]:
        """Add a prefix to the names of the graphs shown within."""
        before, self.prefix = self.prefix, self.prefix + prefix
        try:
            yield
        finally:
            self.prefix = before

    @contextmanager
    def having(self, **values: bool | float) -> Iterator[None]:
        """Set fields within."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    @contextmanager
    def unobserved(self) -> Iterator[bool]:
        """Hide the graphs created within from observers; yields whether there are any."""
        before, self.observers = self.observers, []
        try:
            yield bool(before)
        finally:
            self.observers = before

    @property
    def watched(self) -> bool:
        """Whether an observer wants to see every graph, those of equal stages included."""
        return any(not getattr(observer, "glances", False) for observer in self.observers)

    def observe(self, name: str, gm: GraphModule) -> None:
        """Show a graph to all observers."""
        for observer in self.observers:
            observer(self.prefix + name, gm, self)


class Observer(Protocol):
    """Sees the graph after each pass (dumps, progress)."""

    def __call__(self, name: str, gm: GraphModule, ctx: Compilation) -> None: ...
