"""The table of planted faults, and the ways to enter one: in a rule, the code, a placed graph, a step graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch.fx import GraphModule

from autopar.ir.mesh import Mesh
from autopar.rules import RULES
from autopar.testing.soundness import Whole, accepted, wrong_pieces
from tests.faulty.planted import (
    Subject,
    in_step_graph,
    in_typed_graph,
    stopped_by,
)
from tests.support.rule_samples import SAMPLES

Found = tuple[str, float]


@dataclass(frozen=True)
class Fault:
    """``run`` plants it and says what stopped it. ``stopped_by``: what should."""

    area: str
    name: str
    stopped_by: str
    run: Callable[[dict[str, Subject], pytest.MonkeyPatch], Found]


FAULTS: list[Fault] = []


def in_rule(name: str, target: Any, rule: Any) -> None:
    """An operator with another rule."""

    def run(_: dict[str, Subject], patch: pytest.MonkeyPatch) -> Found:
        mesh = Mesh.of(dp=2)
        for sample in SAMPLES[target]:
            whole = Whole.of(sample)
            with patch.context() as planted:
                planted.setitem(RULES, target, rule)
                wrong = next((p for p in accepted(sample, mesh) if wrong_pieces(sample, p, mesh, whole)), None)
            if wrong is not None:
                assert wrong not in accepted(sample, mesh) or not wrong_pieces(sample, wrong, mesh, whole)
                return "rule soundness", 0.0
        return "nothing", 0.0

    FAULTS.append(Fault("rules", name, "rule soundness", run))


def in_code(area: str, name: str, stopped: str, subject: str, plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    """A fault in the compiler's code."""

    def run(made: dict[str, Subject], patch: pytest.MonkeyPatch) -> Found:
        with patch.context() as planted:
            plant(planted)
            return stopped_by(lambda: made[subject].error(made[subject].compile()))

    FAULTS.append(Fault(area, name, stopped, run))


def in_types(name: str, subject: str, change: Callable[[GraphModule], None]) -> None:
    """A fault in the placed graph."""
    FAULTS.append(Fault("propagation", name, "types", lambda made, _: in_typed_graph(made[subject], change)))


def in_step(area: str, name: str, stopped: str, where: str, change: Callable[[GraphModule], None]) -> None:
    """A fault in a step graph. ``where``: 'subject graph pass'."""
    subject, at, after = where.split()
    FAULTS.append(Fault(area, name, stopped, lambda made, _: in_step_graph(made[subject], at, after, change)))


def patched(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda planted: planted.setattr(owner, name, value)
