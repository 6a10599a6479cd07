"""Where stages are cut under a limit of memory: as an estimate says that they fit, or as they are fastest, where the
estimate was wrong. The least that is named is that of the fastest: these are tried under any limit, so it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from autopar.ac_policies import AUTO
from autopar.compile.ac_solver import LimitError
from autopar.compile.parameters import normalized
from autopar.ir.graph import copy_graph
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.plan import Plan
from autopar.planner import make_plan
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import Compiled


def follow_limit(mesh: Mesh, options: Options) -> bool:
    """Whether a limit says where to cut, if no plan does."""
    return mesh.size("pp") > 1 and bool(options.memory_limit) and not options.split_points and options.ac_policy == AUTO


def fastest_cuts(gm: GraphModule, mesh: Mesh, options: Options, **how: Any) -> Plan:
    """The plan without a limit."""
    free = replace(options, memory_limit=0, activation_offload=0, activation_checkpoint="none")
    return make_plan(normalized(gm, Compilation(mesh)), mesh, free, **how)


def same_cuts(one: Plan, other: Plan) -> bool:
    """Whether two plans have the same stages under the same schedule."""
    assert one.pipeline is not None and other.pipeline is not None
    return (one.pipeline.schedule, one.pipeline.split_points) == (other.pipeline.schedule, other.pipeline.split_points)


def cut_within_limit(
    gm: GraphModule, mesh: Mesh, options: Options, train: bool, compiled: Callable[..., Compiled]
) -> Compiled:
    """What ``compiled(graph)`` makes, or ``compiled(graph, fixed=plan)``. Raises the LimitError of the fastest cuts."""
    kept = copy_graph(gm)
    try:
        return compiled(gm)
    except LimitError as error:
        plan = fastest_cuts(copy_graph(kept), mesh, options, train=train)
        if same_cuts(plan, error.plan):
            raise
    return compiled(kept, fixed=plan)
