"""Passes, and the manager that runs them: order, requirements, checks, dumps, timing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch.fx import GraphModule

from autopar.rewrite.checks import CHECKS
from autopar.rewrite.compilation import Compilation, timed


class Pass(ABC):
    """A rewrite of the graph that carries out decisions of the plan.

    ``requires`` and ``ensures`` name invariants of `autopar.rewrite.checks.CHECKS`. The manager checks that what a pass
    requires was ensured before, and what it ensures after it ran; invariants in ``ends`` no longer hold after it.
    """

    name: str
    requires: tuple[str, ...] = ()
    ensures: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    @abstractmethod
    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        """The rewritten graph."""


@dataclass
class PassManager:
    """Runs passes in order. Invariants ensured by a pass hold until one ends them, and are checked after each pass."""

    passes: Sequence[Pass]

    def run(self, gm: GraphModule, ctx: Compilation, facts: Sequence[str] = ()) -> GraphModule:
        known = list(facts)
        for p in self.passes:
            missing = [fact for fact in p.requires if fact not in known]
            assert not missing, f"pass {p.name} requires {missing}, which no earlier pass ensured"
            gm = timed(ctx.timings, p.name, partial(p.apply, gm, ctx))
            known = [fact for fact in known if fact not in p.ends]
            known += [fact for fact in p.ensures if fact not in known]
            for fact in known if ctx.checks else ():
                timed(ctx.timings, "checks", partial(CHECKS[fact], gm, ctx))
            ctx.observe(p.name, gm)
        return gm
