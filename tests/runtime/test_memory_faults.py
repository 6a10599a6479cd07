"""Saves into host memory that fail, or in which a rank dies: the run goes on, and what was complete before still is."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from autopar.runtime.checkpoint import memory_folder
from tests.faults.campaign import free_port
from tests.runtime.test_killed_saves import Victim
from tests.runtime.test_memory_saves import on_node, resumed
from tests.support.ranks import rank_outcomes, refusal, run_ranks
from tests.support.runs import Run, undisturbed

EXACT = 1e-10
ROOT = Path(__file__).resolve().parents[2]


# --- kills ---------------------------------------------------------------------------------------------------


def saves(folder: str, memory: str, cache: str, victim: int | None, moment: int | None) -> int:
    """On a rank: a memory checkpoint, a step, and one in which the victim dies (None: each counts its moments)."""
    os.environ["AUTOPAR_CACHE"] = cache
    on_node(memory, 1)
    run = Run({"dp": 2}, zero=1)
    run.step()
    run.save(folder, memory=True)
    run.step()
    run.save(folder, memory=True).wait()
    run.step()
    watched = Victim(moment) if victim in (None, run.mesh.get_rank()) else None
    saving = run.save(folder, memory=True)
    run.step()
    saving.wait()
    return watched.stop() if watched is not None else 0


def check_kills(tmp_path: Path, seed: int, count: int) -> None:
    chance, cache = random.Random(seed), str(tmp_path / "cache")
    expected = run_ranks(1, undisturbed, 5)[0][0]
    (tmp_path / "whole").mkdir()
    moments = run_ranks(2, saves, str(tmp_path / "run"), str(tmp_path / "whole"), cache, None, None)
    came_from = set()
    for number in range(count):
        victim, folder, memory = number % 2, str(tmp_path / f"run{number}"), tmp_path / f"memory{number}"
        memory.mkdir()
        moment = chance.randrange(1, moments[victim])
        outcomes = rank_outcomes(2, saves, folder, str(memory), cache, victim, moment, grace=0.5)
        assert "died with exit code -9" in (outcomes[victim].lost or ""), outcomes
        if chance.random() < 0.5:  # the node of either is lost, too
            shutil.rmtree(memory / f"node{chance.randrange(2)}")
        for in_memory, step, losses, _ in run_ranks(2, resumed, folder, str(memory), 2, {"dp": 2}, 1, {"zero": 1}):
            assert in_memory and step in (2, 3), (victim, moment, in_memory, step)
            assert losses == pytest.approx(expected[step : step + 2], abs=EXACT), (victim, moment)
            came_from.add(step)
    print(f"{count} kills; went on from steps {sorted(came_from)}")


def test_kills(tmp_path: Path) -> None:
    check_kills(tmp_path, seed=1, count=2)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_many_kills(tmp_path: Path) -> None:
    check_kills(tmp_path, seed=2, count=30)


# --- no room, and other runs ----------------------------------------------------------------------------------


def without_room(folder: str, memory: str, who: int, what: str) -> tuple[list[float], list[str]]:
    """On a rank: saves in memory of which one rank's fails, and a save to the disk; losses and warnings."""
    rank = on_node(memory, 1)
    if what == "folder" and rank == who:
        os.environ["AUTOPAR_MEMORY"] = "/proc/nowhere/memory"
    if what == "open" and rank == who:
        Path(os.environ["AUTOPAR_MEMORY"]).mkdir()
        Path(os.environ["AUTOPAR_MEMORY"]).chmod(0o777)
    run, losses = Run({"dp": 2}, zero=1), []
    free = 1000 if what == "room" and rank == who else memory_folder.free_memory()
    with mock.patch.object(memory_folder, "free_memory", lambda: free), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(3):
            losses.append(run.step())
            run.save(folder, memory=number != 1)
        run.save(folder, memory=True).wait()
    return losses, [str(w.message) for w in said if "save:" in str(w.message)]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("room", r"rank \d could not write 00000001-\w+: OSError: .*needs .* GB of memory for \d ranks, the node has"),
        ("folder", "rank 1 could not write .*No such file"),
        ("open", "rank 1 could not write .*others may write to .* set AUTOPAR_MEMORY to a folder in memory"),
    ],
)
def test_a_save_that_fails_is_a_warning(tmp_path: Path, what: str, words: str) -> None:
    """Of rank 0. The run goes on, later resumes from the disk, and the neighbour was not left waiting."""
    (tmp_path / "memory").mkdir()
    expected = run_ranks(1, undisturbed, 4)[0][0]
    results = rank_outcomes(2, without_room, str(tmp_path / "run"), str(tmp_path / "memory"), 1, what)
    for outcome in results:
        assert outcome.ok, outcome
        assert outcome.value[0] == pytest.approx(expected[:3], abs=EXACT)
    said = results[0].value[1]
    assert len(said) == 3 and not results[1].value[1], said
    assert re.search(words, said[0]), said
    results = run_ranks(2, resumed, str(tmp_path / "run"), str(tmp_path / "memory"), 2, {"dp": 2}, 1, {"zero": 1})
    for in_memory, step, losses, _ in results:
        assert not in_memory and step == 2 and losses == pytest.approx(expected[2:4], abs=EXACT)


def refused(folder: str, memory: str) -> list[str]:
    on_node(memory, 1)
    run = Run({"dp": 1})
    return [refusal(run.save, folder, memory=True, **given) for given in ({"keep": 1}, {"host_memory": 1})]


def test_options_of_the_disk_are_refused(tmp_path: Path) -> None:
    for words, name in zip(run_ranks(1, refused, str(tmp_path), str(tmp_path))[0], ("keep", "host_memory")):
        assert words.startswith(f"{name}: of saves to the disk, found it with memory=True") and "leave it out" in words


def others(folder: str, memory: str) -> list[Any]:
    """On a rank: a run, then one that begins anew in the same folder, and one after the folder was removed."""
    on_node(memory, 1)
    found = []
    for number in range(3):
        run = Run({"dp": 1}, seed=number)
        if number == 2:
            shutil.rmtree(folder)
            found.append(refusal(run.load, folder))
        run.step()
        run.save(folder, memory=True).wait()
        found.append(len(list(Path(os.environ["AUTOPAR_MEMORY"]).iterdir())))
    return found


def test_another_run_in_the_folder_takes_its_place(tmp_path: Path) -> None:
    """And a run whose folder was removed is gone, though its files are still in memory."""
    first, second, gone, third = run_ranks(1, others, str(tmp_path / "run"), str(tmp_path))[0]
    assert (first, second, third) == (1, 1, 2) and gone.startswith("load: needs a folder that autopar.save has written")


def two_at_once(folder: str, memory: str) -> str:
    """On a rank: a run that saves after another one has begun in its folder."""
    on_node(memory, 1)
    first, second = Run({"dp": 1}), Run({"dp": 1}, seed=1)
    for run in (first, second):
        run.step()
        run.save(folder, memory=True).wait()
    return refusal(first.save, folder, memory=True)


def test_two_runs_in_the_memory_of_one_folder_are_refused(tmp_path: Path) -> None:
    """The first one, at its next save: it is the one that finds the other's."""
    said = run_ranks(1, two_at_once, str(tmp_path / "run"), str(tmp_path))[0]
    assert said.startswith("save: another run saves into the memory of") and "a folder of its own" in said


def env(memory: Path) -> dict[str, str]:
    return {**os.environ, "AUTOPAR_MEMORY": str(memory), "PYTHONPATH": str(ROOT), "AUTOPAR_CACHE": "off"}


SCRIPT = """
import os, signal, sys
from tests.support.runs import Run
run = Run({"dp": 1})
run.step()
run.save(sys.argv[1], memory=True).wait()
exec(sys.argv[2])
"""
IN_A_HANDLER = "signal.signal(15, lambda *_: sys.exit(75)); os.kill(os.getpid(), 15)"
CAUGHT = "\ntry:\n    sys.exit(75)\nexcept SystemExit:\n    pass"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(0)", 0),
        ("sys.exit()", 0),
        (CAUGHT, 0),
        ("raise KeyError('planted')", 1),
        ("sys.exit(75)", 75),
        ("sys.exit('a sentence')", 1),
        ("raise SystemExit(75)", 75),
        (IN_A_HANDLER, 75),
        ("os.kill(os.getpid(), 15)", -15),
    ],
)
def test_at_the_good_end_of_a_program_the_memory_is_free(tmp_path: Path, end: str, code: int) -> None:
    """At any other one, such as the exit code by which a script asks to be started again, the next start goes on from
    there."""
    memory = tmp_path / "memory"
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), end], env=env(memory), capture_output=True
    )
    assert (ended.returncode, bool(list(memory.iterdir()))) == (code, code != 0), ended


TWO_NODES = """
import os, signal, sys, time
from tests.support.runs import Run
run = Run({"dp": 2}, zero=1)
run.step()
run.save(sys.argv[1], memory=True).wait()
exec(sys.argv[2])
"""


def on_two_nodes(base: Path, ends: tuple[str, str], hosts: bool) -> list[int]:
    """The exit codes of a rank on each node, which end so; what is then in the memory of which node. hosts: rank 0 has
    the store, else a launcher."""
    store = None if hosts else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"MASTER_PORT": str(store.port if store is not None else free_port()), "OMP_NUM_THREADS": "1"}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": str(not hosts), "AUTOPAR_HEARTBEAT_TIMEOUT": "3"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_NODES, str(base / "run"), end],
            env={**env(base / f"node{rank}"), **common, "RANK": str(rank)}, stderr=subprocess.DEVNULL,
        ) for rank, end in enumerate(ends)
    ]  # fmt: skip
    try:
        return [rank.wait(120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


LATE = "time.sleep(1.5); "


ENDS: dict[str, tuple[tuple[str, str], list[int]]] = {
    "well": (("", LATE), [0, 0]),
    "error": (("", LATE + "raise KeyError('planted')"), [0, 1]),
    "without groups": ((LATE, "import torch.distributed as d; d.destroy_process_group()"), [0, 0]),
    "exit code": ((LATE + "sys.exit(75)", ""), [75, 0]),
    "kill": (("", LATE + "os.kill(os.getpid(), 9)"), [0, -9]),
}


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        pytest.param(name, hosts, marks=[] if (name, hosts) in (("well", True), ("error", False)) else pytest.mark.full)
        for name, hosts in itertools.product(ENDS, (False, True))
    ],
)
def test_the_memory_of_all_nodes_is_free_when_all_ranks_have_ended_well(tmp_path: Path, name: str, hosts: bool) -> None:
    """A node whose ranks have ended well keeps its part while those of another one run: they may yet fail."""
    ends, codes = ENDS[name]
    assert on_two_nodes(tmp_path, ends, hosts) == codes
    kept = [bool(list((tmp_path / f"node{node}").iterdir())) for node in range(2)]
    assert kept == [any(codes)] * 2
