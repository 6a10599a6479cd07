"""A whole model run slice by slice in one process: the graph of any slice, its forwards in order, its backwards in
reverse, caches of keys and values in between.

run = SlicedModel(model, batch)
loss, gradients = run.step((7, 5, 4))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from autopar.adapters.aot import joint_graph
from autopar.capture import capture
from autopar.compile import keep_outputs
from autopar.exact import LiftFloat32
from autopar.graph import (
    ancestors,
    copy_graph,
    has_gradient,
    mark_gradients,
    output_node,
    placeholders,
)
from autopar.mesh import Mesh
from autopar.pass_manager import Context, PassManager
from autopar.passes import GLOBAL_PASSES, PLACEMENT_PASSES
from autopar.passes.place_token_slices import token_count
from autopar.passes.slice_sizes import sample_slices, symbolic
from autopar.passes.slice_tokens import slice_tokens
from autopar.plan import Options
from autopar.planner import make_plan
from autopar.steps import Cache
from tests.harness import _at

__all__ = ["LiftFloat32", "SlicedModel", "normalized", "sliced"]


def normalized(model: nn.Module, batch: Mapping[str, Any], exact: bool = True) -> GraphModule:
    """The global graph with nothing but losses as outputs."""
    gm = PassManager(GLOBAL_PASSES).run(capture(model, batch, exact=exact), Context(Mesh.of()))
    mark_gradients(gm, [s.node for s in gm.meta["signature"].inputs if s.kind == "parameter" and s.requires_grad])
    keep_outputs(gm, ())
    return gm


def sliced(gm: GraphModule, length: int, start: int, mesh: Mesh | None = None) -> tuple[GraphModule, list[Cache]]:
    """The local graph of one slice of the tokens."""
    mesh = mesh or Mesh.of()
    gm = copy_graph(gm)
    ctx = Context(mesh.with_slice(length, start, token_count(gm)), plan=make_plan(gm, mesh, Options()))
    return slice_tokens(PassManager(PLACEMENT_PASSES).run(gm, ctx, facts=("functional",)), ctx)


class SlicedModel:
    """The joint graph of forward and backward for any slice, and the loop over slices. Losses only."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        whole = normalized(model, batch)
        self.total = token_count(whole)
        samples = sample_slices(self.total)
        locals_ = [sliced(whole, s.length, s.start) for s in samples]
        self.local, self.caches = locals_[0]
        nodes = placeholders(self.local)
        self.names = [n.name for n in nodes]
        self.wanted = [has_gradient(n) for n in nodes]
        self.results: list[Any] = list(output_node(self.local).args[0])  # type: ignore[arg-type]
        self.joint = symbolic([joint_graph(gm, self.wanted) for gm, _ in locals_], samples)
        self.forward = _first_results(self.joint, len(self.results))
        self.model, self.batch = model, batch
        self.specs = {s.node: s for s in self.local.meta["signature"].inputs}

    def feed(self, seed: int = 0) -> dict[str, Any]:
        state = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
            **self.local.meta.get("constants", {}),
        }
        fed: dict[str, Any] = {}
        for name in self.names:
            spec = self.specs[name]
            if spec.kind in ("parameter", "buffer", "constant"):
                x = state[spec.name].detach()
                fed[name] = x.double() if x.dtype == torch.float32 else x
            elif spec.kind == "input":
                fed[name] = _at(self.batch, spec.name)
            elif spec.kind == "seed":
                fed[name] = torch.tensor(seed)
        return fed

    @torch.no_grad()
    def step(self, lengths: Sequence[int], seed: int = 0) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients by original names, for slices of these lengths."""
        assert sum(lengths) == self.total
        fed = self.feed(seed)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        owns = [r.name for r in self.results]
        values = {n.name: n.meta["val"] for n in self.results}
        parts: dict[str, list[Tensor]] = {c.own: [] for c in self.caches}
        pasts: list[dict[str, Tensor]] = []
        loss = 0.0
        for length, start in zip(lengths, starts):
            pasts.append({c.past: self._past(parts[c.own], values[c.own], c.dim) for c in self.caches})
            made = dict(zip(owns, self._run(self.forward, fed | pasts[-1], [], length, start)))
            for c in self.caches:
                assert made[c.own].is_contiguous() and made[c.own].shape[c.dim] == length
                parts[c.own].append(made[c.own])
            loss += sum(float(x) for n, x in made.items() if n not in parts)
        gradients: dict[str, Tensor] = {}
        later = {c.own: [torch.zeros_like(x) for x in parts[c.own]] for c in self.caches}
        for i in reversed(range(len(lengths))):
            tangents = [
                later[n][i] if n in parts else torch.ones((), dtype=torch.float64)
                for n, r in zip(owns, self.results)
                if has_gradient(r)
            ]
            out = self._run(self.joint, fed | pasts[i], tangents, lengths[i], starts[i])[len(owns) :]
            made = dict(zip(self.names, out, strict=True))
            for c in self.caches:
                if made[c.past] is not None:
                    for j, piece in enumerate(made[c.past].split(list(lengths[:i]), c.dim) if i else ()):
                        later[c.own][j] = later[c.own][j] + piece
            for name, g in made.items():
                if g is not None and self.specs[name].kind == "parameter":
                    key = self.specs[name].name
                    gradients[key] = gradients[key] + g if key in gradients else g
        return loss, gradients

    def _past(self, parts: list[Tensor], val: Tensor, dim: int) -> Tensor:
        if parts:
            return torch.cat(parts, dim)
        return torch.empty([0 if d == dim else n for d, n in enumerate(val.shape)], dtype=val.dtype)

    def _run(self, gm: GraphModule, fed: Mapping[str, Any], tangents: list[Any], length: int, start: int) -> Any:
        return gm(*(fed[n] for n in self.names), *tangents, length, start)


def _first_results(joint: GraphModule, count: int) -> GraphModule:
    """The forward alone."""
    outs: Any = output_node(joint).args[0]
    needed = ancestors(x for x in outs[:count] if x is not None)
    graph, copies = Graph(), {}
    for node in joint.graph.nodes:
        tangent = node.op == "placeholder" and "tangent" in node.name
        if (node.op == "placeholder" and not tangent) or (node.op != "output" and node in needed):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[x] for x in outs[:count]))
    return GraphModule(joint, graph)
