"""Expressions of seconds and memory equal the numeric price, in sympy and in JavaScript."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import sympy

from autopar.auto.costed_model import CostedModel
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import Stack, stack_named
from autopar.cost.layout import Layout
from autopar.cost.layout_price import Price
from autopar.cost.symbolic_price import ARGUMENTS, SymbolicPrice, symbolic_price

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
    "intermediate_size": 1408, "vocab_size": 4096, "num_hidden_layers": 8,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
LENGTHS = 512, 1024, 2048
EAGER = stack_named("autopar-eager", "H100")
MEGATRON = stack_named("megatron-2021", "A100")
CASES: tuple[tuple[dict[str, Any], Layout, Stack], ...] = (
    (LLAMA, Layout(dp=8), EAGER),
    (LLAMA, Layout(dp=16, tp=2, zero=3, sequence_parallel=True, microbatches=2), EAGER),
    (LLAMA, Layout(pp=2, dp=2, tp=2, microbatches=8, zero=1, sequence_parallel=True, schedule="1f1b"), MEGATRON),
    (LLAMA, Layout(pp=2, dp=8, microbatches=8, schedule="interleaved", virtual_stages=2, zero=2), EAGER),
    (LLAMA, Layout(pp=4, tp=2, microbatches=16, schedule="zb_h1", sequence_parallel=True), EAGER),
    (LLAMA, Layout(pp=2, microbatches=8, schedule="zb_v", virtual_stages=2), EAGER),
    (LLAMA, Layout(pp=2, dp=2, zero=1, microbatches=8, layers=(3, 5), schedule="1f1b"), EAGER),
    (LLAMA, Layout(pp=2, dp=2, zero=1, microbatches=8, schedule="dual_pipe"), EAGER),
    (LLAMA, Layout(pp=4, dp=2, zero=3, microbatches=16, schedule="dual_pipe_v", virtual_stages=2), EAGER),
    (LLAMA, Layout(dp=4, cp=2, attention="ring", activation_checkpoint="full", zero=1), EAGER),
    (LLAMA, Layout(dp=2, cp=4, attention="ulysses", zero=3), EAGER),
    (MIXTRAL, Layout(dp=2, ep=2, zero=1, token_dispatcher="alltoall"), EAGER),
)  # fmt: skip


@functools.cache
def model(config: str, seq: int) -> CostedModel:
    return CostedModel.from_config(json.loads(config), seq)


def symbolic(config: dict[str, Any], layout: Layout, stack: Stack) -> SymbolicPrice:
    costs = {seq: model(json.dumps(config), seq).costs(layout.placement, layout.micro_batch) for seq in LENGTHS}
    return symbolic_price(layout, costs, Cluster.parse(stack.chip), stack)


def numeric(
    config: dict[str, Any], layout: Layout, stack: Stack, batch: int, seq: int, speeds: tuple[float, float]
) -> Price:
    """The price with other values."""
    (group,) = Cluster.parse(stack.chip).groups
    faster = replace(group, inside=group.inside * speeds[0], card=group.card * speeds[1])
    asked = replace(layout, microbatches=batch // (layout.data_size * layout.micro_batch))
    return model(json.dumps(config), seq).price(asked, Cluster(stack.chip, (faster,)), stack)


POINTS = ((1, 1024, (1.0, 1.0)), (4, 512, (0.25, 2.0)), (2, 1536, (3.0, 0.1)), (3, 2048, (1.0, 4.0)))


@pytest.mark.parametrize(("config", "layout", "stack"), CASES, ids=lambda value: str(getattr(value, "mesh", "")))
def test_the_expressions_equal_the_price(config: dict[str, Any], layout: Layout, stack: Stack) -> None:
    found = symbolic(config, layout, stack)
    evaluate = sympy.lambdify(ARGUMENTS, [found.seconds, found.flops, *found.memory], "math")
    for times, seq, speeds in POINTS:
        batch = layout.batch * times
        seconds, flops, *memory = evaluate(batch, seq, *speeds)
        price = numeric(config, layout, stack, batch, seq, speeds)
        assert seconds == pytest.approx(price.seconds, rel=1e-9), (times, seq, speeds)
        assert flops == pytest.approx(price.flops, rel=1e-9)
        assert memory == pytest.approx(price.memory, rel=2e-3)  # a loss computes with blocks of rows


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_javascript_equals_the_price() -> None:
    config, layout, stack = CASES[2]
    found = symbolic(config, layout, stack)
    points = [[layout.batch * times, seq, *speeds] for times, seq, speeds in POINTS]
    script = f"const f={found.javascript()};console.log(JSON.stringify({json.dumps(points)}.map(x=>f(...x))))"
    said = json.loads(subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout)
    for (times, seq, speeds), (seconds, mfu, *memory) in zip(POINTS, said, strict=True):
        price = numeric(config, layout, stack, layout.batch * times, seq, speeds)
        assert (seconds, mfu) == pytest.approx((price.seconds, price.mfu), rel=1e-9)
        assert memory == pytest.approx(price.memory, rel=2e-3)  # a loss computes with blocks of rows


def test_costs_that_have_no_expressions() -> None:
    costs = {seq: model(json.dumps(LLAMA), seq).costs(Layout(dp=8).placement) for seq in LENGTHS}
    other = model(json.dumps(MIXTRAL), LENGTHS[0]).costs(Layout(dp=8).placement)
    for found, said in (({512: costs[512]}, "needs costs at 3"), (costs | {512: other}, "needs the same products")):
        with pytest.raises(ValueError, match=said):
            symbolic_price(Layout(dp=8), found, Cluster.parse("H100"), EAGER)
