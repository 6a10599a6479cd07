"""The pipeline of token slices: graphs for slices of any length."""

from __future__ import annotations

import dataclasses

from torch.fx import GraphModule

from autopar.compile.parameters import parameter_specs
from autopar.compile.parts import compile_sliced_pipeline
from autopar.ir.graph import (
    copy_graph,
)
from autopar.passes.differentiate import lowered
from autopar.passes.in_order import PLACEMENT_PASSES
from autopar.passes.place_token_slices import token_count
from autopar.passes.slice_sizes import sample_slices
from autopar.passes.slice_tokens import slice_tokens
from autopar.passes.split_prologue import split_prologue
from autopar.plan import Plan
from autopar.planner.slice_lengths import best_lengths, slice_lengths
from autopar.planner.stages import main_parts
from autopar.rewrite.compilation import Compilation, timed
from autopar.rewrite.pass_manager import PassManager
from autopar.steps.graphs import Compiled


def compile_sliced(gm: GraphModule, ctx: Compilation) -> Compiled:
    """The pipeline of token slices: one set of graphs for slices of any length, from those of four sample slices."""
    assert ctx.plan is not None
    plan = ctx.plan = with_slices(ctx.plan, gm)
    total = token_count(gm)
    samples = sample_slices(total, _slice_unit(plan))
    made = []
    prologues = []
    for i, part in enumerate(samples):
        mesh = ctx.mesh.with_slice(part.length, part.start, part.total)
        here = Compilation(mesh, plan, ctx.observers if i == 0 else [], ctx.timings)
        local = PassManager(PLACEMENT_PASSES).run(copy_graph(gm), here, facts=("functional",))
        local, prologue = split_prologue(local, here)
        prologues.append(prologue)
        made.append(slice_tokens(local, here))
        here.observe("slice_tokens", local)
    if prologues[0] is not None:
        prologues[0].graph = lowered(prologues[0].graph)
        ctx.observe("prologue", prologues[0].graph)
    pipeline = timed(ctx.timings, "pipeline", lambda: compile_sliced_pipeline(made, ctx, samples))
    local = made[0][0]
    parameters = parameter_specs(local, plan)
    return Compiled(local.meta["signature"], plan, local, None, prologues[0], parameters, True, ctx.timings, pipeline)


def _slice_unit(plan: Plan) -> int:
    """Of what the length of a slice is a multiple: sequence parallelism cuts it again."""
    return plan.mesh.size("tp") if plan.options.sequence_parallel else 1


def with_slices(plan: Plan, gm: GraphModule) -> Plan:
    """The plan with the lengths of the token slices for a global graph."""
    assert plan.pipeline is not None
    total, unit = token_count(gm), _slice_unit(plan)

    def best() -> tuple[tuple[int, ...], str]:
        assert plan.pipeline is not None
        return best_lengths(main_parts(gm, plan.pipeline.cuts), total, plan.options.micro_batches, unit)

    lengths, reason = slice_lengths(plan.options.slices, total, unit, best)
    note = ("pipeline", f"token slices {', '.join(map(str, lengths))}: {reason}")
    return dataclasses.replace(
        plan, pipeline=dataclasses.replace(plan.pipeline, slices=lengths), notes=(*plan.notes, note)
    )
