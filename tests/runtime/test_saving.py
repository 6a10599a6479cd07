"""One call saves a run, one call goes on: on another mesh, with moments, averages and schedules, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from tests.runs import Run, Sizes, averages, undisturbed

EXACT = 1e-10
MESHES: list[tuple[Sizes, dict[str, Any]]] = [
    ({"dp": 4}, {"zero": 1}),
    ({"dp": 2}, {"zero": 3}),
    ({"tp": 2, "pp": 2}, {}),
    ({"dp": 1}, {}),
]
EACH = 2  # steps


def ranks_of(sizes: Sizes) -> int:
    return int(torch.Size(sizes.values()).numel())


def leg(sizes: Sizes, options: dict[str, Any], folder: str, steps: int, **how: Any) -> tuple[list[float], Any]:
    """A run on a rank that goes on from the latest checkpoint if there is one, and saves one."""
    first = not (Path(folder) / "latest").exists()
    run = Run(sizes, seed=0 if first else 7, **options)
    if not first:
        run.load(folder)
    losses = [run.step() for _ in range(steps)]
    run.save(folder, **how)
    return losses, averages(run)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(float((found[n] - x).abs().max()) < EXACT for n, x in expected.items())


def test_a_run_moves_over_meshes(tmp_path: Path) -> None:
    expected, average = run_ranks(1, undisturbed, EACH * len(MESHES))[0]
    found: list[float] = []
    for sizes, options in MESHES:
        legs = run_ranks(ranks_of(sizes), leg, sizes, options, str(tmp_path), EACH)
        assert all(losses == legs[0][0] for losses, _ in legs)
        found += legs[0][0]
    assert found == pytest.approx(expected, abs=EXACT)
    assert same(legs[0][1], average)
