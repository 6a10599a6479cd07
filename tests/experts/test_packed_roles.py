"""What attention and experts cost, read off the graphs that serve a model: against the model's parameters, against the
closed form, and node by node against the existing cost model."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

import autopar.models.hf  # noqa: F401
from autopar.chips import CHIPS
from autopar.compile.serving import compile_packed
from autopar.cost.flops import flops, memory_bytes
from autopar.cost.packed_roles import TOKENS, check_experts, layers_of_graphs
from autopar.cost.roles import ExpertLayers, RoleCost, layers_of_sizes
from autopar.cost.serving_step import with_sizes
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.steps.packed import Packed

KEYS = 16
KINDS = ["mixtral", "deepseek_v3", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("qwen3_moe", "gpt_oss"))]


@functools.cache
def packed(kind: str, tp: int) -> Packed:
    model = TINY[kind].build().eval().requires_grad_(False)
    row = torch.empty(1, KEYS, dtype=torch.int64, device="meta")
    return compile_packed(model, {"input_ids": row}, "input_ids", Mesh.of(tp=tp), Options())


@functools.cache
def layers(kind: str) -> ExpertLayers:
    return layers_of_graphs({tp: packed(kind, tp) for tp in (1, 2)}, KEYS)


def at(cost: RoleCost, rows: float) -> Any:
    """(operations, bytes) of a layer."""
    count = np.asarray(cost.count)
    return tuple(np.array([fixed + each * rows for fixed, each in x]) @ count for x in (cost.operations, cost.bytes))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_add_up_to_the_graph(kind: str) -> None:
    """Operations and bytes of both parts of a step are those of its nodes, and weights those of the model."""
    found, tokens = layers(kind), TOKENS[1]
    graph = with_sizes(packed(kind, 1), packed(kind, 1).stages[0], tokens, tokens)
    requests = [(1, KEYS)] * tokens
    whole = [sum(count(node, requests) for node in graph.graph.nodes) for count in (flops, memory_bytes)]
    rows = found.rows_of_expert(tokens)
    apart = [
        found.layers * (a + found.num_experts * e)
        for a, e in zip(at(found.attention[1], tokens), at(found.experts[1], rows), strict=True)
    ]
    assert apart == pytest.approx(whole, rel=1e-9)
    parameters = dict(TINY[kind].build().named_parameters())
    of_experts = sum(p.numel() * p.itemsize for name, p in parameters.items() if ".experts." in name)
    assert found.experts[1].weights * found.num_experts == of_experts
    others = sum(p.numel() * p.itemsize for p in parameters.values()) - of_experts
    assert others <= found.attention[1].weights < others * 1.2  # and tables of positions


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_is_its_products_over_tp(kind: str) -> None:
    model = TINY[kind].build()
    products = {name: p for name, p in model.named_parameters() if ".experts." in name and p.dim() == 3}
    found = layers(kind)
    numbers = sum(p.numel() for p in products.values()) / found.num_experts / found.layers
    for tp, cost in found.experts.items():
        ranks = 1 if kind == "gpt_oss" else tp  # whose gates and ups alternate: tp does not shard them
        each = np.array([per_row for _, per_row in cost.operations])
        assert each[each > 1000] @ np.array(cost.count)[each > 1000] == 2 * numbers / ranks
        assert cost.sent == (0.0 if ranks == 1 else found.row)
        assert cost.weights == found.experts[1].weights / ranks


def test_mixtral_is_the_closed_form_and_what_it_leaves_out() -> None:
    config, found = TINY["mixtral"].build().config, layers("mixtral")
    group = config.num_attention_heads // config.num_key_value_heads
    closed = layers_of_sizes(
        layers=2, hidden=config.hidden_size, intermediate=config.intermediate_size, num_experts=4, top_k=2,
        query_group=group, vocabulary=config.vocab_size, keys=KEYS, size=8,
    )  # fmt: skip
    assert (found.layers, found.num_experts, found.top_k, found.row) == (2, 4, 2, closed.row)
    for tp in (1, 2):
        assert found.experts[tp].weights == closed.experts[tp].weights
        assert found.attention[tp].cache == closed.attention[tp].cache
        assert found.experts[tp].sent == closed.experts[tp].sent
        embedding = closed.attention[tp].sent / found.layers  # its rows are summed, too
        assert found.attention[tp].sent == closed.attention[tp].sent + embedding
        for chip in (CHIPS["A100"], CHIPS["L40S"]):
            for rows in (1, 100):
                assert found.experts[tp].seconds(rows, chip) > closed.experts[tp].seconds(rows, chip)
                assert found.attention[tp].seconds(rows, chip) > closed.attention[tp].seconds(rows, chip)


def test_a_model_without_experts() -> None:
    with pytest.raises(ValueError, match="needs a model with layers of several experts, found none; plan to serve it"):
        check_experts(packed("llama", 1))
