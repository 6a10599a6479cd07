"""A model's graph on one rank, before its stages are split and differentiated: what checkpoint policies and chunks of
the loss have in common.

    model = PartitionedModel(gm, mesh, options, ctx)
    model.compiled(), model.compiled(replace(options, activation_checkpoint="full"))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.fx import GraphModule

from autopar.compile.ac_solver import with_checkpoints
from autopar.compile.loss_chunks import Made, in_chunks
from autopar.compile.parameters import normalized
from autopar.compile.slices import samples_of
from autopar.compile.stages import StageBuilder
from autopar.compile.tiles import in_tiles
from autopar.cost.axis_shares import axis_shares
from autopar.cost.memory import most_static
from autopar.ir.graph import copy_graph, loss_places, output_node, remove_dead_code
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes.autodiff.differentiate import lowered
from autopar.passes.pipelines import PLACEMENT_PASSES
from autopar.passes.stage.slice_tokens import slice_tokens
from autopar.passes.stage.split_prologue import split_prologue
from autopar.plan import Plan, check_plan
from autopar.planner import make_plan
from autopar.planner.assumed_documents import assume_documents
from autopar.planner.experts.expert_axis import kept_axis
from autopar.planner.pipeline.step_order import parameter_specs
from autopar.planner.plan_fits import check_fits
from autopar.rewrite.compilation import Compilation, timed
from autopar.rewrite.pass_manager import PassManager
from autopar.steps.graphs import Cache, Compiled, Pipeline, Prologue


class PartitionedModel:
    """A captured graph, which it changes, with typed placements and local shapes."""

    def __init__(
        self,
        gm: GraphModule,
        mesh: Mesh,
        options: Options,
        ctx: Compilation,
        *,
        train: bool = True,
        plan: Plan | None = None,
        fixed: Plan | None = None,
        outputs: Sequence[str] | None = None,
        tangents: Sequence[str] = (),
    ) -> None:
        """ctx: of this compilation, on the mesh with its microbatches. Other arguments as of
        `autopar.compile.model.compile_model`."""
        self.mesh, self.options, self.ctx, self.train, self.tangents = mesh, options, ctx, train, tangents
        ctx.observe("capture", gm)
        gm = graph_to_plan(gm, ctx, options)
        if outputs is not None:
            keep_outputs(gm, outputs)
        if plan is None:
            plan = timed(ctx.timings, "plan", lambda: make_plan(gm, mesh, options, fixed, train=train))
        else:
            check_plan(plan)
            check_fits(plan, gm, train)
            kept_axis(options, plan)  # for its refusals
        ctx.plan = plan
        self.slices = samples_of(plan, train)
        contexts = [ctx.of_slice(s, s is self.slices[0]) for s in self.slices] or [ctx]
        local = [
            PassManager(PLACEMENT_PASSES).run(copy_graph(gm) if self.slices else gm, c, facts=("functional",))
            for c in contexts
        ]
        ctx.plan = plan = dataclasses.replace(plan, shares=axis_shares(local[0], plan))
        made = [_of_microbatch(*pair) for pair in zip(local, contexts, strict=True)]
        gm, _, self.prologue, self.pre_pass = made[0]
        if self.prologue is not None:
            self.prologue.graph = lowered(self.prologue.graph)
            ctx.observe("prologue", self.prologue.graph)
        if self.pre_pass is not None:
            plan = _with_pre_pass(plan, self.pre_pass)
        ctx.plan = self.plan = plan
        self.signature, self.parameters = gm.meta["signature"], parameter_specs(gm, plan)
        self.graphs: list[Made] = [(graph, caches) for graph, caches, _, _ in made]

    def compiled(self, options: Options | None = None) -> Compiled:
        """Step graphs. options: with another checkpoint policy or other chunks of the loss than the plan's."""
        plan = self.plan if options is None else dataclasses.replace(self.plan, options=options)
        self.ctx.plan, static = plan, most_static(self.parameters, self.mesh, options or self.options)

        def attempt(graphs: Sequence[Made]) -> Compiled:
            def finished(plan: Plan, pipeline: Pipeline) -> Compiled:
                return Compiled(
                    self.signature, plan, graphs[0][0], pipeline, self.prologue, self.parameters, self.train,
                    self.ctx.timings,
                )  # fmt: skip

            how = self.ctx, self.train, static, self.tangents, self.slices, self.pre_pass
            return with_checkpoints(StageBuilder(graphs, *how), finished)

        return in_tiles(
            self.graphs, self.ctx, self.train, lambda tiled: in_chunks(tiled, self.ctx, self.train, attempt)
        )


def graph_to_plan(gm: GraphModule, ctx: Compilation, options: Options) -> GraphModule:
    """The graph that is planned, with the documents that estimates assume."""
    gm = normalized(gm, ctx)
    assume_documents(gm, options)
    return gm


def _with_pre_pass(plan: Plan, pre_pass: GraphModule) -> Plan:
    """The plan with a note of the pre-pass, whose cost matters."""
    note = (
        f"{len(pre_pass.meta['results'])} values of all microbatches depend on weights: a forward of each runs before "
        'the step, without gradients; aux_loss_scope="microbatch" avoids this for auxiliary losses'
    )
    return dataclasses.replace(plan, notes=(*plan.notes, ("prologue", note)))


def _of_microbatch(
    gm: GraphModule, ctx: Compilation
) -> tuple[GraphModule, list[Cache], Prologue | None, GraphModule | None]:
    """The graph of a microbatch, or of a slice of its tokens, on one rank, before stages are split and differentiated,
    and the graph of the pre-pass."""
    gm, prologue, pre_pass = split_prologue(gm, ctx)
    gm, caches = slice_tokens(gm, ctx)
    if ctx.mesh.slice is not None:
        ctx.observe("slice_tokens", gm)
    return gm, caches, prologue, pre_pass


def keep_outputs(gm: GraphModule, names: Sequence[str]) -> None:
    """Drop the outputs that are not wanted; losses and new buffer values stay."""
    signature, out, losses = gm.meta["signature"], output_node(gm), loss_places(gm)
    kept = [
        (spec, value)
        for i, (spec, value) in enumerate(zip(signature.outputs, out.args[0], strict=True))  # type: ignore[arg-type]
        if spec.kind == "mutation" or spec.name in names or i in losses
    ]
    out.args = (tuple(value for _, value in kept),)
    gm.meta["signature"] = dataclasses.replace(signature, outputs=tuple(spec for spec, _ in kept))
    remove_dead_code(gm)
    gm.recompile()
