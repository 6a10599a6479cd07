"""Faults to plant, and what they are planted in: one small model, captured and compiled once, at three levels.

A fault in the compiler is planted in its code and the graph is compiled with it; one in a placed graph is planted in
the graph that the propagation leaves, one in a step graph in a copy of what the differentiation leaves, behind the pass
that could make the mistake. Every fault meets all checks in the order in which a user's model does: the first that
stops it counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from autopar.capture.front_end import capture
from autopar.compile.model import compile_graph
from autopar.ir.graph import copy_graph, output_node
from autopar.ir.mesh import Mesh
from autopar.ir.placement import nested_piece
from autopar.options import Options
from autopar.passes.pipelines import STEP_PASSES
from autopar.rewrite.checks import PlacementError, check_placements
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import PassManager
from autopar.rewrite.step_checks import StepError, check_step_types, promise
from autopar.steps.graphs import Compiled
from autopar.testing.harness import MeshRun, eager

STOPPED = 1e-6  # an error above is seen by any test of numbers; those of right graphs are below 1e-10
Graphs = dict[str, GraphModule]


class Small(nn.Module):
    """A norm, products with and without bias, an embedding; two losses in one, with labels that do not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.double()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(tokens)
        h = h + self.down(torch.tanh(self.up(self.norm(h))))
        loss = nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return loss + 0.1 * (h**2).mean()


def batch() -> dict[str, Tensor]:
    """Rows of which the ranks and microbatches have different numbers of labels that count."""
    torch.manual_seed(1)
    made = {name: torch.randint(0, 16, (8, 4)) for name in ("tokens", "labels")}
    made["labels"][0, 1:] = made["labels"][5] = -100
    return made


@dataclass
class Subject:
    """The model on one mesh."""

    mesh: Mesh
    options: Options
    model: nn.Module
    captured: GraphModule
    expected: tuple[float, dict[str, Tensor | None]]
    seen: dict[str, tuple[GraphModule, Compilation]] = field(default_factory=dict)

    def compile(self, observers: Any = ()) -> Compiled:
        return compile_graph(copy_graph(self.captured), self.mesh, self.options, outputs=(), observers=observers)

    @cached_property
    def compiled(self) -> Compiled:
        """Without a fault; copies of the graphs on the way are kept in ``seen``."""

        def keep(name: str, gm: GraphModule, ctx: Compilation) -> None:
            if name == "propagate_placements" or name.endswith(".differentiate"):
                self.seen[name] = copy_graph(gm), replace(ctx)

        return self.compile([keep])

    def error(self, compiled: Compiled) -> float:
        """The largest difference to one process in the loss, or in a gradient."""
        loss, gradients = MeshRun(compiled, self.model, batch(), self.mesh).step()
        expected, whole, _ = self.expected
        placed = {p.name: p for p in compiled.parameters}
        worst = max(abs(x - expected) for x in loss)
        if {n for n, g in whole.items() if g is not None} != set(gradients):
            return float("inf")
        for name, pieces in gradients.items():
            worst = max(worst, *(_far(a, b) for a, b in zip(pieces, self._cut(placed[name], whole[name]), strict=True)))
        return worst

    def _cut(self, spec: Any, whole: Any) -> list[Tensor]:
        return [nested_piece(whole, spec.placements, self.mesh.cut_order, c) for c in self.mesh.coordinates()]


def _far(found: Tensor | None, expected: Tensor) -> float:
    return float("inf") if found is None else float((found - expected).abs().nan_to_num(torch.inf).max())


def subjects() -> dict[str, Subject]:
    """The meshes and options that faults are planted on."""
    model = Small()
    gm, expected = capture(model, batch(), lift_to_float64=True), eager(model, batch())
    options = {
        "ddp": ("dp=2", Options(microbatches=2)),
        "tp": ("tp=2", Options()),
        "both": ("dp=2,tp=2", Options(microbatches=2)),
        "zero": ("dp=2,tp=2", Options(zero=3, sequence_parallel=True)),
    }
    return {n: Subject(Mesh.parse(m), o, model, gm, expected) for n, (m, o) in options.items()}


# --- what stops a fault -------------------------------------------------------------------------------------


def stopped_by(run: Callable[[], float]) -> tuple[str, float]:
    """(what stops a fault, the error it makes if it runs). ``run`` compiles, runs, and returns the error."""
    try:
        error = run()
    except PlacementError:
        return "types", 0.0
    except StepError:
        return "step checks", 0.0
    return ("numbers" if error > STOPPED else "nothing"), error


def in_typed_graph(subject: Subject, change: Callable[[GraphModule], None]) -> tuple[str, float]:
    """A fault in the graph that the propagation leaves."""
    assert subject.compiled
    gm, ctx = subject.seen["propagate_placements"]
    gm = copy_graph(gm)

    def run() -> float:
        check_placements(gm, ctx)
        change(gm)
        check_placements(gm, ctx)
        return 0.0

    return stopped_by(run)


def in_step_graph(subject: Subject, at: str, name: str, change: Callable[[GraphModule], None]) -> tuple[str, float]:
    """A fault behind the pass ``name`` of the step graph ``at``: 'forward', 'backward' or 'backward_reduce'."""
    compiled = subject.compiled
    gm, ctx = subject.seen[f"{at}.differentiate"]
    faulty = [_Changed(p, change) if p.name == name else p for p in STEP_PASSES]
    assert faulty != list(STEP_PASSES), name

    def run() -> float:
        step = PassManager(faulty).run(promise(copy_graph(gm)), replace(ctx, observers=[]), facts=("step",))
        stage = replace(compiled.stage, **{at: replace(getattr(compiled.stage, at), graph=step)})
        check_step_types([stage], compiled.local, ctx.mesh)
        return subject.error(replace(compiled, pipeline=replace(compiled.pipeline, parts=[stage])))

    found, error = stopped_by(run)
    return "step checks" if found == "types" else found, error  # that of storages is the same error


class _Changed:
    """A pass that makes a mistake when it is done."""

    def __init__(self, inner: Any, change: Callable[[GraphModule], None]) -> None:
        self.inner, self.change = inner, change
        self.name, self.requires, self.ensures = inner.name, inner.requires, inner.ensures
        self.ends = getattr(inner, "ends", ())

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        gm = self.inner.apply(gm, ctx)
        self.change(gm)
        gm.recompile()
        return gm


# --- edits --------------------------------------------------------------------------------------------------


def calls(gm: GraphModule, *targets: Any) -> list[Node]:
    found = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in targets]
    assert found, f"nothing to plant a fault in: no {targets}"
    return found


def skip(node: Node) -> None:
    """Everybody takes the call's operand instead of what it makes."""
    node.replace_all_uses_with(node.all_input_nodes[0])
    node.graph.erase_node(node)


def set_outputs(gm: GraphModule, change: Callable[[list[Any]], list[Any]]) -> None:
    end = output_node(gm)
    end.args = (tuple(change(list(end.args[0]))),)  # type: ignore[arg-type]
