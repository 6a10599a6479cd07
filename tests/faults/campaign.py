"""Kill, stop, raise or delay any rank at any moment: every other rank ends in an error that names it, and in time.

    python -m tests.faults.campaign --seed 7 --count 200 --at-once 3

Each case is a world of its own: forked ranks, with a store that rank 0 or another process hosts. It is right if

  - every other rank ends, within the timeout and 3 s of the fault (times --slack, on a machine that others use);
  - its error names the rank, and what this rank was doing;
  - the folder holds the old checkpoint or the new one, whole;
  - and after a delay, which is shorter than the timeout, losses and weights are those of one process. So they are
    after an error that autopar handles, as where it compares objects whose == may raise: then no rank ends.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.checkpoint.checkpoint_dir import checkpoint_at, read_manifest
from autopar.runtime.checkpoint.hf_atomic_write import AtomicFolder
from autopar.runtime.checkpoint.tensor_storage import SavedTensors
from autopar.runtime.fault import errors as failures
from tests.faults.cases import ACTIONS, PHASES, SUBJECTS, Case, make_cases, model_of
from tests.faults.rank import alone, prepare, saved, train
from tests.support.preload import warm

TIMEOUT, GRACE = 6.0, 3.0
STARTING = 60.0  # seconds until the fault has happened
EXACT = 1e-10


@dataclass
class Result:
    """What became of a case. ``seconds``: from the fault to the error of the last other rank."""

    case: Case
    seconds: float
    errors: dict[int, str]
    problems: list[str] = field(default_factory=list)


class World:
    """The running ranks of one case."""

    def __init__(self, case: Case, slack: float, timeout: float) -> None:
        self.case, self.slack, self.timeout = case, slack, timeout
        prepare(case)
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-faults-")
        self.folder = Path(self._folder.name)
        self._old = {name: torch.zeros_like(value) for name, value in model_of(case.subject).state_dict().items()}
        with AtomicFolder(self.folder / "saved", 1) as draft:
            draft.add(self._old, {"format": "pt"})
            draft.publish({}, [])
        warm()
        context, port = multiprocessing.get_context("fork"), free_port()
        self._host = None if case.hosts else context.Process(target=_host, args=(port,), daemon=True)
        if self._host is not None:
            self._host.start()
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(SUBJECTS[case.subject].ranks):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(case, rank, port, timeout, self.folder, there, here), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._ends: dict[int, tuple[float, Any]] = {}
        self._start = time.time()

    def finished(self) -> bool:
        """Whether every rank that can end has, or the time is up."""
        for rank, pipe in enumerate(self._pipes):
            if rank not in self._ends and pipe.poll():
                with suppress(EOFError, OSError):
                    self._ends[rank] = pipe.recv()
                self._ends.setdefault(rank, (time.time(), "died"))
        others = set(range(len(self._pipes))) - ({self.case.victim} if self.case.action in ("kill", "stop") else set())
        struck = self._struck()
        limit = self._start + STARTING * self.slack if struck is None else struck + self._limit() + 5
        return others <= self._ends.keys() or time.time() > limit

    def close(self) -> Result:
        """Judge, and remove everything."""
        try:
            return self._judged()
        finally:
            for process in [*self._processes, *([self._host] if self._host else [])]:
                process.kill()
                process.join()
            self._folder.cleanup()

    def _limit(self) -> float:
        return (self.timeout + GRACE) * self.slack

    def _struck(self) -> float | None:
        with suppress(OSError, ValueError):
            return float((self.folder / "struck").read_text())
        return None

    def _judged(self) -> Result:
        case, struck = self.case, self._struck()
        others = [rank for rank in range(len(self._pipes)) if rank != case.victim]
        ends = {rank: self._ends[rank] for rank in others if rank in self._ends}
        errors = {rank: end for rank, (_, end) in ends.items() if isinstance(end, str)}
        seconds = max((at for at, _ in ends.values()), default=0.0) - (struck or 0.0)
        result = Result(case, seconds, errors)
        if struck is None:
            result.problems.append(f"the fault never happened: {errors}")
            return result
        result.problems += [f"rank {rank} hangs" for rank in others if rank not in ends]
        goes_on = case.action == "delay" or self._handled()
        if goes_on:
            result.problems += self._wrong()
        else:
            result.problems += [f"rank {rank} ended without an error" for rank in ends if rank not in errors]
            result.problems += [f"rank {r}: {text}" for r, text in errors.items() if not _names(text, case.victim)]
            late = {rank: at - struck for rank, (at, _) in ends.items() if at - struck > self._limit()}
            result.problems += [f"rank {rank} took {took:.1f} s" for rank, took in late.items()]
        result.problems += self._torn(must_be_new=goes_on)
        result.problems += self._not_saved() if goes_on else []
        return result

    def _handled(self) -> bool:
        """Whether the error that was raised has not ended its own rank."""
        _, end = self._ends.get(self.case.victim, (0.0, ""))
        return self.case.action == "raise" and not isinstance(end, str)

    def _not_saved(self) -> list[str]:
        """Whether the run has a checkpoint whose files are as its manifest says; in memory, all parts of one."""
        if SUBJECTS[self.case.subject].memory:
            parts = list(self.folder.glob("memory/*/*.json"))
            return [] if len(parts) == len(self._pipes) else [f"{len(parts)} parts in memory"]
        try:
            checkpoint, _ = checkpoint_at(self.folder / "run")
            saved = SavedTensors(checkpoint, read_manifest(checkpoint))
            saved.check(saved.under(""))
        except ValueError as error:
            return [str(error)]
        return []

    def _wrong(self) -> list[str]:
        losses, _ = _alone(self.case.subject)
        found = {rank: end for rank, (_, end) in self._ends.items()}
        return [
            f"rank {rank}: {end}"
            for rank, end in found.items()
            if isinstance(end, str) or max(abs(a - b) for a, b in zip(end, losses, strict=True)) > EXACT
        ]

    def _torn(self, must_be_new: bool) -> list[str]:
        found, (_, new) = saved(self.folder / "saved"), _alone(self.case.subject)
        if not must_be_new and _same(found, self._old):
            return []
        return [] if _same(found, new) else ["the saved checkpoint is neither the old one nor the new one"]


def _names(text: str, victim: int) -> bool:
    """Whether an error says which rank it was, and what this rank was doing."""
    collective = rf"CollectiveError: comm: .+ failed on rank \d+: .*\brank {victim}\b"
    return re.search(rf"{collective}|CheckpointError: save: .*\brank {victim}\b", text) is not None


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        float((found[name] - value).abs().max()) < EXACT for name, value in expected.items()
    )


@functools.cache
def _alone(subject: str) -> tuple[list[float], dict[str, Tensor]]:
    return alone(subject)


def run(
    cases: Sequence[Case], at_once: int, slack: float = 1.0, timeout: float = TIMEOUT, verbose: bool = False
) -> list[Result]:
    """All cases, some of them side by side: most of a case is waiting."""
    waiting, running, results = list(cases), [], []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(World(waiting.pop(0), slack, timeout))
        for world in [w for w in running if w.finished()]:
            running.remove(world)
            results.append(world.close())
            if verbose:
                told = "; ".join(results[-1].problems) or next(iter(results[-1].errors.values()), "all right")
                print(f"{len(results)} {results[-1].case}: {results[-1].seconds:.1f} s: {told}", flush=True)
        time.sleep(0.02)
    return results


# --- processes ------------------------------------------------------------------------------------------


def free_port() -> int:
    """A port for a store. Not one that the system gives to any process: before the store takes it, the rank of
    another world might, and a client would wait without end for the answers of a stranger."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", random.SystemRandom().randrange(lowest // 2, lowest)))
            return int(s.getsockname()[1])


def _alive_with_parent() -> None:
    os.setsid()  # of its own: a stopped process is continued when the shell that started all of them goes away
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    torch.set_num_threads(1)
    gc.freeze()  # looking through what is inherited would copy it


def _host(port: int) -> None:
    _alive_with_parent()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert store
    time.sleep(3600)


def _rank(case: Case, rank: int, port: int, timeout: float, folder: Path, pipe: Connection, other: Connection) -> None:
    """As a process of `autopar.launch` or of torchrun: an error ends it, in words that name ranks."""
    _alive_with_parent()
    other.close()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the end of the process closes it
    os.dup2(sys.stderr.fileno(), 2)
    world = SUBJECTS[case.subject].ranks
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", TORCHELASTIC_RESTART_COUNT="0")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE=str(not case.hosts), AUTOPAR_MEMORY=str(folder / "memory"))
    end: Any
    try:
        end = train(case, rank, folder, timeout)
    except BaseException as error:
        error = failures.named(error)
        end = f"{type(error).__name__}: {error}"
    pipe.send((time.time(), end))
    failures.close()
    os._exit(0)


# --- by hand --------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """Right of all, by phase and action, and the longest time until the last rank had ended."""
    lines = ["| | " + " | ".join(ACTIONS) + " |", "|---|" + "---|" * len(ACTIONS)]
    for phase in PHASES:
        cells = []
        for action in ACTIONS:
            mine = [r for r in results if (r.case.phase, r.case.action) == (phase, action)]
            right = sum(not r.problems for r in mine)
            slowest = max((r.seconds for r in mine), default=0.0)
            cells.append(f"{right} of {len(mine)}" + ("" if action == "delay" else f", {slowest:.1f} s"))
        lines.append(f"| {phase} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--slack", type=float, default=1.0)
    parser.add_argument("--timeout", type=float, default=TIMEOUT)
    parser.add_argument("--subjects", help="those with these words, with commas between", default="")
    parser.add_argument("--only", type=int, help="the number of one case")
    given = parser.parse_args()
    words = given.subjects.split(",")
    cases = make_cases(given.seed, given.count, [name for name in SUBJECTS if any(word in name for word in words)])
    results = run(cases if given.only is None else [cases[given.only]], given.at_once, given.slack, given.timeout, True)
    wrong = [r for r in results if r.problems]
    print(table(results))
    print(f"{len(results) - len(wrong)} of {len(results)} right; by subject:", Counter(r.case.subject for r in wrong))
    for result in wrong:
        print(f"{cases.index(result.case)}: {result.case}: {result.problems}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
