"""Splitting a graph into stages: the text before and after, what is sent, what is recomputed, F, B and W, G and R."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.report.graph_text import format_graph
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import Compiled, StepGraph
from tests.pipeline.test_pipeline_plain import Frozen, Losses, Skip, Stack, Tied, batch


def compiled(model: nn.Module, mesh: Mesh, **options: Any) -> tuple[Compiled, dict[str, str]]:
    """The compiled model, and the text of every level without its comments."""
    seen: dict[str, str] = {}

    def watch(name: str, gm: GraphModule, ctx: Compilation) -> None:
        lines = format_graph(gm, ctx.mesh).splitlines()
        seen[name] = "\n".join(" ".join(line.partition("  # ")[0].split()) for line in lines if line)

    chosen = Options(**{"schedule": "zb_h1", "microbatches": 2, **options})
    return compile_model(model, batch(), mesh, chosen, outputs=(), observers=[watch]), seen


def targets(step: StepGraph | None) -> list[str]:
    assert step is not None
    calls = [str(n.target).split(".") for n in step.graph.graph.nodes if n.op == "call_function"]
    return [name[-2] for name in calls if len(name) > 1]


def test_text_before_and_after() -> None:
    _, seen = compiled(Tied(), Mesh.of(pp=2, dp=2), zero=3, split_points=("blocks.1",))
    before = seen["lower_to_local"]
    assert "p_blocks_0_weight_r: f64[8,8] dp:R mb:R = exchange(p_blocks_0_weight_r_1, dp, S(0) -> R)" in before
    assert seen["part0.part"].splitlines() == [
        "x: f64[2,8] dp:S(0) mb:S(0) = input",
        "p_extra_bias_r: f64[8] dp:R mb:R = input",
        "p_blocks_0_weight_r: f64[8,8] dp:R mb:R = input",
        "p_blocks_0_bias_r: f64[8] dp:R mb:R = input",
        "linear: f64[2,8] dp:S(0) mb:S(0) = linear(x, p_blocks_0_weight_r, p_blocks_0_bias_r)",
        "tanh: f64[2,8] dp:S(0) mb:S(0) = tanh(linear)",
        "sigmoid: f64[8] dp:R mb:R = sigmoid(p_extra_bias_r)",
        "mul: f64[2,8] dp:S(0) mb:S(0) = mul(tanh, sigmoid)",
        "return (mul,)",
    ]
    assert "sigmoid: f64[8] dp:R mb:R = sigmoid(p_extra_bias_r)" in seen["part1.part"]  # recomputed, not sent


def test_gathers_and_reductions_leave_the_parts() -> None:
    made, _ = compiled(Tied(), Mesh.of(pp=2, dp=2), zero=1, split_points=("blocks.1",))
    first = made.pipeline.parts[0]
    assert targets(first.gather)[:1] == ["all_gather"] and targets(first.reduce).count("reduce_scatter") == 1
    for step in (first.forward, first.backward, first.backward_input, first.backward_weight):
        assert not {"all_gather", "reduce_scatter", "all_reduce"} & set(targets(step))
    assert first.aliases == {"p_extra_bias_r": "p_extra_bias", "p_blocks_0_bias_r": "p_blocks_0_bias"}


def test_gathers_and_reductions_stay_inside() -> None:
    made, _ = compiled(Tied(), Mesh.of(pp=2, dp=2), zero=3, split_points=("blocks.1",))
    last = made.pipeline.parts[1]
    assert "reduce_scatter" in targets(last.backward)
    assert last.reduce is None or "reduce_scatter" not in targets(last.reduce), "what nothing cuts is summed at the end"
    sums = [
        targets(step).count("reduce_scatter") for step in (last.backward, last.backward_input, last.backward_weight)
    ]
    assert sums[0] == sums[1] + sums[2], "B and W sum the gradients that each makes"
    assert last.gather is None and "all_gather" in targets(last.forward) and "all_gather" in targets(last.backward)
    assert "p_blocks_0_weight" in last.forward.inputs and "p_blocks_0_weight_r" not in last.forward.inputs


def test_values_go_from_user_to_user() -> None:
    """The second and the last of four parts use the first one's result; the third does not handle it."""
    made, _ = compiled(Skip(), Mesh.of(pp=4), split_points=("blocks.1", "blocks.2", "blocks.3"))
    ways = [(h.source, h.target, h.gradient) for h in made.pipeline.edges]
    assert ways == [(0, 1, True), (1, 3, True), (0, 1, False), (1, 2, True), (2, 3, True)]


@pytest.mark.parametrize("make", [Stack, Skip, Tied, Losses])
def test_b_and_w_are_the_whole_backward(make: type[nn.Module]) -> None:
    """Together they make what BW makes, with as many products; W has all that makes one parameter's gradient alone."""
    made, _ = compiled(make(), Mesh.of(pp=4))
    for part in made.pipeline.parts:
        if part.backward is None:
            continue
        assert part.backward_input is not None and part.backward_weight is not None
        both = [*part.backward_input.outputs, *part.backward_weight.outputs]
        gradients = [n for n in both if n and n.startswith("grad:")]
        assert sorted(gradients) == sorted(n for n in part.backward.outputs if n)
        products = [targets(g).count("mm") for g in (part.backward, part.backward_input, part.backward_weight)]
        assert products[0] == products[1] + products[2]
        stash = {n for n in part.backward_input.outputs if n and n.startswith("stash:")}
        assert stash == {n for n in part.backward_weight.inputs if n.startswith("stash:")}


def test_the_first_part_has_a_backward_to_inputs() -> None:
    """Nothing is sent back from it, yet its B must not be empty: the products between its layers belong to it."""
    made, _ = compiled(Stack(), Mesh.of(pp=2), split_points=("blocks.3",))
    first = made.pipeline.parts[0]
    assert targets(first.backward_input).count("mm") == 2 and targets(first.backward_weight).count("addmm") == 3


def test_a_part_without_anything_to_train_has_no_backward() -> None:
    made, _ = compiled(Frozen(), Mesh.of(pp=4), split_points=("blocks.1", "blocks.2", "blocks.3"))
    assert made.pipeline.parts[0].backward is None
    assert [h.gradient for h in made.pipeline.edges] == [False, True, True]
    ranks = {p.name: p.ranks for p in made.parameters}
    assert ranks["extra.weight"] == (0,) and ranks["blocks.2.weight"] == (2,)  # one that nobody uses lives on rank 0


def test_a_tied_weight_lives_where_it_is_used() -> None:
    made, _ = compiled(Tied(), Mesh.of(pp=2), split_points=("blocks.1",))
    ranks = {p.name: p.ranks for p in made.parameters}
    assert ranks["blocks.0.weight"] == (0, 1) and ranks["extra.bias"] == (0, 1) and ranks["blocks.1.weight"] == (1,)


def test_encoder_and_decoder() -> None:
    """T5: encoder states go from one decoder stage to the next, biases are recomputed, masks are in the prologue."""
    model, data = TINY["t5"].build(dtype=torch.float64), TINY["t5"].batch(4, 16)
    cuts = ("encoder.block.1", "decoder.block.0", "decoder.block.1")
    options = Options(schedule="1f1b", microbatches=2, split_points=cuts)
    made = compile_model(model, data, Mesh.of(pp=4), options, lift_to_float64=True, outputs=())
    pipeline = made.pipeline
    assert pipeline is not None and pipeline.once is not None and pipeline.each is not None
    ways: dict[str, list[tuple[int, int]]] = {}
    for h in pipeline.edges:
        ways.setdefault(h.value, []).append((h.source, h.target))
    assert [(1, 2), (2, 3)] in ways.values() and all(h.shapes == ((2, 16, 32),) for h in pipeline.edges)
    holders = {p.name: p.ranks for p in made.parameters}
    assert all(len(r) > 1 for name, r in holders.items() if "relative_attention_bias" in name and "encoder" in name)
