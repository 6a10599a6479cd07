"""A whole model run slice by slice, on all ranks of a mesh in one process: the graph of any slice, its forwards in
order, its backwards in reverse, caches of keys and values in between.

run = SlicedModel(model, batch, Mesh.of(tp=2))
loss, gradients = run.step((7, 5, 4))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from autopar.capture.front_end import capture
from autopar.compile.partitioned_model import keep_outputs
from autopar.ir.graph import ancestors, copy_graph, has_gradient, mark_gradients, outputs, placeholders
from autopar.ir.mesh import Mesh, TokenSlice
from autopar.ir.placement import nested_piece
from autopar.options import Options
from autopar.passes.autodiff.trace_joint import joint_graph
from autopar.passes.pipelines import GLOBAL_PASSES, PLACEMENT_PASSES
from autopar.passes.stage.slice_sizes import sample_slices, symbolic
from autopar.passes.stage.slice_tokens import slice_tokens
from autopar.passes.stage.split_prologue import split_prologue
from autopar.plan import Plan
from autopar.planner import make_plan
from autopar.planner.pipeline.slice_lengths import token_count
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import PassManager
from autopar.steps.graphs import Cache
from autopar.testing.harness import _at, eager
from autopar.testing.lockstep import in_lockstep


def normalized(model: nn.Module, batch: Mapping[str, Any], mesh: Mesh | None = None) -> GraphModule:
    """The global graph with nothing but losses as outputs."""
    gm = PassManager(GLOBAL_PASSES).run(capture(model, batch, lift_to_float64=True), Compilation(mesh or Mesh.of()))
    mark_gradients(gm, [s.node for s in gm.meta["signature"].inputs if s.kind == "parameter" and s.requires_grad])
    keep_outputs(gm, ())
    return gm


def sliced(gm: GraphModule, part: TokenSlice, plan: Plan) -> tuple[GraphModule, list[Cache]]:
    """The local graph of one slice of the tokens."""
    mesh = plan.mesh.with_microbatches(plan.options.microbatches)
    ctx = Compilation(dataclasses.replace(mesh, slice=part), plan=plan)
    gm = PassManager(PLACEMENT_PASSES).run(copy_graph(gm), ctx, facts=("functional",))
    return slice_tokens(split_prologue(gm, ctx)[0], ctx)


def check_slices(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Raises ValueError for a model whose tokens cannot be sliced."""
    gm = normalized(model, batch)
    part = TokenSlice(5, 4, token_count(gm))
    sliced(gm, part, make_plan(gm, Mesh.of()))


class SlicedModel:
    """The joint graph of forward and backward for any slice, and the loop over slices. One microbatch."""

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        mesh: Mesh | None = None,
        options: Options | None = None,
        unit: int = 1,
    ) -> None:
        self.model, self.batch, self.mesh = model, batch, mesh or Mesh.of()
        whole = normalized(model, batch, self.mesh)
        self.plan = make_plan(whole, self.mesh, options)
        self.total = token_count(whole)
        samples = sample_slices(self.total, unit)
        made = [sliced(whole, s, self.plan) for s in samples]
        self.local, self.caches = made[0]
        nodes = placeholders(self.local)
        self.specs = {n.name: s for n in nodes for s in self.local.meta["signature"].inputs if s.node == n.name}
        self.values = {n.name: n.meta["val"] for n in [*nodes, *outputs(self.local)]}
        self.results = [(n.name, has_gradient(n)) for n in outputs(self.local)]
        wanted = [has_gradient(n) for n in nodes]
        self.joint = symbolic([joint_graph(gm, wanted) for gm, _ in made], samples)
        self.forward = _first_results(self.joint, len(self.results))

    def feed(self, rank: int, seed: int) -> dict[str, Any]:
        """What a rank knows before the first slice."""
        state = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
            **self.local.meta.get("constants", {}),
        }
        fed: dict[str, Any] = {}
        for name, spec in self.specs.items():
            if spec.kind == "parameter":
                fed[name] = self._piece(state[spec.name].detach(), self.plan.stored(spec.name), rank)
            elif spec.kind in ("buffer", "constant"):
                x = state[spec.name]
                fed[name] = x.double() if x.dtype == torch.float32 else x
            elif spec.kind == "input":
                fed[name] = self._piece(_at(self.batch, spec.name), self.plan.inputs[spec.name], rank)
            elif spec.kind == "seed":
                fed[name] = torch.tensor(seed)
        return fed

    def _piece(self, value: Tensor, placements: Any, rank: int) -> Tensor:
        return nested_piece(value, placements, self.mesh.cut_order, self.mesh.coordinate(rank)).clone()

    @torch.no_grad()
    def step(self, lengths: Sequence[int], seed: int = 0) -> tuple[list[float], dict[str, list[Tensor]]]:
        """Loss per rank, and gradients by original names per rank, for slices of these lengths."""
        assert sum(lengths) == self.total
        world = range(self.mesh.world_size)
        fed = [self.feed(r, seed) for r in world]
        names = [name for name, _ in self.results]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        caches = [Caches(self.caches, self.values) for _ in world]
        losses = [0.0 for _ in world]
        for i, length in enumerate(lengths):
            given = [[{**fed[r], **caches[r].past(i)}[n] for n in self.specs] for r in world]
            made = in_lockstep(self.forward, [[*g, length, starts[i]] for g in given], self.mesh)
            for r in world:
                results = dict(zip(names, made[r], strict=True))
                caches[r].add(results, length)
                losses[r] += sum(float(x) for n, x in results.items() if n not in caches[r].own)
        sums: list[dict[str, Tensor]] = [{} for _ in world]
        for i in reversed(range(len(lengths))):
            given = []
            for r in world:
                env = {**fed[r], **caches[r].past(i)}
                tangents = [caches[r].tangent(n, i) for n, wanted in self.results if wanted]
                given.append([*(env[n] for n in self.specs), *tangents, lengths[i], starts[i]])
            for r, made_here in enumerate(in_lockstep(self.joint, given, self.mesh)):
                gradients = dict(zip(self.specs, made_here[len(names) :], strict=True))
                caches[r].spread(gradients, lengths[:i])
                for name, g in gradients.items():
                    if g is not None and self.specs[name].kind == "parameter":
                        key = self.specs[name].name
                        sums[r][key] = sums[r][key] + g if key in sums[r] else g
        return losses, {name: [sums[r][name] for r in world] for name in sums[0]}

    def errors(self, lengths: Sequence[int]) -> dict[str, float]:
        """How far the loss, and every gradient, is from eager."""
        losses, gradients = self.step(lengths)
        loss, expected, _ = eager(self.model, self.batch)
        aliases = {s.name: (s.name, *s.aliases) for s in self.specs.values()}
        found = {"loss": max(abs(x - loss) for x in losses)}
        for name, pieces in gradients.items():
            whole = next(g for n in aliases[name] if (g := expected.get(n)) is not None)
            stored = self.plan.stored(name)
            found[name] = max(float((x - self._piece(whole, stored, r)).abs().max()) for r, x in enumerate(pieces))
        missing = {n for n, g in expected.items() if g is not None} - {a for n in gradients for a in aliases[n]}
        assert not missing, f"no gradient of {sorted(missing)}"
        return found


class Caches:
    """The keys and values of one rank, and their gradients."""

    def __init__(self, caches: list[Cache], values: Mapping[str, Tensor]) -> None:
        self.caches, self.values = caches, values
        self.own: dict[str, list[Tensor]] = {c.own: [] for c in caches}
        self.grads: dict[str, list[Tensor]] = {c.own: [] for c in caches}

    def past(self, count: int) -> dict[str, Tensor]:
        """What the first slices made."""
        return {c.past: torch.cat([self._empty(c), *self.own[c.own][:count]], c.dim) for c in self.caches}

    def _empty(self, cache: Cache) -> Tensor:
        val = self.values[cache.own]
        return torch.empty([0 if d == cache.dim else n for d, n in enumerate(val.shape)], dtype=val.dtype)

    def add(self, results: Mapping[str, Tensor], length: int) -> None:
        for c in self.caches:
            assert results[c.own].is_contiguous() and results[c.own].shape[c.dim] == length
            self.own[c.own].append(results[c.own])
            self.grads[c.own].append(torch.zeros_like(results[c.own]))

    def tangent(self, name: str, i: int) -> Tensor:
        return self.grads[name][i] if name in self.grads else torch.ones((), dtype=torch.float64)

    def spread(self, gradients: Mapping[str, Tensor | None], lengths: Sequence[int]) -> None:
        """The gradient of the past goes to the slices that made it."""
        for c in self.caches:
            g = gradients[c.past]
            if g is not None:
                assert g.shape[c.dim] == sum(lengths)
                for j, piece in enumerate(g.split(list(lengths), c.dim) if lengths else ()):
                    self.grads[c.own][j] = self.grads[c.own][j] + piece


def _first_results(joint: GraphModule, count: int) -> GraphModule:
    """The forward alone."""
    outs = outputs(joint)[:count]
    needed = ancestors(outs)
    graph, copies = Graph(), {}
    for node in joint.graph.nodes:
        tangent = node.op == "placeholder" and "tangent" in node.name
        if (node.op == "placeholder" and not tangent) or (node.op != "output" and node in needed):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[x] for x in outs))
    return GraphModule(joint, graph)
