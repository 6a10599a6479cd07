"""Two nodes under torchrun whose cable is pulled, or one of which is switched off: the run resumes, with the losses of
an undisturbed one."""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.restarted_run import CABLE, SIGNALS
from tests.faults.test_restarts import ROOT, agent, check, ended, launcher, noted, ranks_in_turn, wait_until
from tests.support.emulated_nodes import Node, emulated_nodes

SILENT = "10"  # seconds; a cable that is out for longer ends a run
PATIENCE = 300.0  # seconds of a run, on a machine that others use
C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "node-0:29400",
        "--rdzv-conf", "last_call_timeout=10,keep_alive_interval=3,keep_alive_max_attempt=3")  # fmt: skip


class Run:
    """A training run of one rank on each node. ``how``: the rendezvous. ``least``: of ``--nnodes``. ``run``: see
    `launcher`. Each launcher prints into a file of its own."""

    def __init__(self, folder: Path, nodes: list[Node], how: tuple[str, ...], least: str, **run: Any) -> None:
        self.nodes, self.launched = nodes, list[subprocess.Popen[bytes]]()
        self._folder, self._how, self._least, self._run = folder, how, least, run
        for number in range(len(nodes)):
            self.start(number)
            time.sleep(1.0)  # the first hosts the rendezvous

    def start(self, number: int) -> None:
        """Start the launcher of a node."""
        place = ("--nnodes", self._least, "--nproc-per-node", "1", "--node-rank", str(number))
        command, environment = launcher(self._folder, *place, *self._how, **self._run)
        log = self._folder / f"log-{len(self.launched)}"
        environment["AUTOPAR_HEARTBEAT_TIMEOUT"] = SILENT
        self.launched.append(self.nodes[number].start(command, environment, log))

    def until(self, happens: Callable[[], bool]) -> None:
        wait_until(happens, self.launched[0], self.printed)

    def until_step(self, step: int) -> None:
        """Until a step is made, and saved, in memory, too, where that goes on beside the training."""
        self.until(lambda: any(n["what"] == "saved" and n["step"] == step for n in noted(self._folder)))
        time.sleep(1.0)

    def cut(self, number: int, seconds: float, how: Callable[[Node], None] = Node.cut) -> None:
        """Cut a node off for a while."""
        self.cut_at = time.time()
        how(self.nodes[number])
        time.sleep(seconds)
        self.nodes[number].mend()

    def ended(self) -> None:
        """Wait until all launchers have ended, and check the losses."""
        end = time.monotonic() + PATIENCE
        while any(one.poll() is None for one in self.launched):
            assert time.monotonic() < end, self.printed()
            time.sleep(0.05)
        assert self.launched[0].returncode == self.launched[-1].returncode == 0, self.printed()
        check(noted(self._folder))
        if ranks_in_turn(self._folder) == [2]:
            steps = [note for note in noted(self._folder) if note["what"] == "step"]
            assert all(note["loss"] == undisturbed()[note["step"]] for note in steps)

    def rounds(self) -> int:
        return sum(note["what"] == "started" for note in noted(self._folder))

    def loaded(self) -> list[tuple[int, bool]]:
        """The step of each checkpoint that was loaded, and whether it was one in memory."""
        return [(note["step"], note["memory"]) for note in noted(self._folder) if note["what"] == "loaded"]

    def errors(self) -> set[str]:
        """Those by which ranks have ended."""
        return set(re.findall(r"CollectiveError: comm: .* failed on rank \d: (.*?)(?: \[.*)?$", self.printed(), re.M))

    def check_errors(self, *begins: str) -> None:
        """Ranks have ended with these errors, and no others."""
        errors = self.errors()
        assert len(errors) == len(begins) and all(any(e.startswith(b) for e in errors) for b in begins), self.printed()

    def printed(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(self._folder.glob("log-*")))

    def close(self) -> None:
        for one in self.launched:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


@contextmanager
def training(
    folder: Path, count: int, how: tuple[str, ...] = C10D, least: str = "2", pause: float = 2.0, **run: Any
) -> Iterator[Run]:
    """A run on so many nodes."""
    with emulated_nodes(count) as nodes:
        made = Run(folder, nodes, how, least, pause=pause, **run)
        try:
            yield made
        finally:
            made.close()


@functools.cache
def undisturbed() -> dict[int, str]:
    """The losses of two ranks by step, in hexadecimal."""
    with tempfile.TemporaryDirectory() as name:
        ended(agent(Path(name), "--standalone", "--nproc-per-node", "2"))
        return {note["step"]: note["loss"] for note in noted(Path(name)) if note["what"] == "step"}


# --- ranks alone ------------------------------------------------------------------------------------------------

SUMS = """
import sys, time, torch, torch.distributed as dist, autopar
autopar.init_mesh("cpu", float(sys.argv[1]), dp=2)
with autopar.error_context("adding up"):
    for step in range(10**6):
        dist.all_reduce(torch.ones(4))
        print("step", step, flush=True)
        time.sleep(0.05)
"""


def two_ranks(folder: Path, nodes: list[Node], timeout: float) -> list[tuple[subprocess.Popen[bytes], Path]]:
    """Ranks that add up until that fails. timeout: of their mesh, in seconds; below 11 of the store, too."""
    started = []
    for rank, node in enumerate(nodes):
        environment = {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node-0",
            "MASTER_PORT": "29500", "AUTOPAR_HEARTBEAT_TIMEOUT": "2", "AUTOPAR_FLIGHT": str(folder),
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        log = folder / f"log-{rank}"
        started.append((node.start([sys.executable, "-c", SUMS, str(timeout)], environment, log), log))
    return started


def test_a_cable_that_is_pulled(tmp_path: Path) -> None:
    """For half a second: nothing happens. For longer: each side names the other. Once it is back, they meet again. A
    rank that hears in time that it was missed says so."""
    with emulated_nodes(2) as nodes:
        ranks = two_ranks(tmp_path, nodes, 4.0)
        wait_until(lambda: b"step 5\n" in ranks[1][1].read_bytes(), ranks[0][0])
        nodes[1].cut()
        time.sleep(0.5)
        nodes[1].mend()
        steps = ranks[1][1].read_bytes().count(b"\n")
        wait_until(lambda: ranks[1][1].read_bytes().count(b"\n") > steps + 5, ranks[0][0])
        nodes[1].cut()
        assert [one.wait(PATIENCE) for one, _ in ranks] == [1, 1]
        assert b"adding up failed on rank 0: rank 1 did not respond" in ranks[0][1].read_bytes()
        assert b"adding up failed on rank 1: rank 0, which hosts the store, did not resp" in ranks[1][1].read_bytes()
        nodes[1].mend()
        ranks = two_ranks(tmp_path, nodes, 30.0)
        wait_until(lambda: b"step 5\n" in ranks[1][1].read_bytes(), ranks[0][0])
        nodes[1].cut()
        wait_until(lambda: b"on rank 0: rank 1 did not respond" in ranks[0][1].read_bytes(), ranks[1][0])
        nodes[1].mend()
        assert [one.wait(PATIENCE) for one, _ in ranks] == [1, 1]
        assert b"adding up failed on rank 1: rank 1 was stopped, or cut off from the othe" in ranks[1][1].read_bytes()


# --- under torchrun ---------------------------------------------------------------------------------------------

STATIC = ("--master-addr", "node-0", "--master-port", "29400")


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["disk", "memory"])
@pytest.mark.parametrize("how", [C10D, STATIC], ids=["c10d", "static"])
def test_a_node_that_is_cut_off_for_a_while(tmp_path: Path, how: tuple[str, ...], where: str) -> None:
    """Both sides end with an error that names the other; when the cable is back, they meet in a new round."""
    with training(tmp_path, 2, how, where=where) as run:
        run.until_step(1)
        run.cut(1, 25.0)
        run.ended()
        host = "rank 0" if how is C10D else "the launcher"
        run.check_errors("rank 1 did not respond", f"{host}, which hosts the store, did not respond")
        assert run.rounds() == 2 and run.loaded() == [(0, False), (2, where == "memory")]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_a_cable_that_is_pulled_for_a_moment(tmp_path: Path, seconds: float) -> None:
    """Nothing happens."""
    with training(tmp_path, 2) as run:
        run.until_step(1)
        run.cut(1, seconds)
        run.ended()
        assert run.rounds() == 1 and not run.errors()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_heard_and_does_not_hear(tmp_path: Path, node: int) -> None:
    with training(tmp_path, 2) as run:
        run.until_step(1)
        run.cut(node, 25.0, Node.deafen)
        run.ended()
        run.check_errors("rank 1 did not respond", "rank 0, which hosts the store, did not respond")
        assert run.rounds() == 2


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_node_that_is_switched_off(tmp_path: Path, where: str) -> None:
    """Its memory is lost; the run waits for it."""
    with training(tmp_path, 2, where=where) as run:
        run.until_step(1)
        run.nodes[1].power_off()
        time.sleep(10.0)
        run.nodes[1].boot()
        run.start(1)
        run.ended()
        run.check_errors("rank 1 did not respond")
        assert run.loaded() == [(0, False), (2, where == "memory")]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_run_goes_on_without_a_node_that_is_cut_off(tmp_path: Path, where: str) -> None:
    """``--nnodes 1:2``: with one node while the cable is out, then with both."""
    with training(tmp_path, 2, least="1:2", where=where, pause=6.0) as run:
        run.until_step(1)
        run.nodes[1].cut()
        run.until(lambda: ranks_in_turn(tmp_path) == [2, 1])
        run.nodes[1].mend()
        run.until(lambda: run.launched[1].poll() is not None or ranks_in_turn(tmp_path) == [2, 1, 2])
        if run.launched[1].poll() is not None:  # torchrun gives up after a minute without its store
            run.start(1)
        run.ended()
        assert ranks_in_turn(tmp_path) == [2, 1, 2]
        assert all(memory == (where == "memory") for _, memory in run.loaded()[1:])


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(17))
def test_three_faults_on_two_nodes(tmp_path: Path, seed: int) -> None:
    """Of 17 runs: 51 faults. Ranks are killed or stopped, and cables are pulled, at any call within autopar."""
    drawn, served = random.Random(seed), 0
    where, ways = "memory" if seed % 2 else "disk", (*SIGNALS, CABLE, CABLE)
    with training(tmp_path, 2, pause=0.0, seed=seed, faults=3, where=where, ways=ways) as run:
        while any(one.poll() is None for one in run.launched):
            for fault in sorted(tmp_path.glob("fault-*"))[served:]:
                served += 1
                if CABLE in fault.read_text():
                    run.nodes[1].cut()
                    with fault.open("a") as told:
                        told.write("cut\n")
                    time.sleep(drawn.choice([20.0, 30.0]))
                    run.nodes[1].mend()
            time.sleep(0.05)
        run.ended()
        assert served == 3, run.printed()
