"""A rank is killed at any moment of a save: the newest complete checkpoint loads, on another mesh, and the run goes on
with the losses of one that nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import autopar
from tests.support.ranks import rank_outcomes, run_ranks
from tests.support.runs import Run, undisturbed

EXACT = 1e-10
OURS = (str(Path(autopar.__file__).resolve().parent.parent / "autopar"),)
SIZES, OPTIONS = {"dp": 2}, {"zero": 1}


class Victim:
    """Counts calls within autopar, on all threads from now on, and kills this process at one of them."""

    def __init__(self, moment: int | None) -> None:
        self.count, self._moment = 0, moment
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)

    def _seen(self, frame: Any, event: str, _: Any) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(OURS):
            self.count += 1
            if self.count == self._moment:
                os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> int:
        """How many calls there were. Waiting makes some: where there were fewer than before, it is killed now."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        if self._moment is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.count


def saves(folder: str, cache: str, victim: int | None, moment: int | None, asynchronous: bool) -> int:
    """On a rank: a checkpoint, a step, and a save in which the victim dies (None: each counts its moments)."""
    os.environ["AUTOPAR_CACHE"] = cache
    run = Run(SIZES, **OPTIONS)
    run.step()
    run.save(folder, keep=2)
    run.step()
    watched = Victim(moment) if victim in (None, run.mesh.get_rank()) else None
    saving = run.save(folder, keep=2, asynchronous=asynchronous)
    run.step()
    saving.wait()
    return watched.stop() if watched is not None else 0


def goes_on(folders: list[str], cache: str, steps: int) -> list[tuple[int, list[float]]]:
    """On one process: from each folder, the step that was loaded and the losses of those behind it."""
    os.environ["AUTOPAR_CACHE"] = cache
    run, found = Run({"dp": 1}, seed=5), []
    for folder in folders:
        run.load(folder)
        first = run.number
        found.append((first, [run.step() for _ in range(steps - first)]))
        run.save(folder)  # removes what was left
        assert not list(Path(folder).glob(".saving-*"))
    return found


def check(tmp_path: Path, seed: int, count: int) -> None:
    chance, cache, steps = random.Random(seed), str(tmp_path / "cache"), 4
    expected, _ = run_ranks(1, undisturbed, steps)[0]
    moments = [
        run_ranks(2, saves, str(tmp_path / f"whole{asynchronous}"), cache, None, None, asynchronous)
        for asynchronous in (False, True)
    ]
    folders, told = [], []
    for number in range(count):
        victim, asynchronous, folder = chance.randrange(2), bool(number % 2), str(tmp_path / f"run{number}")
        most = moments[asynchronous][victim]
        moment = chance.randrange(1, most)
        outcomes = rank_outcomes(2, saves, folder, cache, victim, moment, asynchronous, grace=0.5)
        assert "died with exit code -9" in (outcomes[victim].lost or ""), outcomes
        folders.append(folder)
        told.append(f"rank {victim} at call {moment} of {most}, {asynchronous=}")
    for what, (first, losses) in zip(told, run_ranks(1, goes_on, folders, cache, steps)[0], strict=True):
        assert first in (1, 2), what
        assert losses == pytest.approx(expected[first:], abs=EXACT), what
        print(f"{what}: went on from step {first}")


def test_kills(tmp_path: Path) -> None:
    check(tmp_path, seed=1, count=4)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_many_kills(tmp_path: Path) -> None:
    check(tmp_path, seed=50, count=50)
