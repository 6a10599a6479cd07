"""The pipeline of token slices: graphs for slices of any length."""

from __future__ import annotations

import dataclasses

from torch.fx import GraphModule

from autopar.compile.parts import compile_sliced_pipeline
from autopar.cost.axis_shares import axis_shares
from autopar.ir.graph import copy_graph
from autopar.passes.differentiate import lowered
from autopar.passes.in_order import PLACEMENT_PASSES
from autopar.passes.slice_sizes import sample_slices
from autopar.passes.slice_tokens import slice_tokens
from autopar.passes.split_prologue import split_prologue
from autopar.planner.slice_lengths import slice_unit
from autopar.planner.step_order import parameter_specs
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import PassManager
from autopar.steps.graphs import Compiled


def compile_sliced(gm: GraphModule, ctx: Compilation) -> Compiled:
    """The pipeline of token slices: one set of graphs for slices of any length, from those of four sample slices."""
    plan = ctx.plan
    assert plan is not None and plan.pipeline is not None
    samples = sample_slices(sum(plan.pipeline.slices), slice_unit(plan.options, plan.mesh))
    made = []
    prologues = []
    for i, part in enumerate(samples):
        mesh = ctx.mesh.with_slice(part.length, part.start, part.total)
        here = Compilation(mesh, plan, ctx.observers if i == 0 else [], ctx.timings)
        local = PassManager(PLACEMENT_PASSES).run(copy_graph(gm), here, facts=("functional",))
        if i == 0:
            ctx.plan = plan = dataclasses.replace(plan, shares=axis_shares(local, plan))
        local, prologue = split_prologue(local, here)
        prologues.append(prologue)
        made.append(slice_tokens(local, here))
        here.observe("slice_tokens", local)
    if prologues[0] is not None:
        prologues[0].graph = lowered(prologues[0].graph)
        ctx.observe("prologue", prologues[0].graph)
    pipeline = compile_sliced_pipeline(made, ctx, samples)
    local = made[0][0]
    parameters = parameter_specs(local, plan)
    return Compiled(local.meta["signature"], plan, local, pipeline, prologues[0], parameters, True, ctx.timings)
