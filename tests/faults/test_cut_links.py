"""Two nodes under torchrun whose cable is pulled, or one of which is switched off: the run resumes, with the losses of
an undisturbed one."""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.restarted_run import CABLE, SIGNALS
from tests.faults.test_restarts import agent, check, ended, launcher, noted, ranks_in_turn
from tests.support.emulated_nodes import Node, emulated_nodes

PATIENCE = 400.0  # seconds of a run, on a machine that others use
C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "node-0:29400",
        "--rdzv-conf", "last_call_timeout=10,keep_alive_interval=3,keep_alive_max_attempt=3")  # fmt: skip


class Run:
    """A training run on nodes. ``ways``: how ranks come to grief, see `restarted_run`."""

    def __init__(self, folder: Path, nodes: list[Node], how: tuple[str, ...] = C10D, least: str = "2", **run: object):
        self.folder, self.nodes, self._how, self._least, self._run = folder, nodes, how, least, run
        self.launched: list[subprocess.Popen[bytes]] = []
        for number in range(len(nodes)):
            self.start(number)
            time.sleep(1.0)  # the first hosts the rendezvous

    def start(self, number: int) -> None:
        """Start the launcher of a node."""
        how = ("--nnodes", self._least, "--nproc-per-node", "1", "--node-rank", str(number), *self._how)
        command, environment = launcher(self.folder, *how, **self._run)
        log = self.folder / f"log-{len(self.launched)}"
        self.launched.append(self.nodes[number].start(command, environment, log))

    def until(self, happens: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not happens():
            assert time.monotonic() < end and self.launched[0].poll() is None, self.printed()
            time.sleep(0.05)

    def until_step(self, step: int, ranks: int = 2) -> None:
        self.until(lambda: any(n["what"] == "step" and (n["step"], n["ranks"]) == (step, ranks) for n in self.notes()))

    def notes(self) -> list[dict[str, object]]:
        return noted(self.folder)

    def rounds(self) -> int:
        return sum(note["what"] == "started" for note in self.notes())

    def ended(self) -> None:
        """Wait until all launchers have ended, and check the losses."""
        self.until(lambda: all(one.poll() is not None for one in self.launched[1:]))
        self.launched[0].wait(PATIENCE)
        assert {one.returncode for one in self.launched} <= {0, -signal.SIGKILL}, self.printed()
        assert self.launched[0].returncode == 0, self.printed()
        check(self.notes())
        for note in self.notes():
            if note["what"] == "step" and note["ranks"] == 2:
                assert note["loss"] == undisturbed()[int(str(note["step"]))], note

    def printed(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(self.folder.glob("log-*")))

    def errors(self) -> list[str]:
        """The errors by which ranks have ended, in one order."""
        return sorted(set(re.findall(r"^.*CollectiveError: (comm: .*)$", self.printed(), re.MULTILINE)))

    def close(self) -> None:
        for one in self.launched:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


@functools.cache
def undisturbed() -> dict[int, str]:
    """The losses of two ranks by step, in hexadecimal."""
    with tempfile.TemporaryDirectory() as name:
        ended(agent(Path(name), "--standalone", "--nproc-per-node", "2"))
        return {note["step"]: note["loss"] for note in noted(Path(name)) if note["what"] == "step"}
