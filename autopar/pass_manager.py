"""Passes and the one that runs them: order, requirements, checks, dumps, timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from torch.fx import GraphModule

from autopar.checks import CHECKS
from autopar.mesh import Mesh

if TYPE_CHECKING:
    from autopar.plan import Plan

T = TypeVar("T")


@dataclass
class Context:
    """What a pass may know beside the graph: the mesh, the plan, and who watches."""

    mesh: Mesh
    plan: Plan | None = None
    observers: list[Observer] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)

    prefix: str = ""  # of the names that observers see: which step graph the passes run on

    @contextmanager
    def within(self, prefix: str) -> Iterator[None]:
        """Graphs that are shown meanwhile have a prefix to their names."""
        before, self.prefix = self.prefix, self.prefix + prefix
        try:
            yield
        finally:
            self.prefix = before

    def observe(self, name: str, gm: GraphModule) -> None:
        """Show a graph to everybody who watches."""
        for observer in self.observers:
            observer(self.prefix + name, gm, self)


class Observer(Protocol):
    """Sees the graph after each pass (dumps, progress)."""

    def __call__(self, name: str, gm: GraphModule, ctx: Context) -> None: ...


class Pass(Protocol):
    """A rewrite of the graph that carries out decisions which the plan made.

    ``requires`` and ``ensures`` name facts of `autopar.checks.CHECKS`; the manager checks what a pass ensures
    right after it ran, and that what it requires was ensured before.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]]
    ensures: ClassVar[tuple[str, ...]]

    def apply(self, gm: GraphModule, ctx: Context) -> GraphModule: ...


@dataclass
class PassManager:
    """Runs passes in order. Facts ensured by a pass hold for every later one, and are checked after each."""

    passes: Sequence[Pass]

    def run(self, gm: GraphModule, ctx: Context, facts: Sequence[str] = ()) -> GraphModule:
        known = list(facts)
        for p in self.passes:
            missing = [fact for fact in p.requires if fact not in known]
            assert not missing, f"pass {p.name} requires {missing}, which no earlier pass ensured"
            gm = self._timed(p.name, partial(p.apply, gm, ctx), ctx)
            known += [fact for fact in p.ensures if fact not in known]
            for fact in known:
                self._timed("checks", partial(CHECKS[fact], gm, ctx), ctx)
            ctx.observe(p.name, gm)
        return gm

    @staticmethod
    def _timed(name: str, call: Callable[[], T], ctx: Context) -> T:
        start = time.perf_counter()
        result = call()
        ctx.timings[name] = ctx.timings.get(name, 0.0) + time.perf_counter() - start
        return result
