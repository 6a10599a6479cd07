"""The types catch a missing conversion, whichever it is, before anything runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from autopar.adapters.copying.fake import new_mode
from autopar.compile.model import compile_model
from autopar.ir.conversions import is_conversion
from autopar.ir.graph import output_node, set_placement
from autopar.ir.mesh import Mesh
from autopar.ir.placement import INVARIANT, PARTIAL
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.passes.pipelines import STEP_PASSES
from autopar.passes.step.bucket_gathers import BucketGathers
from autopar.rewrite import checks
from autopar.rewrite.checks import (
    PlacementError,
    check_functional,
    check_placements,
    check_plain,
    check_types,
)
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import PassManager
from autopar.rewrite.step_checks import StepError, promise
from tests.support.subjects import tiny

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("tp=2", {}),
    "sp": ("tp=2", {"sequence_parallel": True}),
    "ddp": ("dp=2", {}),
    "zero3": ("dp=2", {"zero": 3}),
    "all": ("dp=2,tp=2", {"zero": 3, "sequence_parallel": True, "microbatches": 2}),
}


def typed(name: str, mesh: str, options: dict[str, Any]) -> tuple[GraphModule, Compilation]:
    """The typed global graph of a tiny model, as the placement pass leaves it."""
    seen: list[tuple[GraphModule, Compilation]] = []

    class Stop(Exception):
        pass

    def stop(at: str, gm: GraphModule, ctx: Compilation) -> None:
        if at == "propagate_placements":
            seen.append((gm, ctx))
            raise Stop

    model, batch = tiny(name, layers=1)[0], TINY[name].batch(4, 8)
    with pytest.raises(Stop):
        compile_model(model, batch, Mesh.parse(mesh), Options(**options), observers=[stop], outputs=())
    return seen[0]


MODELS = ("llama", "gpt2", "t5")
FEW = {("llama", "tp"), ("llama", "all"), ("gpt2", "sp"), ("gpt2", "zero3"), ("t5", "ddp"), ("t5", "all")}


def test_few_have_each_model_and_each_mode() -> None:
    assert {name for name, _ in FEW} == {*MODELS} and {mode for _, mode in FEW} == {*MODES}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in FEW else pytest.mark.full)
        for name in MODELS
        for mode in MODES
    ],
)
def test_every_missing_conversion_is_a_type_error(name: str, mode: str) -> None:
    gm, ctx = typed(name, *MODES[mode])
    check_placements(gm, ctx)
    conversions = [n for n in gm.graph.nodes if is_conversion(n)]
    assert conversions
    for node in conversions:
        users = list(node.users)
        for user in users:
            user.replace_input_with(node, node.args[0])
        with pytest.raises(PlacementError):  # checks are local: only those of the users can change
            check_types(gm, ctx, [u for u in users if u.op == "call_function"])
            check_placements(gm, ctx)
        for user in users:
            user.replace_input_with(node.args[0], node)
        assert set(node.users) == set(users)


def test_unreduced_norm_weight_names_the_place() -> None:
    """The classic silent bug of data parallelism: a small gradient that nobody sums."""
    gm, ctx = typed("llama", "dp=2", {})
    node = next(n for n in gm.graph.nodes if is_conversion(n) and "norm" in str(n.args[0]))
    node.replace_all_uses_with(node.args[0])
    with pytest.raises(PlacementError, match=r"axis 'dp': aten\.mul\.Tensor .* in model\.layers\.0\.input_layernorm"):
        check_placements(gm, ctx)


def test_wrong_mark_is_caught() -> None:
    gm, ctx = typed("llama", "tp=2", {})
    node = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.linear.default)
    set_placement(node, "tp", PARTIAL)
    with pytest.raises(PlacementError, match=r"is marked P, but its operands imply S\(2\)"):
        check_types(gm, ctx, [node])


def test_only_what_has_changed_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments, and everything noted on a node or on what it takes that a check reads."""
    gm, ctx = typed("llama", "dp=2,tp=2", {})
    asked: list[Node] = []
    monkeypatch.setattr(checks, "_check_call", lambda node, axis, ctx: asked.append(node))
    check_placements(gm, ctx)
    assert not asked
    node = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.linear.default)
    concerned = {node, *(user for user in node.users if user.op == "call_function")}
    for key in ("val", "placements", "result_placements", "global_shape", "has_gradient", "conversion", "dealt"):
        node.meta[key] = copy.copy(node.meta[key]) if key == "placements" else object()
        check_placements(gm, ctx)
        assert set(asked) == concerned, key
        asked.clear()
    node.args = (*node.args,)
    check_placements(gm, ctx)
    assert set(asked) == {node} and len(asked) == len(ctx.mesh.cut_order)


def test_parameter_must_be_as_planned() -> None:
    gm, ctx = typed("llama", "dp=2", {"zero": 3})
    node = next(n for n in gm.graph.nodes if n.name.endswith("q_proj_weight"))
    set_placement(node, "dp", INVARIANT)
    for user in list(node.users):
        user.meta["conversion"] = ("dp", INVARIANT, user.meta["placements"]["dp"])
    with pytest.raises(
        PlacementError, match=r"parameter model\.layers\.0\.self_attn\.q_proj\.weight is I, planned otherwise"
    ):
        check_placements(gm, ctx)


def test_loss_must_be_invariant() -> None:
    gm, ctx = typed("llama", "dp=2", {})
    last = output_node(gm).args[0][0]  # type: ignore[index]
    output_node(gm).args = ((last.args[0],),)  # type: ignore[union-attr]
    with pytest.raises(PlacementError, match="a loss must be I"):
        check_placements(gm, ctx)


def test_in_place_operator_is_refused() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.add_.Tensor, (x, x)),))
    with pytest.raises(PlacementError, match=r"aten\.add_\.Tensor .* writes in place"):
        check_functional(GraphModule({}, graph), Compilation(Mesh.of()))


# --- step graphs ------------------------------------------------------------------------------------------------------


def two_gathers() -> GraphModule:
    """Two parameters of one layer, the second gathered behind the use of the first; a detach before a use."""
    graph, mode = torch.fx.Graph(), new_mode()
    with mode:
        piece, whole = torch.empty(2, 4), torch.empty(4, 4)
    nodes = [graph.placeholder(name) for name in ("p", "q")]
    gather, layer = torch.ops.autopar.all_gather.default, {"layers.0": ("layers.0", torch.nn.Linear)}
    p = graph.call_function(gather, (nodes[0], 0, [], "dp", 2))
    used = graph.call_function(torch.ops.aten.relu.default, (graph.call_function(torch.ops.aten.detach.default, (p,)),))
    q = graph.call_function(gather, (nodes[1], 0, [], "dp", 2))
    graph.output((graph.call_function(torch.ops.aten.mm.default, (used, q)),))
    for node in graph.nodes:
        if node.op != "output":
            node.meta |= {"val": piece if node in nodes else whole, "nn_module_stack": layer}
    return promise(GraphModule({}, graph))


def test_passes_over_step_graphs_build_on_each_other() -> None:
    with pytest.raises(AssertionError, match=r"bucket_gathers requires .'step'., which no earlier pass"):
        PassManager([BucketGathers()]).run(two_gathers(), Compilation(Mesh.of(dp=2)))


def test_facts_of_step_graphs_are_made() -> None:
    ctx = Compilation(Mesh.of(dp=2))
    with pytest.raises(StepError, match=r"aten.detach.default .* stands between a value and its users"):
        check_plain(two_gathers(), ctx)
    check_plain(PassManager(STEP_PASSES[:3]).run(two_gathers(), ctx, facts=("step",)), ctx)
