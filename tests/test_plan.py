"""Plan and Options: values that are checked, printed and written down."""

from __future__ import annotations

import pytest

from autopar.mesh import Mesh
from autopar.placement import INVARIANT, REPLICATE, Shard
from autopar.plan import Options, ParameterPlan, Plan, Stream

PLAN = Plan(
    Mesh.of(dp=2, tp=2),
    "abc",
    Options(zero=3, whole_ops=("aten.foo.default",)),
    {
        "w": {
            "tp": ParameterPlan(Shard(0, (4, 2, 2)), Shard(0, (4, 2, 2)), "heads"),
            "dp": ParameterPlan(Shard(1), REPLICATE, "gathered"),
        }
    },
    {"x": {"dp": Shard(0)}},
    (Stream("embedding", 1, "residual stream"),),
    (("v", "whole on tp: odd"),),
)


def test_options_are_checked() -> None:
    for wrong, why in (({"zero": 1}, "zero: expected"), ({"micro_batches": 0}, "micro_batches: expected at least 1")):
        with pytest.raises(ValueError, match=why):
            Options(**wrong)  # type: ignore[arg-type]


def test_json_round_trip() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN


def test_text_shows_every_decision() -> None:
    text = str(PLAN)
    for part in (
        "mesh dp=2,tp=2",
        "tp: S(0;4,2x2)",
        "dp: S(1) used R",
        "gathered",
        "input x",
        "stream from embedding",
        "note v: whole on tp: odd",
    ):
        assert part in text


def test_stored_leaves_invariant_axes_out() -> None:
    assert PLAN.stored("w") == {"tp": Shard(0, (4, 2, 2)), "dp": Shard(1)}
    assert PLAN.override({"w": {"tp": INVARIANT}}).stored("w") == {"dp": Shard(1)}
    assert PLAN.stored("unknown") == {}
