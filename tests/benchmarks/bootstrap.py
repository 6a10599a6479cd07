"""How a world of any size starts, on one machine: what ranks ask of the store, how long that takes, their groups.

A few ranks do what each rank does, with the code that they run anyway: they make their groups (over torch's fake
backend, which connects to nobody), agree on what `parallelize` agrees on, and make a call over and over. What one of
them asks of the store, a real TCPStore, a crowd asks for all others. So the seconds are those of all ranks together
through one store, on this machine; they do not include connections between ranks, imports and compiling.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # a backend that connects to nobody
from torch.distributed import distributed_c10d

from autopar.adapters.distributed import default_store, own_client
from autopar.attention.exchanges import WAYS
from autopar.ir.mesh import Mesh
from autopar.runtime.consistency.rank_checks import RankCheck, agree_on, agree_on_arguments, agree_on_call, everywhere
from autopar.runtime.fault import errors
from autopar.runtime.fault.errors import board
from autopar.runtime.fault.heartbeat import beat_of
from autopar.runtime.fault.store_client import StoreClient
from autopar.runtime.mesh.process_groups import Groups, init_mesh

THREADS = 16  # of the crowd
TIMEOUT = 300.0  # seconds


@dataclass(frozen=True)
class Questions:
    """What one rank asked of the store and sent there, and the seconds until all ranks had done so."""

    count: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.count} questions, {self.nbytes} bytes of a rank; {self.seconds:.2f} s of all"


@dataclass(frozen=True)
class StartReport:
    """Of one sampled rank, or the most of several.

    groups: process groups that it makes. group_seconds: for all of them. agreement: one of all ranks. parallelize: all
    that `parallelize` agrees on. steps: the first calls of a step and a clip, in turn. beat: of a heart.
    """

    mesh: Mesh
    groups: int
    group_seconds: float
    agreement: Questions
    parallelize: Questions
    steps: tuple[Questions, ...]
    beat: Questions

    def __str__(self) -> str:
        every = beat_of(self.mesh.world_size)
        return "\n".join(
            [
                f"{self.mesh}: {self.mesh.world_size} ranks",
                f"groups of a rank      {self.groups} in {self.group_seconds:.3f} s",
                f"one agreement         {self.agreement}",
                f"parallelize           {self.parallelize}",
                f"steps, with clipping  {', '.join(str(step.count) for step in self.steps)} questions of a rank",
                f"a beat, every {every:.0f} s     {self.beat}",
            ]
        )


def simulate_start(mesh: Mesh, ranks: int = 3) -> StartReport:
    """What the start of a world on a mesh of two ranks or more costs: store questions, bytes, groups and seconds.

    ``ranks``: how many of them really run, spread over the mesh. This process must not be part of any world.
    """
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # no rank hosts the store
    world, count = mesh.world_size, min(ranks, mesh.world_size)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sampled = sorted({i * (world - 1) // max(count - 1, 1) for i in range(count)})
    found = [_one(mesh, rank, dist.PrefixStore(f"rank {rank}", store)) for rank in sampled]
    groups, seconds = max(one.groups for one in found), max(one.group_seconds for one in found)
    return replace(found[-1], groups=groups, group_seconds=seconds)


def _one(mesh: Mesh, rank: int, store: dist.Store) -> StartReport:
    dist.init_process_group("fake", rank=rank, world_size=mesh.world_size, store=store)
    try:
        with closing(Crowd(default_store(), rank, mesh.world_size)) as crowd:
            report = _measured(mesh, crowd)
            errors.close()
            return report
    finally:
        dist.destroy_process_group()


def _measured(mesh: Mesh, crowd: Crowd) -> StartReport:
    board()  # it connects, and beats
    start = time.perf_counter()
    groups = Groups(init_mesh("cpu", TIMEOUT, **mesh.sizes))
    _make_groups(groups)
    seconds = time.perf_counter() - start
    board().line = StoreClient(default_store(), TIMEOUT, crowd.connect)

    def as_parallelize() -> None:
        agree_on_call(groups, {"seed": 0, "lift_to_float64": False, "backend": "eager", "broadcast_weights": False})
        for what in ("the weights", "the plan", "the batch", "the compiled step", "the lowered step"):
            agree_on(groups, [_claim(groups, what)], what)

    def step() -> None:
        agree_on_arguments(groups, "train_step", {"the batch": "int64 [8, 8192]"})
        agree_on_arguments(groups, "clip_grad_norm_", {"max_norm": 1.0}, ("weight",))

    parallelize = crowd.asked(as_parallelize)
    agreement = crowd.asked(lambda: agree_on(groups, [_claim(groups, "x")], "one question"))
    steps = tuple(crowd.asked(step) for _ in range(6))
    heart = board().heartbeat  # whose own thread makes the beat otherwise
    assert heart is not None, "a world of more than one rank beats"
    beat = crowd.asked(lambda: board().line.ask(heart.look))
    return StartReport(mesh, len(distributed_c10d._world.pg_map) - 1, seconds, agreement, parallelize, steps, beat)


def _make_groups(groups: Groups) -> None:
    """What steps use on such a mesh: the axes, dp joined with cp, attention's ways, links between stages."""
    sizes = {axis: size for axis, size in groups.mesh.axes if size > 1}
    if {"dp", "cp"} <= sizes.keys():
        groups.make([",".join(axis for axis in groups.mesh.sizes if axis in ("dp", "cp"))])
    if "cp" in sizes:
        groups.make_channels(["cp"])
        assert groups.channel(WAYS[0], "cp") is not None
    if "pp" in sizes:
        stages = range(sizes["pp"])
        groups.make_links(pair for a, b in itertools.pairwise(stages) for pair in ((a, b), (b, a)))
        groups.votes()


def _claim(groups: Groups, value: str) -> RankCheck:
    return RankCheck(everywhere(groups), {"x": value}, "simulate_start: all ranks say the same", "")


# --- all other ranks ------------------------------------------------------------------------------------


class Crowd:
    """All ranks but one: repeats what that one asks, on threads with a connection each."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        others = [r for r in range(world) if r != rank]
        self._rank, self._shares = rank, [others[i::THREADS] for i in range(min(THREADS, len(others)))]
        self._threads = [ThreadPoolExecutor(1) for _ in self._shares]  # each asks in order, by a client of its own
        self._clients = [thread.submit(own_client, store) for thread in self._threads]
        self._asking: list[Future[None]] = []
        self.count = self.nbytes = 0

    def connect(self, store: dist.Store) -> Any:
        return _Leader(own_client(store), self)

    def repeat(self, name: str, args: tuple[Any, ...]) -> None:
        self.count += 1
        texts = [text for arg in args for text in (arg if isinstance(arg, list) else [arg])]
        self.nbytes += sum(len(text) if isinstance(text, str) else 8 for text in texts)
        self._wait()  # no rank asks before it has the last answer
        self._asking = [
            thread.submit(self._ask, client, name, args, ranks)
            for thread, client, ranks in zip(self._threads, self._clients, self._shares, strict=True)
        ]

    def asked(self, call: Callable[[], Any]) -> Questions:
        """Of a call; it is over when all ranks have asked."""
        count, nbytes, start = self.count, self.nbytes, time.perf_counter()
        call()
        self._wait()
        return Questions(self.count - count, self.nbytes - nbytes, time.perf_counter() - start)

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.shutdown()

    def _ask(self, client: Future[dist.Store], name: str, args: tuple[Any, ...], ranks: list[int]) -> None:
        for rank in ranks:
            ask_as(client.result(), name, args, self._rank, rank)

    def _wait(self) -> None:
        for one in self._asking:
            one.result(TIMEOUT)
        self._asking = []


def ask_as(client: dist.Store, name: str, args: tuple[Any, ...], leader: int, rank: int) -> None:
    """What ``leader`` asked, as another rank does: of its own keys. What all share is deleted once."""
    own = tuple(_of(arg, leader, rank) if isinstance(arg, str) else arg for arg in args)
    if name == "delete_key" and own == args:
        return
    getattr(client, name)(*own)


def _of(key: str, leader: int, rank: int) -> str:
    head, slash, tail = key.rpartition("/")
    return f"{head}/{rank}" if slash and tail == str(leader) else key


class _Leader:
    """A client whose questions the crowd repeats."""

    def __init__(self, client: dist.Store, crowd: Crowd) -> None:
        self._client, self._crowd = client, crowd

    def __getattr__(self, name: str) -> Any:
        def question(*args: Any) -> Any:
            self._crowd.repeat(name, args)
            return getattr(self._client, name)(*args)

        return question
