"""Options of the wrong type, range or name."""

from __future__ import annotations

import typing
from typing import Any

import autopar
from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.options import DECLARED
from autopar.planner.plan_fits import check_used
from tests.malformed import judge
from tests.malformed.judge import ANY, Case, failures
from tests.support.plain_models import Net, build, numbers

KINDS = typing.get_type_hints(autopar.Options)


def case(name: str, value: Any) -> Case:
    def right(options: autopar.Options) -> bool:
        found = getattr(options, name)
        given = tuple(value.items()) if isinstance(value, dict) else tuple(value) if isinstance(value, list) else value
        kinds = (KINDS[name], *typing.get_args(KINDS[name]))
        return found == given and (bool in kinds if isinstance(found, bool) else KINDS[name] is not bool)

    return Case(f"{name}={value!r:.60}", lambda: autopar.Options(**{name: value}), right)


def test_options() -> None:
    cases = [case(name, value) for name in KINDS for value in ANY]
    assert len(cases) >= 400
    found = failures(cases)
    assert not found, "\n".join(found)


def test_options_without_the_axis_that_they_are_about() -> None:
    """Each option on each mesh of one axis: refused, or an axis that it counts with is there (of any size)."""
    values: dict[str, dict[str, Any]] = {
        "zero": {"zero": 3}, "sequence_parallel": {"sequence_parallel": True},
        "async_tp": {"async_tp": True}, "schedule": {"schedule": "1f1b"},
        "split_points": {"split_points": ("a",)}, "virtual_stages": {"virtual_stages": 2},
        "token_slices": {"token_slices": 2},
        "reshard_after_forward": {"reshard_after_forward": True, "zero": 1},
        "reduce_grads": {"reduce_grads": "microbatch", "zero": 1},
        "attention": {"attention": "ring"}, "cp_recurrences": {"cp_recurrences": "channels"},
        "cp_load_balance": {"cp_load_balance": "zigzag"},
        "expert_axis": {"expert_axis": "auto"},
        "token_dispatcher": {"token_dispatcher": "alltoall_dedup", "expert_axis": "auto"},
    }  # fmt: skip
    assert values.keys() == {name for name, option in DECLARED.items() if option.axes}
    axes = ("pp", "dp", "cp", "ep", "tp")
    for name, options in values.items():
        for axis in axes:
            mesh = Mesh.of(**{"dp": 2, axis: 1})
            problem = _refusal(autopar.Options(**options), mesh)
            if {axis, "dp"} & set(DECLARED[name].axes):
                assert problem == "", (name, mesh)
            else:
                assert problem.startswith(f"{name}: needs a mesh axis ") and judge.unclear(problem) == "", problem
    assert _refusal(autopar.Options(zero=3), Mesh.of(tp=2)).startswith("zero: needs a mesh axis dp or ep or cp, found")
    told = _refusal(autopar.Options(reshard_after_forward=True), Mesh.of(dp=2))
    assert told.startswith("reshard_after_forward: says when parameters that ")
    assert _refusal(autopar.Options(topology="tp=ring"), Mesh.of(cp=2)).startswith("topology: names links of the axis")
    assert _refusal(autopar.Options(), Mesh.of(ep=2)) == ""


def test_a_script_for_pipelines_runs_on_an_axis_of_one_rank() -> None:
    """The mesh of a test on one machine: nothing to cut, and nothing refused."""
    model, batch = build(Net), numbers()
    given = autopar.Options(
        schedule="tera_pipe", token_slices=2, virtual_stages=2, split_points=("first",), memory_limit=10**9
    )
    found = [compile_model(model, batch, Mesh.of(pp=1, dp=2), options) for options in (given, autopar.Options())]
    assert found[0].plan.pipeline is None and found[0].local.code == found[1].local.code


def _refusal(options: autopar.Options, mesh: Mesh) -> str:
    try:
        check_used(options, mesh)
    except ValueError as error:
        return str(error)
    return ""
