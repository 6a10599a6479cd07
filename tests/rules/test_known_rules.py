"""Rules that are known from calls before are those that would be made anew, for whole models on meshes of all axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from autopar import rules
from autopar.adapters.keys import told_apart
from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.ir.placement import INVARIANT, Pieces, Placement, Shard
from autopar.options import Options
from autopar.rules import RULES, Rule, RuleError, apply, known_rules
from autopar.rules.call import Call, RuleFunction
from autopar.testing.soundness import call, sample_graph
from tests.support.subjects import tiny

CELLS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "llama": ({"dp": 2, "cp": 2, "tp": 2}, {"sequence_parallel": True, "microbatches": 2, "zero": 3}),
    "gemma3": ({"dp": 2, "tp": 2}, {"zero": 3}),
    "t5": ({"dp": 2, "tp": 2}, {"microbatches": 2}),
    "mixtral": ({"dp": 2, "tp": 2, "pp": 2}, {"microbatches": 2}),
    "deepseek_v3": ({"dp": 2, "cp": 2, "ep": 2}, {}),
    "vit": ({"dp": 2, "tp": 2}, {}),
}


ALIKE = ("llama", "t5", "vit")  # all layers, and no stages


class Reads(dict[str, Any]):
    """Facts of a node that notice who asks for them."""

    def __init__(self, facts: dict[str, Any], names: set[str]) -> None:
        super().__init__(facts)
        self.names = names

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)


@contextmanager
def only_the_key_is_read(asked: Call) -> Iterator[None]:
    """A builder reads no fact that is not in the key: not beside shapes and what it sees, which the call gives."""
    nodes = [asked.node, *asked.operands]
    before, names, shape_of = [node.meta for node in nodes], set[str](), asked.shape_of
    shapes = {x: shape_of(x) for x in asked.operands}
    asked.shape_of = shapes.__getitem__
    for node in nodes:
        node.meta = Reads(node.meta, names)
    try:
        yield
    finally:
        asked.shape_of = shape_of
        for node, meta in zip(nodes, before, strict=True):
            node.meta = meta
    assert names <= {"val", "has_gradient", "conversion", "dealt", "global_groups", "experts"}


OFTEN = ("llama", "mixtral", "deepseek_v3")


def test_these_have_all_axes() -> None:
    assert {axis for name in OFTEN for axis in CELLS[name][0]} == {"dp", "cp", "tp", "pp", "ep"}


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.full) for n in CELLS])
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hits = {"rule": 0, "results": 0}
    known_rule, known_results = known_rules.known_rule, known_rules.known_results

    def rule(build: RuleFunction, asked: Call) -> Rule:
        found = known_rule(build, asked)
        seen = asked.seen
        with only_the_key_is_read(asked):
            anew = Call(asked.node, asked.shape_of, asked.result_shapes, axis=asked.axis, relaxed=asked.relaxed)
            anew.__dict__["seen"] = seen
            fresh = build(anew)
        assert found == fresh and type(found) is type(fresh)
        hits["rule"] += 1
        return found

    def results(rule: Rule, operands: Sequence[Placement], gradients: Sequence[bool], ranks: Pieces) -> list[Placement]:
        found = known_results(rule, operands, gradients, ranks)
        assert found == apply(rule, operands, gradients, ranks)
        hits["results"] += 1
        return found

    monkeypatch.setattr(rules, "known_rule", rule)
    monkeypatch.setattr(rules, "known_results", results)
    mesh, options = CELLS[name]
    model, batch = tiny(name, layers=1 if name in ALIKE else 0)
    compile_model(model, batch, Mesh.of(**mesh), Options(**options))
    assert hits["rule"] > 200 and hits["results"] > 200


def test_what_a_key_tells_apart() -> None:
    """Calls that differ in one thing only have rules of their own."""
    aten = torch.ops.aten
    x, y = torch.rand(4, 6), torch.rand(4, 6)
    calls = [
        call(aten.sum.dim_IntList, x, [0], False),
        call(aten.sum.dim_IntList, x, [0], True),
        call(aten.sum.dim_IntList, x, [1], False),
        call(aten.mul.Tensor, x, y),
        call(aten.mul.Tensor, x, x),
        call(aten.to.dtype, x, torch.float64),
        call(aten.to.dtype, x, torch.int64),
    ]
    known_rules._rules.clear()
    for step in calls:
        node = [n for n in sample_graph(step).graph.nodes if n.op == "call_function"][-1]
        rules.rule_of(node, "dp", Mesh.of(dp=2))
        rules.rule_of(node, "tp", Mesh.of(tp=2))
        rules.rule_of(node, "tp", Mesh.of(tp=2), relaxed=True)
    assert len(known_rules._rules) == 3 * len(calls)


def test_refusals_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is raised each time, and a rule that a user replaces counts at once."""
    graph = sample_graph(call(torch.ops.aten.linear.default, torch.rand(4, 6), torch.rand(8, 6)))
    node = [n for n in graph.graph.nodes if n.op == "call_function"][-1]
    mesh = Mesh.of(tp=2)
    rule = rules.rule_of(node, "tp", mesh)
    for _ in range(2):
        with pytest.raises(RuleError):
            known_rules.known_results(rule, [Shard(1), INVARIANT], [True, True], 2)
    monkeypatch.setitem(RULES, node.target, lambda asked: asked.rule([None, None], [((), ())]))
    assert rules.rule_of(node, "tp", mesh).operands == (None, None)


def test_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_rules, "_MOST", 2)
    memo = {1: 1, 2: 2}
    known_rules._make_room(memo)
    assert not memo


def test_numbers_are_told_apart() -> None:
    """In keys of rules, of equal parts and of layers."""
    values = [0, 0.0, -0.0, False, 1, 1.0, True, "1", 0j, -0j, None]
    assert len({told_apart(x) for x in values}) == len(values)
    assert told_apart(float("nan")) == told_apart(float("nan"))
