"""Plan and Options: values that are checked, printed and written down."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compile.model import compile_model, plan_model
from autopar.ir.mesh import Mesh
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATE, Shard
from autopar.options import Options
from autopar.plan import ParameterPlan, Plan, Stream
from autopar.rewrite.checks import PlacementError, _check_inputs
from autopar.rewrite.compilation import Compilation

PLAN = Plan(
    Mesh.of(dp=2, tp=2),
    "abc",
    Options(zero=3, replicate_ops=("aten.foo.default",)),
    {
        "w": {
            "tp": ParameterPlan(Shard(0, (4, 2, 2)), Shard(0, (4, 2, 2)), "heads"),
            "dp": ParameterPlan(Shard(1), REPLICATE, "gathered"),
        }
    },
    {"x": {"dp": Shard(0)}},
    (Stream("embedding", 1, "residual stream"),),
    (("v", "replicated on tp: odd"),),
)


def test_options_are_checked() -> None:
    for wrong, why in (
        ({"zero": 4}, "zero: expected"),
        ({"microbatches": 0}, "microbatches: expected a"),
    ):
        with pytest.raises(ValueError, match=why):
            Options(**wrong)  # type: ignore[arg-type]


def test_json_round_trip() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN


def test_plans_whose_weight_pieces_were_called_slices_can_be_read() -> None:
    plan = dataclasses.replace(PLAN, weight_pieces={"split": Shard(0)})
    saved = plan.to_json()
    assert saved.count('"weight_pieces"') == 1
    assert Plan.from_json(saved.replace('"weight_pieces"', '"slices"')) == plan


WRONG = {  # what a JSON says instead -> what the error says
    "surplus": ({"more": 1}, "found unknown name 'more'"),
    "surplus option": ({"options": {**json.loads(PLAN.to_json())["options"], "zerro": 3}}, "unknown name 'zerro'"),
    "missing option": ({"options": {"zero": 3}}, "the plan.options, found no 'sequence_parallel'"),
    "option's type": ({"options": {**json.loads(PLAN.to_json())["options"], "zero": True}}, "int .*found True"),
    "mesh": ({"mesh": [["dp", "2"]]}, r"expected int at the plan.mesh\[0\]\[1\], found '2'"),
    "list": ({"parameters": []}, "expected names with values at the plan.parameters"),
    "placement": ({"inputs": {"x": {"dp": "S"}}}, "expected R, I, P, S.*found 'S'"),
    "entries": ({"parameters": {"w": {"dp": ["I", "R"]}}}, "expected 3 entries at the plan.parameters.w.dp"),
    "axis": ({"parameters": {"w": {"cp": ["I", "R", ""]}}}, "parameter w: no axis 'cp' in the mesh dp=2,tp=2"),
    "axis of an input": ({"inputs": {"x": {"pp": "I"}}}, "input x: no axis 'pp'"),
    "axis of a stream": ({"streams": [{"node": "a", "dim": 1, "reason": "", "axis": "cp", "blocks": []}]}, "'cp'"),
    "dim of a stream": ({"streams": [{"node": "a", "dim": -1, "reason": "", "axis": "tp", "blocks": []}]}, "found -1"),
    "stored R": ({"parameters": {"w": {"dp": ["R", "R", ""]}}}, "parameter w is stored as R on axis 'dp'.*use I"),
    "stored P": ({"parameters": {"w": {"tp": ["P", "R", ""]}}}, "parameter w is stored as P on axis 'tp'"),
    "used P": ({"parameters": {"w": {"tp": ["I", "P", ""]}}}, "w is used as P, which is not reduced"),
    "input P": ({"inputs": {"x": {"dp": "P"}}}, "input x is stored as P"),
    "piece R": ({"weight_pieces": {"split": "R"}}, "piece split is stored as R"),
    "microbatches": ({"parameters": {"w": {"mb": ["S(0)", "R", ""]}}}, "w is sharded on axis 'mb'"),
    "attention": ({"attention": {"a": {"forward": "ring", "backward": "ring", "query_blocks": [], "key_blocks": [],
                                       "reason": "", "candidates": []}}}, "attention a: no axis 'cp'"),
    "pipeline": ({"pipeline": {"schedule": "gpipe", "split_points": ["m"], "virtual_stages": 1, "token_slices": [],
                               "holders": {}}},
                 "needs an axis 'pp'"),
    "batch": ({"batch_dims": {"x": "1"}}, "expected int at the plan.batch_dims.x, found '1', or expected null"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_plans_that_nobody_could_follow_are_refused_when_read(what: str) -> None:
    change, why = WRONG[what]
    with pytest.raises(ValueError, match="^(plan|batch_dims): .*" + why):
        Plan.from_json(json.dumps(json.loads(PLAN.to_json()) | change))


def test_what_overrides_may_say() -> None:
    for wrong in ("R", "P", REPLICATE):
        with pytest.raises(ValueError, match=r"parameter w is stored as [RP] on axis 'dp', values are stored"):
            PLAN.override({"w": {"dp": wrong}})
    with pytest.raises(ValueError, match="input x is stored as R on axis 'dp'"):
        PLAN.override({"x": {"dp": "R"}})


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.a(x), y)


def test_plans_are_held_against_the_model() -> None:
    batch = {"x": torch.zeros(4, 8), "y": torch.zeros(4, 8)}
    made, _ = plan_model(Two(), batch, Mesh.of(dp=2, tp=2), Options())

    def read(**changes: Any) -> Plan:
        data = json.loads(made.to_json())
        for name, value in changes.items():
            data[name] = data[name] | value if value else value
        return Plan.from_json(json.dumps(data))

    assert read() == made and plan_model(Two(), batch, made.mesh, made.options, read())[0] == made
    for plan, why in (
        (read(parameters={"b.weight": {"tp": ["I", "I", ""]}}), "no parameter 'b.weight' in this model; it has a"),
        (read(parameters={"a.weight": {"tp": ["S(2)", "S(2)", ""]}}),
         r"a.weight is sharded as S\(2\) on axis 'tp', it has shape \(8, 8\)"),
        (read(parameters={"a.bias": {"tp": ["I", "S(1)", ""]}}), r"a.bias, as it is used, is sharded as S\(1\) on"),
        (read(parameters={"a.weight": {"tp": ["S(0)", "S(1)", ""]}}), r"stored as S\(0\) and used as S\(1\) on"),
        (read(parameters={"a.weight": {"dp": ["I", "S(0)", ""]}}), r"used as S\(0\) on axis 'dp'; use it as it"),
        (read(parameters={"a.weight": {"tp": ["S(0;4,2)", "I", ""]}}),
         r"blocks of S\(0;4,2\) sum to 6, the dim has size 8"),
        (read(parameters={"a.weight": {"tp": ["S(0;5,3)", "I", ""]}}), "block of 5 does not divide over 2 ranks"),
        (read(overrides={"c": {"tp": "I"}}), "an override of 'c', which is neither a parameter nor an input"),
        (dataclasses.replace(made, loss_gradients="sideways"), "gradients in the 'sideways'; use 'forward' or"),
        (made.override({"x": {"dp": "S(3)"}}), r"the batch is dim 3 of input x, found a tensor of shape \[4, 8\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="^(plan|batch_dims): .*" + why):
            plan_model(Two(), batch, made.mesh, made.options, plan)
        with pytest.raises(ValueError, match="^(plan|batch_dims): .*" + why):
            compile_model(Two(), batch, made.mesh, plan=plan)


def test_graphs_whose_parameters_are_stored_as_sums_are_no_graphs() -> None:
    batch = {"x": torch.zeros(4, 8), "y": torch.zeros(4, 8)}
    made = compile_model(Two(), batch, Mesh.of(dp=2), outputs=())
    for wrong in (REPLICATE, PARTIAL):
        ctx, graph = Compilation(made.plan.mesh, made.plan), made.local
        entry = next(s for s in graph.meta["signature"].inputs if s.name == "a.bias")
        node = next(n for n in graph.graph.nodes if n.name == entry.node)
        stored = {"dp": ParameterPlan(wrong, REPLICATE)}
        bent = dataclasses.replace(made.plan, parameters={**made.plan.parameters, "a.bias": stored})
        node.meta["placements"] = {"dp": wrong}
        with pytest.raises(PlacementError, match=r"parameter a.bias is stored as [RP], not I or S"):
            _check_inputs(graph, "dp", dataclasses.replace(ctx, plan=bent))


def test_text_shows_every_decision() -> None:
    text = str(PLAN)
    for part in (
        "mesh dp=2,tp=2",
        "tp: S(0;4,2x2)",
        "dp: S(1) used R",
        "gathered",
        "input x",
        "stream from embedding",
        "note v: replicated on tp: odd",
    ):
        assert part in text


def test_stored_leaves_invariant_axes_out() -> None:
    assert PLAN.stored("w") == {"tp": Shard(0, (4, 2, 2)), "dp": Shard(1)}
    assert PLAN.override({"w": {"tp": INVARIANT}}).stored("w") == {"dp": Shard(1)}
    assert PLAN.stored("unknown") == {}
