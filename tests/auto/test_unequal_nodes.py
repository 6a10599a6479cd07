"""Clusters whose nodes differ: stages are cut for the chips of their ranks, and slow cards change the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.auto.choice import Asked, choose
from autopar.auto.costed_model import CostedModel
from autopar.auto.explanation import Explanation
from autopar.auto.pricing import balanced
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import stack_named
from autopar.cost.layout import Layout
from autopar.options import Options
from tests.auto.test_choice import verified
from tests.support.ranks import run_ranks

WIDE = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 32000, "num_hidden_layers": 32,
}  # fmt: skip
MODEL = CostedModel.from_config(WIDE, 2048)


def cluster(folder: Path, *groups: dict[str, Any]) -> Cluster:
    file = folder / "cluster.json"
    file.write_text(json.dumps({"groups": groups}))
    return Cluster.parse(str(file))


def chosen(nodes: Cluster, batch: int = 64, **given: Any) -> Explanation:
    stack = stack_named("autopar-eager", nodes.chip_name)
    return choose(MODEL, Asked(0, batch, 2048, given), nodes, stack)


def brute(seconds: list[list[float]], last: float) -> float:
    """The least time of the slowest of three stages."""
    layers = len(seconds[0])
    times = []
    for a in range(1, layers - 1):
        for b in range(a + 1, layers):
            times.append(max(sum(seconds[0][:a]), sum(seconds[1][a:b]), sum(seconds[2][b:]) + last))
    return min(times)


@pytest.mark.parametrize("last", [0.0, 2.5])
def test_the_cut_is_the_best_one(last: float) -> None:
    kinds = [1.0, 1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 2.0, 1.0, 1.0]
    seconds = [[kind * speed for kind in kinds] for speed in (1.0, 3.0, 1.5)]
    counts = balanced(seconds, last, [10] * 3)
    ends = [0, counts[0], counts[0] + counts[1], 10]
    slowest = max(sum(seconds[k][ends[k] : ends[k + 1]]) + (last if k == 2 else 0.0) for k in range(3))
    assert sum(counts) == 10 and slowest == pytest.approx(brute(seconds, last))
    assert balanced(seconds, last, [3, 3, 3]) == ()


def test_stages_are_cut_for_speed_with_memory_rich_ranks_first(tmp_path: Path) -> None:
    nodes = cluster(tmp_path, {"chip": "A100", "nodes": 2}, {"chip": "H100", "nodes": 2})
    found = chosen(nodes, pp=4, tp=8, schedule="1f1b")
    counts = found.choice.layout.layers
    assert sum(counts) == 32 and found.options["split_points"] == tuple(
        f"model.layers.{sum(counts[:k])}" for k in range(1, 4)
    )
    first = found.pricing.cluster.groups[0]
    fast = slice(0, 2) if first.chip == "H100" else slice(2, 4)
    slow = slice(2, 4) if first.chip == "H100" else slice(0, 2)
    assert min(counts[fast]) > 1.5 * max(counts[slow]), counts
    assert any(line.startswith(f"stages have {', '.join(map(str, counts))} layers") for line in found.remarks)
    assert any(line.startswith("start the ranks on the nodes in this order") for line in found.remarks)
    equal = found.pricing.model.price(
        replace(found.choice.layout, layers=(8, 8, 8, 8)), found.pricing.cluster, found.pricing.stack
    )
    assert found.choice.seconds < 0.8 * equal.seconds
    assert Options(**found.options).split_points == found.options["split_points"]


def test_the_chips_with_more_memory_come_first(tmp_path: Path) -> None:
    nodes = cluster(tmp_path, {"chip": "A100-40", "nodes": 1}, {"chip": "H200", "nodes": 1})
    found = chosen(nodes, batch=16, pp=2, tp=8)
    assert [group.chip for group in found.pricing.cluster.groups] == ["H200", "A100-40"]
    price = found.choice.price
    assert price.limits == (141e9, 40e9) and all(share <= 1 for share in price.over)


def test_replicas_of_unequal_speed_are_refused(tmp_path: Path) -> None:
    nodes = cluster(tmp_path, {"chip": "H100", "nodes": 1}, {"chip": "A100", "nodes": 1})
    price = MODEL.price(Layout(dp=16), nodes, stack_named("autopar-eager", "A100"))
    assert price.refused == (
        "cluster: replicas of unequal speed would wait for each other, found H100 and A100 in one stage; use a pp "
        "whose stages have one kind of chip each"
    )
    with pytest.raises(ValueError, match="replicas of unequal speed would wait for each other"):
        chosen(nodes, pp=1)


def test_a_slow_card_changes_the_plan_and_is_named(tmp_path: Path) -> None:
    even = chosen(cluster(tmp_path, {"chip": "H100", "nodes": 3}, {"chip": "H100", "nodes": 1}), batch=128)
    slow = chosen(cluster(tmp_path, {"chip": "H100", "nodes": 3}, {"chip": "H100", "nodes": 1, "card": 5e8}), batch=128)
    assert even.choice.layout != slow.choice.layout
    assert not any("slow" in line for line in even.remarks)
    (named,) = [line for line in slow.remarks if line.startswith("slow network cards")]
    assert "on ranks 24 to 31 (1 nodes of H100): 0.5 GB/s, others have 50" in named


def test_the_order_of_equal_nodes_changes_nothing(tmp_path: Path) -> None:
    groups = {"chip": "A100", "nodes": 1}, {"chip": "H100", "nodes": 1}
    one, other = (chosen(cluster(tmp_path, *pair), batch=16) for pair in (groups, groups[::-1]))
    assert one.choice.seconds == pytest.approx(other.choice.seconds)


def test_a_plan_with_uneven_stages_verifies_on_real_ranks() -> None:
    config = WIDE | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
                     "vocab_size": 64, "num_hidden_layers": 4}  # fmt: skip
    cuts = CostedModel.from_config(config, 16).split_points((3, 1))
    assert cuts == ("model.layers.3",)
    assert all(run_ranks(2, verified, config, {"pp": 2}, {"split_points": cuts, "microbatches": 2}, timeout=120))
