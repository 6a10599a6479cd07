"""Runs of several replicas, each a world of forked ranks, of which some are killed at chosen moments and come back.

    done = run(Case(faults=[Fault(2, step=3, moment=0.4)], back=[2]))

A moment is a share of the calls that a rank makes in a step, from before `train_step` to after the optimizer: 0.4 may
be in the backward. What became of every start of a replica is in the result.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.runtime.fault import heartbeat
from autopar.runtime.replicas import lookout, replicas
from autopar.runtime.replicas.replica_group import ReplicaGroup
from tests.support.preload import warm
from tests.support.ranks import PR_SET_PDEATHSIG

COUNT, ROWS = 4, 4
SILENT, BEAT = 2.0, 0.25  # seconds: shorter than those of users
PATIENCE = 150.0  # seconds of a run, on a machine that others use


class Model(nn.Module):
    """With dropout, targets to ignore, a term of the loss that depends on weights alone, and buffers: a count of steps,
    one of targets, and the running mean of the inputs, from which they are measured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(8, 16), nn.Linear(16, 6), nn.Dropout(0.2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("targets", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            self.steps.add_(1)
            self.targets = self.targets + (labels != -100).sum()
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        out = self.second(self.drop(torch.tanh(self.first(x - self.mean))))
        penalty = 0.01 * self.first.weight.pow(2).sum()
        return nn.functional.cross_entropy(out, labels, ignore_index=-100) + penalty


def shard_of(step: int, shard: int) -> dict[str, Tensor]:
    """A shard of a batch; shards have other numbers of targets."""
    drawn = torch.Generator().manual_seed(100 * step + shard)
    x = torch.randn(ROWS, 8, generator=drawn, dtype=torch.float64)
    labels = torch.randint(0, 6, (ROWS,), generator=drawn)
    labels[: shard % ROWS] = -100
    return {"x": x, "labels": labels}


def whole_batch(step: int, shards: Sequence[int], parts: int = 1) -> dict[str, Tensor]:
    """The batch in the order of its examples: the first part of each shard, of the first rank of dp, comes first."""
    found = [shard_of(step, shard) for shard in shards]
    return {name: torch.cat([x[name].chunk(parts)[i] for i in range(parts) for x in found]) for name in found[0]}


@dataclass(frozen=True)
class Fault:
    """A rank of a replica gets a signal in a step, or in the first one after it; "give": when it gives its state to
    another, "take": when it has received a part of one. start: which start of the replica it is."""

    index: int
    step: int
    moment: float | str
    rank: int = 0
    signal: int = signal.SIGKILL
    start: int = 0


@dataclass(frozen=True)
class Case:
    """``back``: replicas that are started anew, ``away`` seconds after they have died, each time that they are in it.
    pause: seconds of each step, in the place of a larger model. calls: of a rank in a step, see `calls_of_a_step`.
    store_ends: seconds after which the store is killed. resumed: seconds after which a stopped process goes on. slow:
    (replica, step, seconds) of one that waits for its data. least: min_replicas. patience: seconds of a mesh's
    timeout. odd: (replica, start) with another min_replicas."""

    faults: Sequence[Fault] = ()
    back: Sequence[int] = ()
    ranks: int = 1  # of each replica
    axis: str = "tp"  # of the ranks; "dp": with zero=3
    steps: int = 8
    on_loss: str = "repeat"
    pause: float = 0.0
    calls: int = 0
    away: float = 0.0
    store_ends: float = 0.0
    resumed: float = 0.0
    slow: tuple[int, int, float] = (-1, -1, 0.0)
    least: int = 1
    odd: tuple[int, int] = (-1, 0)
    patience: float = 60.0
    folder: str = ""  # of checkpoints, one every five steps


@dataclass
class Start:
    """One start of a replica. ``losses``: by step. ``ends``: by rank, "done" or an error; a killed one has none."""

    index: int
    losses: dict[int, float] = field(default_factory=dict)
    members: dict[int, list[int]] = field(default_factory=dict)  # that made a step
    times: dict[int, float] = field(default_factory=dict)  # of the end of a step
    ends: dict[int, str] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Done:
    starts: list[Start]

    def of(self, index: int) -> list[Start]:
        return [start for start in self.starts if start.index == index]


class _World:
    """The processes of one run."""

    def __init__(self, case: Case) -> None:
        warm()
        self.case, self.done = case, Done([])
        self._context = multiprocessing.get_context("fork")
        self._control, there = self._context.Pipe()
        self._host = self._context.Process(target=_host_stores, args=(there, self._control), daemon=True)
        self._host.start()
        there.close()
        self._port = self._new_store()
        self._pipes: dict[Connection, tuple[Start, int, BaseProcess]] = {}
        self._away: dict[int, float] = {}  # replicas that come back, and when

    def _new_store(self) -> int:
        self._control.send("store")
        port: int = self._control.recv()
        return port

    def start(self, index: int) -> None:
        number, port = len(self.done.of(index)), self._new_store()
        start = Start(index)
        self.done.starts.append(start)
        case = replace(self.case, least=self.case.least + 1) if (index, number) == self.case.odd else self.case
        for rank in range(self.case.ranks):
            here, there = self._context.Pipe(duplex=False)
            place = index, rank, number
            fault = next((f for f in self.case.faults if (f.index, f.rank, f.start) == place), None)
            inherited = [here, self._control, *self._pipes]
            given = (case, fault, index, rank, port, self._port, there, inherited)
            process = self._context.Process(target=_rank, args=given, daemon=True)
            process.start()
            there.close()
            self._pipes[here] = start, rank, process

    def watch(self) -> None:
        """Until all have ended."""
        begun, resume = time.monotonic(), 0.0
        while self._pipes and time.monotonic() < begun + PATIENCE:
            for pipe in wait(list(self._pipes), 0.1):
                assert isinstance(pipe, Connection)
                self._heard(pipe)
            for index in [index for index, moment in self._away.items() if time.monotonic() > moment]:
                del self._away[index]
                self.start(index)
            if self.case.store_ends and time.monotonic() > begun + self.case.store_ends:
                self._host.kill()
            if self.case.resumed and (stopped := [p for _, _, p in self._pipes.values() if _is_stopped(p.pid or 0)]):
                resume = resume or time.monotonic() + self.case.resumed
                for process in stopped if time.monotonic() > resume else ():
                    os.kill(process.pid or 0, signal.SIGCONT)

    def _heard(self, pipe: Connection) -> None:
        start, rank, process = self._pipes[pipe]
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            del self._pipes[pipe]
            process.join(5)
            start.ends.setdefault(rank, f"exit code {process.exitcode}")
            ended = all(other is not start for other, _, _ in self._pipes.values())
            done = "done" in start.ends.values()
            if ended and not done and len(self.done.of(start.index)) <= list(self.case.back).count(start.index):
                self._away[start.index] = time.monotonic() + self.case.away
            return
        if kind == "end":
            start.ends[rank] = value
        elif kind == "weights":
            start.weights = value
        else:
            step, start.losses[step], start.members[step], start.times[step] = value[0], *value[1:]

    def close(self) -> None:
        for process in (*(p for _, _, p in self._pipes.values()), self._host):
            process.kill()
            process.join(5)


def run(case: Case) -> Done:
    """Raises AssertionError for a run that does not end."""
    if case.faults and not case.calls:
        case = replace(case, calls=calls_of_a_step(case.ranks, case.axis))
    world = _World(case)
    try:
        for index in range(COUNT):
            world.start(index)
        world.watch()
        assert not world._pipes, f"still running: {[(s.index, rank, s.losses) for s, rank, _ in world._pipes.values()]}"
        return world.done
    finally:
        world.close()


@functools.cache
def calls_of_a_step(ranks: int, axis: str) -> int:
    """How many calls the first rank of a replica makes in a step."""
    done = run(Case(ranks=ranks, axis=axis, steps=4, calls=1))
    return int(done.starts[0].weights["calls"])


@functools.cache
def one_process(steps: int, absent_from: int = 10**9, parts: int = 1) -> tuple[dict[int, float], dict[str, Tensor]]:
    """Losses and weights of one process that trains on all shards, from step ``absent_from`` on on all but the last.
    parts: of each shard, over ranks of dp."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    warm()
    process = context.Process(target=_alone, args=(steps, absent_from, parts, there), daemon=True)
    process.start()
    found: tuple[dict[int, float], dict[str, Tensor]] = here.recv()
    process.join()
    return found


def _alone(steps: int, absent_from: int, parts: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    model, optimizer, scheduler = _made(autopar.init_mesh("cpu", 30.0, dp=1), 0, 1, whole_batch(0, range(COUNT)))
    losses = {}
    for step in range(steps):
        batch = whole_batch(step, range(COUNT - (step >= absent_from)), parts)
        losses[step] = float(model.train_step(**batch))
        _update(model, optimizer, scheduler)
    pipe.send((losses, {name: x.numpy() for name, x in model.full_state_dict().items()}))
    os._exit(0)


def _made(mesh: Any, seed: int, count: int, example: dict[str, Tensor]) -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    zero = 3 if "dp" in mesh.mesh_dim_names else 0
    model = autopar.parallelize(Model().double(), mesh, example_batch=example, replicas=count, zero=zero)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def _update(model: Any, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    model.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def _host_stores(control: Connection, other: Connection) -> None:
    """A process that holds all stores, as launchers do, and outlives the ranks."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    other.close()
    stores = []
    with suppress(EOFError, OSError):
        while control.recv():
            stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            control.send(stores[-1].port)
    os._exit(0)


def _is_stopped(process: int) -> bool:
    with suppress(OSError), open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"
    return False


def _rank(
    case: Case, fault: Fault | None, index: int, rank: int, port: int, store: int, pipe: Connection,
    inherited: list[Connection],
) -> None:  # fmt: skip
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    for module in (heartbeat, lookout, replicas):
        vars(module).update(SILENT=SILENT, BEAT=BEAT)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.ranks), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(case.ranks), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(GLOO_SOCKET_IFNAME="lo", AUTOPAR_FLIGHT="off")
    try:
        _train(case, fault, index, rank, f"127.0.0.1:{store}", pipe)
        pipe.send(("end", "done"))
    except BaseException as error:
        pipe.send(("end", f"{type(error).__name__}: {error}"))
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)


def _train(case: Case, fault: Fault | None, index: int, rank: int, store: str, pipe: Connection) -> None:
    mesh = autopar.init_mesh("cpu", case.patience, **{case.axis: case.ranks})

    def batch_of(step: int, shard: int) -> dict[str, Tensor]:
        if (index, step) == case.slow[:2] and shard == index:
            time.sleep(case.slow[2])
        return {name: x.chunk(mesh.data_size)[mesh.data_rank] for name, x in shard_of(step, shard).items()}

    made = _made(
        mesh, seed=index, count=COUNT, example=batch_of(0, 0)
    )  # other weights than the first replica, until it gives its own
    model, optimizer, scheduler = made
    options: dict[str, Any] = {"on_loss": case.on_loss, "min_replicas": case.least}
    runs = autopar.Replicas(model, optimizer, scheduler=scheduler, index=index, store=store, **options)
    calls = 0
    while runs.step < case.steps:
        if fault is not None and runs.step >= fault.step:
            _arm(fault, case.calls)
            fault = None
        if case.calls == 1 and runs.step == case.steps - 1:
            sys.setprofile(_Counter(lambda: None, 10**9))
        loss = float(runs.train_step(batch_of))
        _update(model, optimizer, scheduler)
        if isinstance(counter := sys.getprofile(), _Counter):
            calls = counter.calls
        if case.folder and runs.is_first and runs.step % 5 == 0:
            autopar.save(case.folder, model, optimizer, scheduler=scheduler, step=runs.step)
        time.sleep(case.pause)
        if rank == 0:
            pipe.send(("step", (runs.step - 1, loss, runs.members, time.time())))
    sys.setprofile(None)
    whole = {name: x.numpy() for name, x in model.full_state_dict().items()}
    if rank == 0:
        pipe.send(("weights", whole if case.calls != 1 else {"calls": calls}))
    runs.close()


class _Counter:
    """Counts the calls of this thread; at the last one ``strike`` is called."""

    def __init__(self, strike: Callable[[], None], last: int) -> None:
        self.calls, self._strike, self._last = 0, strike, last

    def __call__(self, frame: object, event: str, _: object) -> None:
        if event in ("call", "c_call"):
            self.calls += 1
            if self.calls == self._last:
                sys.setprofile(None)
                self._strike()


def _arm(fault: Fault, calls: int) -> None:
    def strike(*_: Any) -> None:
        os.kill(os.getpid(), fault.signal)

    if fault.moment == "give":
        vars(replicas)["give_state"] = strike
    elif isinstance(fault.moment, str):
        receive, seen = ReplicaGroup.receive, itertools.count(1)
        ReplicaGroup.receive = lambda *of: strike() if next(seen) == 5 else receive(*of)
    else:
        sys.setprofile(_Counter(strike, max(1, int(fault.moment * calls))))
