"""The search with real prices: the choice is that of pricing everything, and no bound is above its price.

A model of experts, and one with MLA and a dense first layer, on GPUs that have little memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from autopar.auto import scaled_costs
from autopar.auto.costed_model import CostedModel
from autopar.auto.pricing import Pricing, certain
from autopar.auto.search import BAND, SLACK, Candidate, brute_force, search
from autopar.auto.space import Question, Space
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import stack_named
from autopar.cost.layout import Layout, Placement
from autopar.cost.layout_price import Price

SEQ = 8192
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
    "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 4, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 4, "moe_intermediate_size": 512, "first_k_dense_replace": 1, "n_routed_experts": 16,
    "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "num_attention_heads": 16, "q_lora_rank": 256,
    "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
}  # fmt: skip
FULL = (pytest.mark.full, pytest.mark.timeout(3600))
WHOLE: dict[str, Any] = {}
PART = {"tp": 1, "cp": 2, "pp": 1, "loss_chunks": 1}  # few placements, which compile quickly
SHARES = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # of the layouts that fit, more or less


class ClosedForms(Pricing):
    """Finalists are not simulated, as brute force does not."""

    def price(self, layout: Layout, simulated: bool = False) -> Price:
        return super().price(layout)


@functools.cache
def costed(config: str) -> CostedModel:
    return CostedModel.from_config(json.loads(config), SEQ)


def pricing(model: CostedModel, limit: float = 0.0) -> Pricing:
    stack = dataclasses.replace(stack_named("autopar-eager", "H100"), reserved=0.0)
    return ClosedForms(model, Cluster.parse("H100"), stack, {}, limit)


@functools.cache
def priced(
    config: str, ranks: int, batch: int, fixed: tuple[tuple[str, Any], ...]
) -> tuple[Question, dict[Layout, Price]]:
    model = costed(config)
    asked = Question(ranks, batch, SEQ, model.layers, 8, experts=model.experts, fixed=dict(fixed))
    exact = pricing(model)
    return asked, {layout: exact.price(layout) for layout in Space(asked).layouts()}


class Known:
    """Prices that are known, within a limit."""

    def __init__(self, prices: dict[Layout, Price], limit: float) -> None:
        self.prices, self.limit = prices, limit

    def price(self, layout: Layout, simulated: bool = False) -> Price:
        found = self.prices[layout]
        return found if found.refused else found.limited(self.limit)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    ("config", "ranks", "batch", "fixed"),
    [
        pytest.param(MIXTRAL, 4, 8, PART, id="mixtral"),
        *(
            pytest.param(config, 8, batch, fixed, marks=FULL, id=f"{config['model_type']}-{batch}-{fixed}")
            for config in (MIXTRAL, DEEPSEEK)
            for batch, fixed in ((8, WHOLE), (64, WHOLE), (16, {"pp": 2}), (32, {"cp": 2}), (32, {"ep": 4}))
        ),
    ],
)
def test_the_choice_is_that_of_pricing_everything(
    config: dict[str, Any], ranks: int, batch: int, fixed: dict[str, Any], share: float
) -> None:
    text = json.dumps(config)
    asked, prices = priced(text, ranks, batch, tuple(fixed.items()))
    sizes = sorted(price.most_memory for price in prices.values() if not price.refused)
    limit = sizes[int(share * (len(sizes) - 1))] * (1 + 1e-7)
    model = costed(text)
    found = search(Space(asked), pricing(model, limit))
    known = Known(prices, limit)
    wanted = brute_force(prices, known)
    assert wanted is not None and found.choice is not None
    assert found.choice.layout == wanted.layout
    fastest = min(c.seconds for layout in prices if (c := Candidate(layout, known.price(layout))).price.fits)
    assert found.least == pytest.approx(fastest, rel=1e-12)
    assert all(other.seconds <= fastest * (1 + BAND) for other in found.close)
    assert found.counts["all"] == len(prices)


def bounds_of(model: CostedModel, placements: list[Placement]) -> Iterator[tuple[Placement, Placement, int]]:
    """(placement, another that bounds it, rows of a microbatch)"""
    for placement, near in itertools.product(placements, repeat=2):
        if near != placement and scaled_costs.is_within(near, placement):
            yield from ((placement, near, rows) for rows in (1, 2, 8))


@pytest.mark.parametrize(
    ("config", "ranks", "fixed"),
    [
        pytest.param(MIXTRAL, 4, PART, id="mixtral"),
        pytest.param(MIXTRAL, 8, WHOLE, marks=FULL, id="mixtral-whole"),
        pytest.param(DEEPSEEK, 8, WHOLE, marks=FULL, id="deepseek-whole"),
    ],
)
def test_no_bound_is_above_its_price(config: dict[str, Any], ranks: int, fixed: dict[str, Any]) -> None:
    text = json.dumps(config)
    model = costed(text)
    asked, _ = priced(text, ranks, 8, tuple(fixed.items()))
    exact, seen = pricing(model), 0
    placements = list(dict.fromkeys(layout.placement for layout in Space(asked).layouts()))
    for placement, near, rows in bounds_of(model, [p for p in placements if not exact._refusal(p)]):
        for pp in (1, 2, 4):
            layout = layout_on(placement, pp, rows)
            if layout is None:
                continue
            bound, price = exact.bound_from(near, layout), exact.price(layout)
            assert certain(bound) <= certain(price) * (1 + SLACK), (layout, near)
            assert bound.most_memory <= price.most_memory * (1 + SLACK), (layout, near)
            seen += 1
    assert seen > 20


def layout_on(placement: Placement, pp: int, rows: int) -> Layout | None:
    sizes = {axis: getattr(placement, axis) for axis in ("tp", "cp", "ep")}
    used = pp * placement.tp * placement.cp * placement.ep
    if 8 % used:
        return None
    return Layout(
        **sizes, pp=pp, dp=8 // used, microbatches=8, micro_batch=rows, sequence_parallel=placement.sequence_parallel,
        activation_checkpoint=placement.policy, loss_chunks=placement.loss_chunks,
    )  # fmt: skip
