"""Plans with something wrong in their JSON: refused when read or against their model, or the same plan."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from autopar.capture.front_end import capture
from autopar.ir.graph import mark_gradients
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes.pipelines import GLOBAL_PASSES
from autopar.plan import Plan
from autopar.planner import make_plan
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import PassManager
from autopar.testing.harness import check_model
from tests.malformed.judge import Case, broken, failures
from tests.support.plain_models import EXACT, Net, build, numbers

MESH, COUNT = Mesh.of(dp=2, tp=2), 200


@pytest.fixture(scope="module")
def graph() -> Any:
    gm = PassManager(GLOBAL_PASSES).run(capture(build(Net), numbers()), Compilation(MESH))
    mark_gradients(gm, [s.node for s in gm.meta["signature"].inputs if s.kind == "parameter"])
    return gm


def test_plans(graph: Any) -> None:
    first = make_plan(graph, MESH, Options(zero=3))
    plan = make_plan(graph, MESH, first.options, first)
    whole, rng = plan.to_json(), random.Random(0)

    def used(text: str) -> Plan:
        return make_plan(graph, MESH, plan.options, Plan.from_json(text))

    def right(found: Plan) -> bool:
        """What decides about parameters is as it was, or another plan that trains alike: what is left out is whole."""
        stored = {n: {a: (p.stored, p.used) for a, p in axes.items()} for n, axes in found.parameters.items()}
        known = {n: {a: (p.stored, p.used) for a, p in axes.items()} for n, axes in plan.parameters.items()}
        same = stored == known and found.mesh == plan.mesh
        return same or check_model(build(Net), numbers(), MESH, plan.options, fixed=found).worst < EXACT

    cases = []
    for i in range(COUNT):
        what, data = broken(json.loads(whole), rng)
        text = json.dumps(data)
        if i % 8 == 0:
            what, text = "cut off", whole[: rng.randrange(len(whole))]
        elif i % 8 == 1:
            name = rng.choice(list(json.loads(whole)))
            what, text = f"{name} twice", whole.replace("{", f'{{"{name}": {rng.choice(("0", "null", "[]", "{}"))},', 1)
        cases.append(Case(what, lambda text=text: used(text), right))  # type: ignore[misc]
    found = failures(cases)
    assert not found, "\n".join(found)
