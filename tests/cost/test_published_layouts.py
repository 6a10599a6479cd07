"""Prices against measured steps of published layouts (`docs/planner.md` has the errors by source)."""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.auto.priced_layouts import LayoutPricer, layout_of

FILE = Path(__file__).with_name("data") / "published.jsonl"
SLOW_CARDS = "a100_slow_cards.json"  # vTrain's cluster: eight A100 share 800 Gbit/s
CONFIGURATIONS = (
    "SC21-T1", "Korthikanti22-T5", "MegaScale-T2", "ZeroBubble-T4", "llm-foundry-A100", "llm-foundry-H100",
    "torchtitan-202412", "MegatronBridge-25.11",
)  # fmt: skip
Answered = tuple[dict[str, Any], dict[str, Any]]  # entry of the file, answer


@functools.cache
def entries() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def answered(folder: Path, *sources: str) -> list[Answered]:
    found: list[Answered] = []
    for _, group in itertools.groupby([e for e in entries() if e["source"] in sources], lambda e: e["row"]["config"]):
        pricer = LayoutPricer()  # whose graphs are freed before the next model's
        found += [(entry, pricer.answer(with_cluster(entry["row"], folder))) for entry in group]
    refused = [answer["refused"] for _, answer in found if "refused" in answer]
    assert found and not refused, refused
    return found


def with_cluster(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    if row["cluster"] != SLOW_CARDS:
        return row
    ranks = layout_of(row).ranks
    file = folder / f"{ranks}.json"
    nodes = {"chip": "A100", "nodes": math.ceil(ranks / 8), "per_node": min(8, ranks), "card": 12.5e9}
    file.write_text(json.dumps({"groups": [nodes]}))
    return row | {"cluster": str(file)}


def errors(found: list[Answered]) -> np.ndarray[Any, Any]:
    return np.abs([answer["error"] for _, answer in found if "error" in answer])


def test_published_configurations(tmp_path: Path) -> None:
    off = errors(answered(tmp_path, *CONFIGURATIONS))
    assert len(off) == 34
    assert np.median(off) < 0.04 and np.quantile(off, 0.9) < 0.1, off


@pytest.mark.full
def test_small_models_and_many_chips(tmp_path: Path) -> None:
    assert np.median(errors(answered(tmp_path, "vTrain-multi"))) < 0.12
    assert np.median(errors(answered(tmp_path, "vTrain-single"))) < 0.1


@pytest.mark.full
def test_sweeps(tmp_path: Path) -> None:
    """Bad layouts and such that ran out of memory, too: 127 of 243."""
    found = answered(tmp_path, "Hagemann23")
    assert len(found) == 243 and np.median(errors(found)) < 0.07
    verdicts = [answer["fits"] == ("measured" in answer) for _, answer in found]
    assert np.mean(verdicts) > 0.94
    right = []
    for name in dict.fromkeys(entry["sweep"] for entry, _ in found):
        sweep = [answer for entry, answer in found if entry["sweep"] == name]
        ran = [answer for answer in sweep if "measured" in answer]
        for a, b in itertools.combinations(ran, 2):
            if abs(a["measured"] / b["measured"] - 1) > 0.05:
                right.append((a["measured"] < b["measured"]) == (a["seconds"] < b["seconds"]))
        choice = min((answer for answer in sweep if answer["fits"]), key=lambda answer: answer["seconds"])
        assert choice.get("measured", math.inf) < 1.08 * min(answer["measured"] for answer in ran), name
    assert np.mean(right) > 0.88
