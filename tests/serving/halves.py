"""The two roles of a served model in one process: attention's graph asks, and the graphs of experts answer.

whole, cut, experts = halves(model, ep=2)
logits = run(cut, model, Answers(experts, model, [3, 0]))       # in rows [..], of one step after the other
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.compile.expert_role import compile_experts
from autopar.compile.serving import Apart, compile_packed
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.runtime.exec.lowering import bind
from autopar.serving.packed_runner import StepInputs
from autopar.serving.sampling_params import Sampling
from autopar.serving.step import Row, RowChoice
from autopar.steps.packed import LOGITS, Packed
from autopar.steps.packed_experts import PackedExperts
from autopar.testing.harness import scatter
from autopar.testing.lockstep import in_lockstep
from tests.hf.own_experts import own
from tests.hf.zoo import make

LENGTH, PAGE = 24, 8
ALONE: Any = SimpleNamespace(device=torch.device("cpu"), mesh=Mesh.of(dp=1))
CHOICE = RowChoice(Sampling(temperature=0.0), 0, 0, 1)


def built(kind: str) -> nn.Module:
    """A small model in eval mode."""
    if kind in TINY:
        return TINY[kind].build().eval()
    with contextlib.redirect_stderr(io.StringIO()):
        return (own(kind) if kind == "dbrx" else make(kind, "causal"))[0].eval()


def given(model: nn.Module, rows: int = 1) -> dict[str, Any]:
    """What both roles are compiled from."""
    model.requires_grad_(False)
    return {
        "model": model, "batch": {"input_ids": torch.zeros(rows, LENGTH, dtype=torch.int64)}, "tokens": "input_ids",
        "lift_to_float64": True, "buffers": dict(model.named_buffers()),
    }  # fmt: skip


def halves(model: nn.Module, apart: Apart = "experts", **sizes: int) -> tuple[Packed, Packed, PackedExperts]:
    """(the whole graph, attention's, the experts') of a model; ``sizes``: of the experts' mesh."""
    alone = {**given(model), "mesh": Mesh.of(dp=1)}
    experts = compile_experts(**given(model), mesh=Mesh.of(**(sizes or {"ep": 1})), apart=apart)
    return compile_packed(**alone), compile_packed(**alone, apart=apart), experts


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names, in float64."""
    found = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: x.detach().double() if x.is_floating_point() else x for name, x in found.items()}


@dataclass
class Answers:
    """Implements `autopar.runtime.comm.experts.Experts`: all nodes compute at once, each within its ranks, and their
    results are added. ``parts``: numbers of tokens that are computed apart; the rest is one part more. asked: what
    crossed, per layer."""

    experts: PackedExperts
    model: nn.Module
    parts: Sequence[int] = ()
    asked: list[tuple[int, tuple[Tensor | None, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        mesh, known = self.experts.plan.mesh, values_of(self.model) | dict(self.experts.constants)
        placed = {spec.name: spec.placements for spec in self.experts.parameters}
        self.held = [
            [scatter(known[name], placed.get(name, {}), mesh) for name in layer.names] for layer in self.experts.layers
        ]

    def start(self, layer: int, x: Tensor, expert: Tensor | None, weights: Tensor | None) -> Any:
        self.asked.append((layer, (x, expert, weights)))
        return layer, x, expert, weights

    def finish(self, pending: Any) -> Tensor:
        layer, *tensors = pending
        crossed = [t for t in tensors if t is not None]
        sizes = [*self.parts, len(crossed[0]) - sum(self.parts)]
        parts = zip(*(t.split(sizes) for t in crossed), strict=True)
        return torch.cat([functools.reduce(torch.add, self.of_nodes(layer, part)) for part in parts])

    def of_nodes(self, layer: int, crossed: Sequence[Tensor]) -> list[Tensor]:
        """What each node returns."""
        mesh, graph = self.experts.plan.mesh, self.experts.layers[layer].graph
        assert graph.inputs[: len(crossed)] == ["x", "expert", "weights"][: len(crossed)] and graph.outputs == ["y"]
        inputs = [[*crossed, *(shards[r] for shards in self.held[layer])] for r in range(mesh.world_size)]
        if mesh.world_size == 1:
            return [bind(graph.graph, ALONE)(inputs[0])[0]]
        found, within = [y for (y,) in in_lockstep(graph.graph, inputs, mesh)], mesh.size("tp")
        for rank, y in enumerate(found):
            assert torch.equal(y, found[rank // within * within]), "the ranks of a node have the same sums"
        return found[::within]


PROMPTS = ((3, 9, 4, 1, 5), (7,), (2, 8, 6, 11, 13, 17, 19))
STEPS = (  # per step: (request, first position, tokens)
    ((0, 0, PROMPTS[0]), (1, 0, PROMPTS[1])),
    ((0, 5, (21,)), (1, 1, (22,)), (2, 0, PROMPTS[2])),
    ((0, 6, (23,)), (2, 7, (24,))),
)


def run(packed: Packed, model: nn.Module, experts: Any = None, keep: list[list[Any]] | None = None) -> list[Tensor]:
    """The logits [N, V] of each of `STEPS`. ``keep``: gets the inputs of each."""
    (stage,) = packed.stages
    known, names = values_of(model) | packed.constants, {s.node: s.name for s in packed.signature.inputs}
    values: dict[str, Any] = {node: known[name] for node, name in names.items() if name in known}
    if stage.tables is not None:
        made = bind(stage.tables.graph, ALONE)([values[name] for name in stage.tables.inputs])
        values |= zip(map(str, stage.tables.outputs), made, strict=True)
    of_request = -(-LENGTH // PAGE)
    for layer in stage.layers:
        for name, shape in ((layer.keys, layer.key_shape), (layer.values, layer.value_shape)):
            values[name] = torch.zeros(1 + 3 * of_request, PAGE, *shape, dtype=layer.dtype)
    bound, inputs = bind(stage.graph.graph, ALONE, experts=experts), StepInputs(packed, PAGE, torch.device("cpu"))
    found = []
    for step in STEPS:
        rows = []
        for request, start, tokens in step:
            pages = tuple(range(1 + request * of_request, 1 + (request + 1) * of_request))
            rows.append(Row(request, tokens, start, (pages,) * len(packed.windows), CHOICE))
        values |= inputs.of(rows, sum(len(row.tokens) for row in rows), len(rows))
        fed = [values[name] for name in stage.graph.inputs]
        if keep is not None:
            keep.append([x.clone() if isinstance(x, Tensor) else x for x in fed])
        values |= zip(stage.graph.outputs, bound(fed), strict=True)
        found.append(values[LOGITS if LOGITS in values else str(stage.graph.outputs[0])][0])
    return found
