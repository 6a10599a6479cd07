"""Real gloo ranks for tests: a persistent pool of forked processes, one pool per number of ranks.

    results = run_ranks(4, body, arg, timeout=30)      # body(arg) on ranks 0..3, results in rank order

``body`` is a module-level function of a test module; it is sent by name and runs with the default process
group in place (gloo), one intra-op thread, and the same seed on every rank. A pool is forked once (0.1 s)
and reused; any failure or timeout retires it, because a failed gloo collective poisons the next ones, and so does a
function that a test had put into autopar when the pool was forked. A test
that catches such a failure on the ranks must retire the pool itself: `close_pools`. Ranks that still compute when
the timeout comes are not hung, the machine is slow: they get more time.

Arguments and results travel as plain pickles, so tensors are copied, never shared. The store is hosted by a
process of its own. It outlives any rank, which tests of dying ranks need; and its threads are not in the parent:
a rank that is forked while they hold a lock hangs for ever (seen with the store in the parent).
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from autopar.cache.own_sources import changed_autopar
from autopar.runtime.fault import errors
from tests.support.compile_cache import compiled_by_one
from tests.support.cpu_slots import take_turns_as_rank
from tests.support.preload import warm

GROUP_TIMEOUT = 30.0  # seconds until a collective whose peer is absent fails
GRACE = 2.0  # seconds the other ranks get to report after the first failure
PATIENCE = 5  # times the timeout, for ranks that compute: the machine is slow
LOOK, IDLE = 10.0, 0.5  # after the timeout, ranks that compute less than IDLE s in LOOK s stand still
PR_SET_PDEATHSIG = 1


@dataclass
class Outcome:
    """What became of one rank: a value, a traceback, or neither (it died, or it was still running)."""

    rank: int
    value: Any = None
    error: str | None = None
    lost: str | None = None  # "died with exit code -9", "still running after 30 s"

    @property
    def ok(self) -> bool:
        return self.error is None and self.lost is None


class RankError(AssertionError):
    """A rank failed. ``outcomes`` has what every rank did."""

    def __init__(self, outcomes: list[Outcome]):
        self.outcomes = outcomes
        lines = []
        for o in outcomes:
            if o.error:
                lines.append(f"--- rank {o.rank} raised\n{o.error}")
            elif o.lost:
                lines.append(f"--- rank {o.rank} {o.lost}")
        super().__init__(
            "ranks: " + ", ".join(str(o.rank) for o in outcomes if not o.ok) + " failed\n" + "\n".join(lines)
        )


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run ``fn(*args)`` on ``n`` gloo ranks; the results in rank order. Raises RankError with every traceback."""
    outcomes = rank_outcomes(n, fn, *args, timeout=timeout)
    if not all(o.ok for o in outcomes):
        raise RankError(outcomes)
    return [o.value for o in outcomes]


def rank_outcomes(
    n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, grace: float = GRACE
) -> list[Outcome]:
    """As run_ranks, but failures come back as outcomes: for tests of ranks that die or raise.

    After the first failure the others get ``grace`` seconds.
    """
    pool = _POOLS.get(n) or _Pool(n)
    _POOLS[n] = pool
    try:
        outcomes = pool.run(fn, args, timeout, grace)
    except BaseException:  # of a test that is ended for its time, too
        print("\n".join(f"--- rank {rank} is here\n{pool.stack(rank)}" for rank in range(n)))
        _retire(n)
        raise
    if not all(o.ok for o in outcomes) or pool.changed:
        _retire(n)
    return outcomes


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The words of a ValueError, on a rank, too: nothing may have been sent."""
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "no error"


_POOLS: dict[int, _Pool] = {}


def _retire(n: int) -> None:
    pool = _POOLS.pop(n, None)
    if pool:
        pool.kill()


def retire_older_than(n: int, moment: float) -> None:
    """End the pool of n ranks if it was forked before that `time.monotonic`: it has not inherited what came later."""
    if n in _POOLS and _POOLS[n].born < moment:
        _retire(n)


@atexit.register
def close_pools() -> None:
    """End all pools (also called at interpreter exit)."""
    for n in list(_POOLS):
        _retire(n)


class _Deadline:
    """When ranks that have not answered are given up: after ``timeout`` seconds, if they stand still; ranks that
    compute, on a machine that others use, get up to `PATIENCE` times as long."""

    def __init__(self, timeout: float, processes: Sequence[int]) -> None:
        self._start, self._timeout, self._processes = time.monotonic(), timeout, processes
        self._end = self._start + timeout
        self._before = self._used = _cpu_seconds(processes)
        self._grace: float | None = None

    def next_look(self) -> float:
        """Seconds to wait for answers."""
        return max(0.0, self._end - time.monotonic())

    def is_over(self) -> bool:
        """At the end of ``next_look``: whether they stand still, or have had their time."""
        now, before = time.monotonic(), self._used
        self._used = _cpu_seconds(self._processes)
        if self._grace is not None or self._used - before < IDLE or now > self._start + PATIENCE * self._timeout:
            return True
        self._end = now + LOOK
        return False

    def shorten(self, grace: float) -> None:
        """A rank has failed: the others get so many seconds."""
        if self._grace is None:
            self._grace, self._end = grace, min(self._end, time.monotonic() + grace)

    def __str__(self) -> str:
        if self._grace is not None:
            return f"{self._grace:.0f} s after another rank failed"
        seconds, load = time.monotonic() - self._start, os.getloadavg()[0]
        used = _cpu_seconds(self._processes) - self._before
        return f"after {seconds:.0f} s, in which the ranks computed for {used:.0f} s (load {load:.0f})"


def _cpu_seconds(processes: Sequence[int]) -> float:
    """What they have computed so far."""
    found = 0.0
    for process in processes:
        with suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


class _Pool:
    def __init__(self, n: int):
        assert not torch.cuda.is_initialized(), "a process that has initialised CUDA cannot be forked"
        warm()
        self.n, self.born = n, time.monotonic()
        self.changed = changed_autopar()  # what a test has put into autopar for as long as it runs: ranks inherit it
        self.folder = tempfile.TemporaryDirectory(prefix="autopar-ranks-")
        self.pipes: list[Connection] = []
        self.processes, self.tasks = [], 0
        context = multiprocessing.get_context("fork")
        sys.stdout.flush(), sys.stderr.flush()  # else each child prints the parent's buffer again
        inherited = [c for p in _POOLS.values() for c in p.pipes]
        self.control, there = context.Pipe()
        self.host = context.Process(target=_host_store, args=(there, [*inherited, self.control]), daemon=True)
        self.host.start()
        there.close()
        port = self.control.recv()
        for rank in range(n):
            here, there = context.Pipe()
            process = context.Process(
                target=_worker,
                args=(rank, n, port, there, [*inherited, *self.pipes, here, self.control], self.folder.name),
                daemon=True,
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float, grace: float) -> list[Outcome]:
        module = sys.modules[fn.__module__]
        assert "<locals>" not in fn.__qualname__, f"ranks: {fn.__qualname__} must be a module-level function"
        where = (fn.__module__, getattr(module, "__file__", None), fn.__qualname__)
        self.tasks += 1
        folder = Path(self.folder.name) / f"task{self.tasks}"
        task = pickle.dumps((where, sys.path, os.getcwd(), folder, pickle.dumps(args)))
        self._signal(signal.SIGCONT)
        outcomes = [Outcome(rank) for rank in range(self.n)]
        pending = {}
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send_bytes(task)
                pending[pipe] = rank
            except OSError:
                outcomes[rank].lost = self._fate(rank)
        clock = _Deadline(timeout, [p.pid for p in self.processes if p.pid is not None])
        while pending:
            ready = wait(list(pending), clock.next_look())
            if not ready and clock.is_over():
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                outcome = outcomes[pending.pop(pipe)]
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                    outcome.value, outcome.error = (value, None) if ok else (None, value)
                except (EOFError, OSError):
                    outcome.lost = self._fate(outcome.rank)
                if not outcome.ok:
                    clock.shorten(grace)
        for rank in pending.values():
            outcomes[rank].lost = f"was still running {clock}\n{self.stack(rank)}"
        if all(o.ok for o in outcomes):
            self._signal(signal.SIGSTOP)
        return outcomes

    def _signal(self, number: int) -> None:
        """To all ranks. Those that have nothing to do are suspended: gloo and what watches the others would wake them
        a hundred times per second."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)

    def _fate(self, rank: int) -> str:
        self.processes[rank].join(2)
        return f"died with exit code {self.processes[rank].exitcode}"

    def stack(self, rank: int) -> str:
        """Where a stuck rank is: its Python stack, written by faulthandler on SIGUSR1."""
        try:
            os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        except ProcessLookupError:
            return ""
        time.sleep(0.2)
        return (Path(self.folder.name) / f"stack{rank}").read_text()

    def kill(self) -> None:
        for process in [*self.processes, self.host]:
            process.kill()
        for process in [*self.processes, self.host]:
            process.join(5)
        for pipe in [*self.pipes, self.control]:
            pipe.close()
        self.folder.cleanup()


def one_device() -> type[dist.ProcessGroupGloo]:
    """gloo's process groups, all with one device. Else each group of a rank has one of its own, whose thread looks up
    a hundred times per second as long as the pool lives: a tenth of all processor time of the suite."""
    device = dist.ProcessGroupGloo.create_default_device()

    class OnOneDevice(dist.ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, **_: Any) -> None:
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    return OnOneDevice


def _host_store(control: Connection, inherited: list[Connection]) -> None:
    """A process that holds the store of one pool, until the pool's end of the pipe closes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in inherited:
        other.close()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    control.send(store.port)
    try:
        control.recv()
    except (EOFError, OSError):
        os._exit(0)


def _worker(rank: int, n: int, port: int, pipe: Connection, inherited: list[Connection], folder: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # die with the parent, however it dies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    gc.freeze()  # looking through what is inherited would copy it
    for other in inherited:
        other.close()
    stack = open(f"{folder}/stack{rank}", "w")  # noqa: SIM115 - stays open for the life of the process
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    torch.set_num_threads(1)  # a forked OpenMP pool is unusable; one thread needs none
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # no rank hosts the store
    os.environ.update(MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(n), OMP_NUM_THREADS="1")
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=GROUP_TIMEOUT))
    distributed_c10d.ProcessGroupGloo = one_device()  # type: ignore[misc]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=n, timeout=datetime.timedelta(seconds=GROUP_TIMEOUT)
    )
    take_turns_as_rank()
    while True:
        try:
            task = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        reply = _answer(task)
        sys.stdout.flush(), sys.stderr.flush()
        try:
            pipe.send_bytes(reply)
        except OSError:
            os._exit(0)


def _answer(task: bytes) -> bytes:
    try:
        where, path, current, folder, packed = pickle.loads(task)
        sys.path[:] = path  # before the arguments: unpickling them may import test modules
        os.chdir(current)
        fn = _find(*where)
        args = pickle.loads(packed)
        for mine in errors._boards.values():
            mine.clear()  # what an earlier test caught explains nothing here
        torch.default_generator.manual_seed(0)  # torch.manual_seed also formats a stack trace, for CUDA
        random.seed(0)
        torch.set_default_dtype(torch.float32)
        compiled_by_one(folder, dist.get_rank())
        return pickle.dumps((True, fn(*args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _find(name: str, file: str | None, qualname: str) -> Any:
    """The function, from the module of that name and file (imported here if the fork was older than it)."""
    module = sys.modules.get(name)
    if module is None or getattr(module, "__file__", None) != file:
        try:
            module = importlib.import_module(name)
        except ImportError:
            module = None
    if module is None or getattr(module, "__file__", None) != file:
        assert file, f"ranks: cannot import {name}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part)
    return found
