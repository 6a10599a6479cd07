"""Bounds of placements that are not compiled: never above the price, and near it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.auto.costed_model import CostedModel
from autopar.auto.pricing import Pricing, certain
from autopar.auto.scaled_costs import is_within, seed
from autopar.auto.search import SLACK
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import stack_named
from autopar.cost.layout import Layout, Placement

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 11008, "vocab_size": 32000, "num_hidden_layers": 4,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
SEQ = 2048
TP = {"tp": 4, "sequence_parallel": True}
FULL = pytest.mark.full
CASES = [
    pytest.param(LLAMA, {**TP, "cp": 4}, 0.5, id="tp and cp"),
    pytest.param(MIXTRAL, {"ep": 8}, 0.5, id="ep"),
    pytest.param(LLAMA, TP, 0.75, id="tp", marks=FULL),
    pytest.param(LLAMA, {**TP, "tp": 8}, 0.75, id="tp of 8", marks=FULL),
    pytest.param(LLAMA, {"cp": 4}, 0.75, id="cp", marks=FULL),
    pytest.param(MIXTRAL, {**TP, "ep": 4}, 0.5, id="tp and ep", marks=FULL),
]


@pytest.mark.parametrize(("config", "sizes", "near"), CASES)
def test_a_bound_is_below_the_price_and_near_it(config: dict[str, Any], sizes: dict[str, Any], near: float) -> None:
    pricing = Pricing(
        CostedModel.from_config(config, SEQ), Cluster.parse("H100"), stack_named("autopar-eager", "H100")
    )  # fmt: skip
    layout = Layout(**sizes, dp=8 // sizes.get("ep", 1), microbatches=4, zero=1)
    for policy in ("none", "selective", "full"):
        one = replace(layout, activation_checkpoint=policy)
        bound, (price, none) = pricing.bound(one), (pricing.price(one), pricing.bound(one))
        assert bound is not None and none is None  # compiled by now
        assert near <= certain(bound) / certain(price) <= 1 + SLACK, policy
        assert 0.5 <= bound.most_memory / price.most_memory <= 1 + SLACK, policy


def test_the_placement_that_bounds() -> None:
    large = Placement(tp=6, cp=4, ep=1, policy="full", loss_chunks=8)
    assert seed(large) == Placement(tp=2, cp=2)
    assert is_within(Placement(tp=3, cp=2), large) and is_within(seed(large), large)
    assert not is_within(Placement(tp=4, cp=2), large)  # does not divide
    assert not is_within(Placement(cp=2), large)  # other axes
    assert not is_within(Placement(tp=2, cp=2, policy="full"), large)
    assert not is_within(Placement(tp=2, cp=2, sequence_parallel=True), large)
