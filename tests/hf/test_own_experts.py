"""Experts of transformers that its registry does not have: dispatched, equal to one process, cut where they can be."""

from __future__ import annotations

import importlib
import itertools
import operator
from typing import Any

import pytest
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersDenseActDense,
    SwitchTransformersExperts,
)

from autopar.capture.front_end import capture
from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.models.hf_experts import CODE, method_digest
from autopar.options import Options
from autopar.steps.graphs import Compiled
from autopar.testing.harness import check_model
from tests.hf.own_experts import own
from tests.support.capture_cache import captured_once
from tests.support.cases import Cell, called, check, compiled

ALLTOALL_DEDUP = Options(token_dispatcher="alltoall_dedup")
PARTS = Options(zero=3, microbatches=2, token_dispatcher="alltoall_dedup")
WHOLE = Options(sequence_parallel=True, activation_checkpoint="full")


STORED = {  # layers of experts, and the parameters of which each rank of ep stores a part
    "llama4_text": (1, 2, ".experts.gate_up_proj .experts.down_proj"),
    "dbrx": (1, 3, ".mlp.w1 .mlp.v1 .mlp.w2"),
    "jetmoe": (2, 4, ".input_linear.weight .output_linear.weight"),
    "longcat_flash": (1, 2, ".experts.gate_up_proj .experts.down_proj"),  # of the one, experts use a slice
    "switch transformers": (2, 16, ".wi.weight .wo.weight"),  # of each expert
    "nllb moe": (2, 16, ".fc1.weight .fc2.weight .fc1.bias .fc2.bias"),  # of those that are asked, two of four
}
MESHES = [
    ("dp=2", Options()),
    ("tp=2", Options()),
    ("ep=4", Options()),
    ("ep=4", ALLTOALL_DEDUP),
    ("cp=2,ep=2", Options()),
    ("dp=2,ep=2", PARTS),
    ("ep=2,tp=2", WHOLE),
]
ON_RANKS = ("jetmoe", "switch transformers")
SOME = [
    *((kind, "ep=2", Options() if i % 2 else ALLTOALL_DEDUP) for i, kind in enumerate(STORED) if kind not in ON_RANKS),
    ("dbrx", "ep=2,tp=2", WHOLE),
    ("jetmoe", "dp=2,ep=2", PARTS),
    ("switch transformers", "dp=2,ep=2", PARTS),
]
ALL = [
    pytest.param(kind, mesh, options, marks=pytest.mark.full)
    for kind, (mesh, options) in itertools.product(STORED, MESHES)
    if kind != "nllb moe" or mesh != "ep=4"  # it asks two of its experts
]


@pytest.mark.parametrize(("kind", "mesh", "options"), [*SOME, *ALL])
def test_equals_one_process(kind: str, mesh: str, options: Options) -> None:
    result = check_model(*own(kind), Mesh.parse(mesh), options)
    assert result.worst < 1e-10
    if "ep" in mesh and options.zero == 0:
        check_cut(kind, result.compiled)


def check_cut(kind: str, made: Compiled) -> None:
    """What is stored in parts is cut, and nothing else."""
    _, count, stored = STORED[kind]
    cut = [p.name for p in made.parameters if isinstance(p.placements.get("ep"), Shard)]
    assert len(cut) == count and all(name.endswith(tuple(stored.split())) for name in cut)


@pytest.mark.parametrize("kind", STORED)
def test_every_layer_is_dispatched(kind: str) -> None:
    model, batch = own(kind)
    names = [str(node.target) for node in captured_once(model, batch, lift_to_float64=True).graph.nodes]
    twice = 2 if kind == "jetmoe" else 1  # queries of attention, and what is made of its results
    layers = STORED[kind][0]
    assert names.count("autopar.moe_dispatch.default") == (layers + layers // 2 if twice == 2 else layers)


@pytest.mark.parametrize("cell", [Cell(kind, Mesh.of(ep=2), ALLTOALL_DEDUP) for kind in ON_RANKS], ids=str)
def test_on_real_ranks(cell: Cell) -> None:
    check(called(cell))
    check_cut(cell.name, compiled(cell))


def test_code_is_that_of_the_release_that_is_installed() -> None:
    """Where this fails, read what transformers changed, change the forward here, and note the new digests."""
    found = {}
    for name in CODE:
        kind, _, method = name.partition(".")
        home = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        found[name] = method_digest(operator.attrgetter(method)(home))
    assert found == CODE


def test_a_release_that_computes_something_else_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = own("llama4_text")

    def forward(self: Any, x: Tensor) -> Any:
        x = x.reshape(-1, self.hidden_dim)
        _, logits = self.router(x)
        return self.shared_expert(x), logits

    monkeypatch.setattr(Llama4TextMoe, "forward", forward)
    names = [str(node.target) for node in capture(model, batch, lift_to_float64=True).graph.nodes]
    assert "autopar.moe_dispatch.default" not in names


def test_experts_that_nobody_asks_are_not_part_of_the_graph() -> None:
    """As in transformers: NLLB-MoE asks two of its four, so the others have no gradient."""
    graph = captured_once(*own("nllb moe"), lift_to_float64=True).graph
    found = [node for node in graph.nodes if "moe_dispatch" in str(node.target)]
    assert [node.args[2] for node in found] == [2, 2]


def test_what_the_forward_makes_is_said_in_the_plan() -> None:
    made = compiled(Cell("switch transformers", Mesh.of(ep=2), ALLTOALL_DEDUP))
    start = "2 weights are computed in the forward (aten.stack.default): every rank of ep stores a part"
    assert len([text for _, text in made.plan.notes if text.startswith(start)]) == 2


def test_a_capacity_of_the_whole_batch() -> None:
    """Places are counted over all microbatches, ahead of the step, for the encoder's experts before the decoder's."""
    result = check_model(*own("nllb moe"), Mesh.of(dp=2), Options(microbatches=2))
    assert result.worst < 1e-10 and len(result.compiled.pipeline.pre_pass) == 2


class _Louder(SwitchTransformersExperts):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


def _subclassed(experts: Any) -> None:
    experts.__class__ = _Louder


def _hooked(experts: Any) -> None:
    experts["expert_1"].register_forward_hook(lambda module, args, out: 2 * out)


def _replaced(experts: Any) -> None:
    experts["expert_1"].wi = nn.Sequential(experts["expert_1"].wi)


@pytest.mark.parametrize("change", [_subclassed, _hooked, _replaced])
def test_experts_that_are_not_as_they_were_written_are_not_dispatched(change: Any) -> None:
    model, batch = own("switch transformers")
    change(next(m for m in model.modules() if isinstance(m, SwitchTransformersExperts)))
    found = check_model(model, batch, Mesh.of(ep=2))
    assert found.worst < 1e-10, "the loop over the experts that any token chose is captured as it is"
    nodes = [node for node in found.compiled.stage.forward.graph.graph.nodes if "moe_dispatch" in str(node.target)]
    assert len(nodes) == 1, "that of the other layer"


def test_rows_of_experts_that_are_dropped_are_refused() -> None:
    model, batch = own("nllb moe")
    for module in model.modules():
        if hasattr(module, "moe_token_dropout"):
            module.moe_token_dropout = 0.2  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"experts: NllbMoeExperts drops rows of experts .*set moe_token_dropout to 0"):
        compile_model(model, batch, Mesh.of(ep=2), lift_to_float64=True)
    assert check_model(model.eval(), batch, Mesh.of(ep=2)).worst < 1e-10


@pytest.mark.parametrize("mesh", ["ep=2", "dp=2", "tp=2"])
def test_random_numbers_of_rows_are_refused_where_tokens_are_cut(mesh: str) -> None:
    model, batch = own("switch transformers")
    for expert in (m for m in model.modules() if isinstance(m, SwitchTransformersDenseActDense)):
        expert.dropout.p = 0.1
    if mesh == "tp=2":  # the rows are those of one process
        compile_model(model, batch, Mesh.parse(mesh), lift_to_float64=True)
        return
    with pytest.raises(
        ValueError, match=r"experts: autopar.dropout.default .* in encoder.block.1.* before they are dis"
    ):
        compile_model(model, batch, Mesh.parse(mesh), lift_to_float64=True)
