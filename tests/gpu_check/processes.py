"""A check in forked processes: one, or as many ranks, for so many seconds.

The process that forks never asks CUDA for anything, not even whether there is a GPU: CUDA does not survive a fork.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from autopar.runtime.fault import errors
from autopar.runtime.fault.heartbeat import SILENT
from tests.gpu_check.rows import FAILED, Row, told
from tests.support.ranks import PR_SET_PDEATHSIG, _host_store

GRACE = SILENT + 4.0  # seconds for the others after a rank has failed
_ENDED = "ended"


@dataclass(frozen=True)
class Machine:
    """Where checks run. device: "cuda" or "cpu"; gpus: how many; count: the ranks that it plays; quick: fewer cases."""

    device: str
    count: int
    quick: bool = False
    gpus: int = 0

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True)
class Check:
    """``body(machine)`` yields rows, on every one of ``ranks`` processes; those of rank 0 count. The ranks in ``lost``
    are meant to end without finishing."""

    section: str
    name: str
    body: Callable[[Machine], Iterator[Row]]
    ranks: int = 1
    seconds: float = 120.0
    lost: tuple[int, ...] = ()


def run_checks(checks: Sequence[Check], machine: Machine, together: int) -> Iterator[tuple[Check, Row | float]]:
    """Rows as they come, some checks side by side; behind those of a check, its seconds. A failed row for each process
    that raises, dies or is not done in time."""
    waiting, running = list(checks), list[_World]()
    with tempfile.TemporaryDirectory(prefix="autopar-gpu-check-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < together:
                    running.append(_World(waiting.pop(0), machine, Path(folder)))
                wait([p for w in running for p in w.pending], max(0.0, min(w.end for w in running) - time.monotonic()))
                for world in list(running):
                    yield from ((world.check, row) for row in world.take())
                    if world.is_over():
                        yield from ((world.check, row) for row in world.late())
                        world.close()
                        running.remove(world)
                        yield world.check, time.monotonic() - world.start
        finally:
            for world in running:
                world.close()


def answer(body: Callable[[], Any]) -> Any:
    """What a call gives in a process of its own, which may use CUDA; None if it fails."""
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_answering, args=(body, there), daemon=True)
    process.start()
    there.close()
    found = None
    with suppress(EOFError, OSError):
        found = here.recv() if here.poll(60.0) else None
    process.kill()
    process.join()
    return found


def _answering(body: Callable[[], Any], pipe: Connection) -> None:
    with suppress(Exception):
        pipe.send(body())
    os._exit(0)


class _World:
    def __init__(self, check: Check, machine: Machine, folder: Path) -> None:
        self.check, self.start = check, time.monotonic()
        self.end = self.start + check.seconds
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        context = multiprocessing.get_context("fork")
        sys.stdout.flush(), sys.stderr.flush()
        self._processes: list[BaseProcess] = []
        self._pipes: dict[Connection, int] = {}
        self._control: Connection | None = None
        port = 0
        if check.ranks > 1:
            self._control, there = context.Pipe()
            self._processes.append(context.Process(target=_host_store, args=(there, [self._control]), daemon=True))
            self._processes[0].start()
            there.close()
            port = self._control.recv()
        for rank in range(check.ranks):
            here, there = context.Pipe(duplex=False)
            # no daemons: a rank may compile in processes of its own
            process = context.Process(
                target=_rank, args=(check, machine, rank, port, there, self._folder), daemon=False
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes[here] = rank
        self.pending = dict(self._pipes)

    def take(self) -> Iterator[Row]:
        """What is there to be read."""
        for pipe, rank in list(self.pending.items()):
            while pipe in self.pending and pipe.poll():
                message = self._message(pipe, rank)
                if isinstance(message, Row):
                    if rank == 0:
                        yield message
                    continue
                del self.pending[pipe]
                if message != _ENDED and rank not in self.check.lost:
                    self.end = min(self.end, time.monotonic() + GRACE)
                    yield self._failed(rank, message)

    def is_over(self) -> bool:
        """Whether all that are meant to end have ended, or the time is up."""
        return set(self.pending.values()) <= set(self.check.lost) or time.monotonic() >= self.end

    def late(self) -> Iterator[Row]:
        """A row for each that should have ended."""
        for rank in set(self.pending.values()) - set(self.check.lost):
            yield self._failed(rank, f"still running after {time.monotonic() - self.start:.0f} s{self._at(rank)}")

    def close(self) -> None:
        """End all processes, and what they have started themselves."""
        for process in self._processes:
            if process.pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        if self._control is not None:
            self._control.close()

    def _failed(self, rank: int, words: str) -> Row:
        told = f"rank {rank}: {words}" if self.check.ranks > 1 else words
        return Row(self.check.name, "the process", FAILED, words=told)

    def _message(self, pipe: Connection, rank: int) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            process = self._processes[rank - self.check.ranks]
            process.join(5)
            return f"died with exit code {process.exitcode}"

    def _at(self, rank: int) -> str:
        """Where a process is: the innermost lines of its stack."""
        with suppress(ProcessLookupError, OSError):
            os.kill(self._processes[rank - self.check.ranks].pid or 0, signal.SIGUSR1)
            time.sleep(0.3)
            lines = (self._folder / f"stack{rank}").read_text().splitlines()
            return "".join(f" <{line.strip().removeprefix('File ')}" for line in lines if "File" in line)[:600]
        return ""


def _rank(check: Check, machine: Machine, rank: int, port: int, pipe: Connection, folder: Path) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    stack = open(folder / f"stack{rank}", "w")  # noqa: SIM115 - stays open for the life of the process
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // check.ranks) if machine.is_gpu else 1)
    if check.ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(check.ranks), MASTER_PORT=str(port))
        os.environ.update(
            MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True", LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"]
        )
        if "lo" in (name for _, name in socket.if_nameindex()):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        for row in check.body(machine):
            pipe.send(row)
        message = _ENDED
    except BaseException as error:
        message = told(errors.named(error))
    pipe.send(message)
    sys.stdout.flush(), sys.stderr.flush()
    errors.close()
    os._exit(0)
