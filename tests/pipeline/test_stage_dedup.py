"""Parts that are copies of an equal one are what compiling each of them makes, but for names that compiling invents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autopar.capture.front_end import capture
from autopar.compile import stage_dedup
from autopar.compile.model import compile_graph, compile_model
from autopar.compile.stage_dedup import KnownStages
from autopar.ir.graph import copy_graph
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.report.progress import Progress
from autopar.runtime.exec.step_fingerprint import step_digests
from autopar.steps.graphs import Compiled, Stage, StepGraph, is_a
from autopar.steps.of_rank import graphs_of_all
from tests.capture.test_decompose import text
from tests.support.subjects import tiny

SPLIT = {"microbatches": 8, "schedule": "zb_h1", "sequence_parallel": True}
AT_EACH_USE = {"microbatches": 4, "zero": 3, "reshard_after_forward": True}
# (model, mesh, options, how many of the parts are copies)
ONE_BY_ONE: dict[str, tuple[str, dict[str, int], dict[str, Any], int]] = {
    "plain": ("llama", {"pp": 4}, {"microbatches": 4}, 1),
    "virtual_stages": ("llama", {"pp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 3}, 3),
    "split": ("llama", {"pp": 4, "tp": 2}, SPLIT, 1),
    "sharded weights": ("llama", {"pp": 4, "dp": 2}, {"microbatches": 4, "zero": 2}, 1),
    "at each use": ("llama", {"pp": 4, "dp": 2}, AT_EACH_USE, 1),
    "sequences": ("llama", {"pp": 4, "cp": 2}, {"microbatches": 4}, 1),
    "experts": ("mixtral", {"pp": 4}, {"microbatches": 4}, 1),
    "an encoder": ("bert", {"pp": 4}, {"microbatches": 4}, 1),
    "dropout, whose sites differ": ("gpt2", {"pp": 4}, {"microbatches": 4, "dropout": 0.1}, 0),
}
TOGETHER = {
    "an encoder, split": ("bert", {"pp": 4, "tp": 2}, SPLIT, 1),
    "sharded weights, sequences": ("llama", {"pp": 4, "dp": 2, "cp": 2}, {"microbatches": 4, "zero": 2}, 1),
    "experts, at each use": ("mixtral", {"pp": 4, "dp": 2}, AT_EACH_USE, 1),
}
FOUR_CHUNKS = ("llama", {"pp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 4}, 5)
CELLS = ONE_BY_ONE | TOGETHER | {"four chunks": FOUR_CHUNKS}


def twice(cell: str, layers: int) -> Iterator[Compiled]:
    """One capture, compiled when it is asked for."""
    name, mesh, options, _ = CELLS[cell]
    options = dict(options)
    captured = capture(*tiny(name, layers=layers, dropout=options.pop("dropout", 0.0)))
    for _ in range(2):
        yield compile_graph(copy_graph(captured), Mesh.of(**mesh), Options(**options))


LAYERS = {"virtual_stages": 6, "an encoder, split": 8}  # one in each part, and two; the others have four, one in each
FEW = ("virtual_stages", "dropout, whose sites differ", *TOGETHER)


@pytest.mark.full
@pytest.mark.parametrize(
    ("cell", "layers"),
    [*((cell, n) for cell in ONE_BY_ONE if cell != "virtual_stages" for n in (4, 8)), ("four chunks", 8)],
)
def test_copies_one_by_one(cell: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    test_copies(cell, monkeypatch, layers)


def test_few_have_all_that_is_tried_one_by_one() -> None:
    chosen = [CELLS[cell] for cell in FEW]
    for name, mesh, options, _ in ONE_BY_ONE.values():
        assert name in {of[0] for of in chosen} and mesh.keys() <= {axis for of in chosen for axis in of[1]}
        assert options.items() <= {item for of in chosen for item in of[2].items()}


@pytest.mark.parametrize("cell", FEW)
def test_copies(cell: str, monkeypatch: pytest.MonkeyPatch, layers: int = 0) -> None:
    layers = layers or LAYERS.get(cell, 4)
    copied: list[Stage] = []
    copy = stage_dedup._copied

    def noted(*args: Any) -> Stage:
        copied.append(copy(*args))
        return copied[-1]

    monkeypatch.setattr(stage_dedup, "_copied", noted)
    compiled = twice(cell, layers)
    found = next(compiled)
    assert len(copied) == CELLS[cell][-1]
    monkeypatch.setattr(KnownStages, "stage", lambda self, part, make, how: make())
    each = next(compiled)
    made = [step for part in copied for step in steps_of(part)]
    assert not any("graph" in vars(step) for step in made), "a copy is made by who asks for it"
    assert all(step.unnamed in graphs_of_all(found.pipeline, None) and step.unnamed is not step.graph for step in made)
    for mine, other in zip(found.pipeline.parts, each.pipeline.parts, strict=True):
        Compared().parts(mine, other)
    assert found.pipeline.order == each.pipeline.order and found.pipeline.edges == each.pipeline.edges


def steps_of(part: Stage) -> list[StepGraph]:
    """Its step graphs."""
    return [step for item in fields(Stage) if isinstance(step := getattr(part, item.name), StepGraph)]


class Compared:
    """Two stages, up to names of what is kept for a backward: those may differ, one for one."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def parts(self, mine: Stage, other: Stage) -> None:
        for item in fields(Stage):
            a, b = getattr(mine, item.name), getattr(other, item.name)
            if isinstance(a, StepGraph):
                self.steps(a, b)
            elif item.name == "roots":
                assert {self.names.get(x, x): y for x, y in a.items()} == b
            else:
                assert a == b, item.name
        assert len({*self.names.values()}) == len(self.names)

    def steps(self, mine: StepGraph, other: StepGraph) -> None:
        for a, b in zip(mine.graph.graph.nodes, other.graph.graph.nodes, strict=True):
            paths = [[path for path, _ in x.meta.get("nn_module_stack", {}).values()] for x in (a, b)]
            assert paths[0] == paths[1]
            assert a.meta.get("placements") == b.meta.get("placements")
        for x, y in zip([*mine.inputs, *mine.outputs], [*other.inputs, *other.outputs], strict=True):
            if is_a(x, "saved", "stash") and is_a(y, "saved", "stash"):
                assert x.partition(":")[0] == y.partition(":")[0] and self.names.setdefault(x, y) == y
            else:
                assert x == y
        numbered = [[line.partition(" = ")[2] for line in text(_unnamed(x.graph))] for x in (mine, other)]
        assert numbered[0] == numbered[1]


def _unnamed(gm: GraphModule) -> GraphModule:
    """With inputs named by their place."""
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        node.name = f"input_{i}"
    return gm


def test_what_tells_parts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number, a dtype, a frozen weight in one layer: its part is compiled."""

    class Layer(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor, self.linear = factor, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu() * self.factor  # type: ignore[no-any-return]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(3.0 if i == 3 else 2.0) for i in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    calls: list[str] = []
    copy = stage_dedup._copied

    def noted(stage: Stage, part: Any, names: Any) -> Stage:
        calls.append(part.parameters[0])
        return copy(stage, part, names)

    monkeypatch.setattr(stage_dedup, "_copied", noted)
    model = Model()
    model.layers[5].linear.weight.requires_grad_(False)
    cuts = [f"layers.{i}" for i in range(1, 8)]
    options = Options(microbatches=8, schedule="1f1b", split_points=cuts)
    compile_model(model, {"x": torch.rand(8, 4)}, Mesh.of(pp=8), options)
    assert [name.split(".")[1] for name in calls] == ["2", "4", "6"]


def test_who_watches_changes_nothing_and_sees_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank shows progress, and may write what it compiles: its step has to be that of the others. Of four
    parts one has another length, and one is a copy where nobody watches."""
    copied: list[Stage] = []
    copy = stage_dedup._copied
    monkeypatch.setattr(stage_dedup, "_copied", lambda *args: copied.append(copy(*args)) or copied[-1])
    captured, seen = capture(*tiny("llama", layers=6)), list[str]()
    options = Options(microbatches=2, schedule="interleaved")

    def facts(*observers: Any) -> dict[str, Any]:
        return step_digests(compile_graph(copy_graph(captured), Mesh.of(pp=2), options, observers=observers))

    plain = facts()
    assert copied
    for watch in (Progress("compiling"), lambda at, gm, ctx: seen.append(at)):
        watched = facts(watch)
        assert [name for name in plain if plain[name] != watched[name]] == []
    assert {f"part{i}.forward" for i in range(4)} <= set(seen)
