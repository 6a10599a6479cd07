"""Estimates of steps that serve: the packed graph with the sizes of a step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.cli.serving_plan import parameter_plan
from autopar.cost.serving_step import serving_step, with_sizes
from autopar.cost.traffic import communication
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.serve_model import generation_facts, packed_model
from autopar.steps.packed import Packed
from tests.cli.test_cli import LLAMA


@functools.cache
def packed(mesh: str) -> Packed:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA)).to(torch.bfloat16)
    chosen = Mesh.parse(mesh).planned()
    plan = parameter_plan(model, chosen, Options())
    return packed_model(model.eval().requires_grad_(False), generation_facts(model, None), chosen, plan, 256)


def shapes(gm: Any) -> dict[str, Any]:
    def of(val: Any) -> Any:
        return [*map(of, val)] if isinstance(val, (tuple, list)) else getattr(val, "shape", val)

    return {n.name: of(n.meta["val"]) for n in gm.graph.nodes if n.op != "output"}


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_sizes_of_the_graph_that_was_made_are_those_it_has(mesh: str) -> None:
    """It was made for 5 tokens and 4 rows of logits."""
    made = packed(mesh)
    for stage in made.stages:
        before = shapes(stage.graph.graph)
        found = shapes(with_sizes(made, stage, before["slice_length"], before["slice_start"]))
        assert found == before == shapes(stage.graph.graph)


def test_sizes_follow_tokens_and_rows() -> None:
    made = packed("tp=2")
    (stage,) = made.stages
    gm = with_sizes(made, stage, 17, 3)
    (logits,) = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    assert tuple(logits.meta["val"].shape) == (1, 3, 32)  # half of the vocabulary
    sent = communication(gm, made.plan.mesh)["tp", "all_reduce"]
    rows = [17, 17, 17, 17, 3]  # of the embedding and two layers; behind the last attention only the chosen ones
    assert sent.calls == 5 and sent.bytes in (sum(rows[:4]) * 64 + 3 * 64, sum(rows[:3]) * 64 + 2 * 3 * 64)


def test_time_grows_with_tokens_keys_and_stages() -> None:
    one, many = (serving_step(packed("tp=2"), [(1, 128)] * n) for n in (1, 64))
    longer = serving_step(packed("tp=2"), [(1, 10**6)] * 64)  # shorter ones take as long as the host launches kernels
    assert one.seconds <= many.seconds < longer.seconds and one.peak < many.peak == longer.peak
    assert one.period == one.seconds and 0 < one.exposed < one.seconds
    stages = serving_step(packed("pp=2"), [(1, 128)])
    assert stages.seconds / 2 <= stages.period < stages.seconds and stages.exposed > 0
