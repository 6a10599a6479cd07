"""Every feature beside every way to shard, to order and to keep: the outcomes of docs/combinations.md."""

from __future__ import annotations

import json

import pytest

from tests.combinations.cells import EXACT, FEATURES, WAYS, outcomes
from tests.combinations.page import PAGE, RESULTS, of_ranks, text, without_folders
from tests.support.ranks import run_ranks

KNOWN: dict[str, dict[str, str]] = json.loads(RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("feature", "way"), [("fp8_delayed, documents", "cp zigzag"), ("4-bit base with LoRA", "zero=3")]
)
def test_exact(feature: str, way: str) -> None:
    for (said,) in run_ranks(WAYS[way].ranks, outcomes, feature, [way], timeout=200):
        assert said == EXACT


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_way_is_as_the_page_says(feature: str) -> None:
    assert {way: without_folders(said) for way, said in of_ranks(feature).items()} == KNOWN[feature]


def test_the_page_is_of_these_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == text(KNOWN), "run python -m tests.combinations.page"
    assert {feature: [*found] for feature, found in KNOWN.items()} == {feature: [*WAYS] for feature in FEATURES}
    said = [x for found in KNOWN.values() for x in found.values()]
    assert not [x for x in said if x.startswith("wrong")] and said.count(EXACT) > 0.9 * len(said)
