"""One call saves a run, one call goes on: on another mesh, with moments, averages and schedules, to the last bit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from autopar.runtime.checkpoint import staging
from tests.runtime.test_optimizers import OPTIMIZERS
from tests.support.ranks import run_ranks
from tests.support.runs import Run, Sizes, Tied, averages, undisturbed

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


# --- while training goes on ---------------------------------------------------------------------------------


def written(checkpoint: Path) -> dict[str, Any]:
    """All of a checkpoint: bytes of its files, and what its manifest says of the run."""
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    del manifest["order"]
    return {**{p.name: p.read_bytes() for p in sorted(checkpoint.glob("*.safetensors"))}, "manifest": manifest}


def beside(folder: str, wave: int, slow: float) -> tuple[bool, float, list[float]]:
    """The same state saved at once and on a thread, while the run makes two more steps. ``wave``: bytes of a slot, of
    which there are two; ``slow``: seconds for each write."""
    write = staging.StagedFile._write

    def slowly(self: Any, data: memoryview) -> None:
        time.sleep(slow)
        write(self, data)

    with patch.object(staging, "WAVE", wave), patch.object(staging.StagedFile, "_write", slowly):
        staging.slots_of.cache_clear()
        run = Run({"dp": 2}, zero=1)
        losses = [run.step(), run.step()]
        now = run.save(f"{folder}/now")
        later = run.save(f"{folder}/later", asynchronous=True, host_memory=0)
        flying = not later.done
        losses += [run.step(), run.step()]
        later.wait()
        staging.slots_of.cache_clear()
    return flying and written(now.folder) == written(later.folder), run.average.updates, losses


@pytest.mark.parametrize(("wave", "slow"), [(2**20, 0.02), (96, 0.002)], ids=["all fits", "in waves"])
def test_what_is_written_beside_the_training_is_the_same(tmp_path: Path, wave: int, slow: float) -> None:
    expected, _ = run_ranks(1, undisturbed, 4)[0]
    for same_bytes, updates, losses in run_ranks(2, beside, str(tmp_path), wave, slow):
        assert same_bytes and updates == 4
        assert losses == pytest.approx(expected, abs=EXACT)


def shares(folder: str) -> dict[str, int]:
    """Bytes of the files of a mesh with replicas."""
    run = Run({"dp_replicate": 2, "dp": 2}, zero=3)
    run.step()
    return {p.name: p.stat().st_size for p in run.save(folder).folder.glob("*.safetensors")}


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    """Pieces, moments and averages are held twice, vectors four times; each is written once, and nobody is idle."""
    sizes = run_ranks(4, shares, str(tmp_path))[0]
    heads = sum(int.from_bytes((tmp_path / "step-00000001" / name).read_bytes()[:8], "little") + 8 for name in sizes)
    parameters = sum(p.numel() for p in Tied().parameters())
    steps = 4 * len(list(Tied().parameters()))
    assert sum(sizes.values()) - heads == 4 * 8 * parameters + steps + 8 * 0
    assert len(sizes) == 4 and max(sizes.values()) < 1.25 * min(sizes.values())


# --- every optimizer ----------------------------------------------------------------------------------------


def leg_of_each(names: list[str], sizes: Sizes, options: dict[str, Any], folder: str, steps: int) -> dict[str, Any]:
    """The losses of a leg with each optimizer."""
    found = {}
    for name in names:
        at = Path(folder) / name.replace(" ", "_")
        first = not (at / "latest").exists()
        run = Run(sizes, OPTIMIZERS[name], seed=0 if first else 7, **options)
        if not first:
            run.load(str(at))
        found[name] = [run.step() for _ in range(steps)]
        run.save(str(at), asynchronous=True).wait()
    return found


def undisturbed_each(names: list[str], steps: int) -> dict[str, list[float]]:
    return {name: undisturbed(steps, OPTIMIZERS[name])[0] for name in names}


FEW = ["Adafactor", "AdamW fused"]


@pytest.mark.parametrize("names", [FEW, pytest.param([*OPTIMIZERS], marks=pytest.mark.full)], ids=["few", "all"])
def test_states_of_optimizers_move_over_meshes(tmp_path: Path, names: list[str]) -> None:
    """Pieces, blocks, whole matrices that are factored, a step in a tensor on the device or on the host."""
    expected = run_ranks(1, undisturbed_each, names, 4, timeout=300)[0]
    legs = [
        run_ranks(ranks_of(sizes), leg_of_each, names, sizes, options, str(tmp_path), steps, timeout=300)[0]
        for sizes, options, steps in [({"dp": 2, "tp": 2}, {"zero": 3}, 2), ({"pp": 2}, {}, 1), ({"dp": 1}, {}, 1)]
    ]
    for name in names:
        found = [loss for leg in legs for loss in leg[name]]
        assert found == pytest.approx(expected[name], abs=EXACT), name
