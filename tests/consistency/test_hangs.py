"""No wait without an end: who is stopped, dead or finished is named within seconds, whatever the others wait in.

Each test has a world of its own (forked ranks, its own store), with a timeout that is longer than the test may take.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autopar
from autopar.runtime.fault import errors
from autopar.runtime.fault.heartbeat import SILENT
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.runtime.training.launch import launch
from tests.faults.campaign import _alive_with_parent, _host, free_port
from tests.support.launched import serve
from tests.support.meeting import meet_for
from tests.support.preload import warm

LONG, SOON = 60.0, 30.0  # seconds: the timeout, and what counts as within seconds on a machine with others at work


class World:
    """Ranks that run. Rank ``stays`` does not end. ``hosts``: rank 0 hosts the store."""

    def __init__(self, ranks: int, body: Callable[[int], Any], stays: int, hosts: bool = False) -> None:
        warm()
        context, port = multiprocessing.get_context("fork"), free_port()
        host = None if hosts else context.Process(target=_host, args=(port,), daemon=True)
        self.stays, self.pipes, self.processes = stays, [], [host] if host else []
        for rank in range(ranks):
            here, there = context.Pipe(duplex=False)
            self.pipes.append(here)
            args = (rank, ranks, body, hosts, port, there)
            self.processes.append(context.Process(target=_run, args=args, daemon=True))
        for process in self.processes:
            process.start()

    def end(self) -> dict[int, tuple[float, str]]:
        """Rank -> (seconds, what came of it)"""
        try:
            return {r: p.recv() for r, p in enumerate(self.pipes) if r != self.stays and p.poll(SOON + 15)}
        finally:
            for process in self.processes:
                process.kill()
                process.join()


def _run(rank: int, ranks: int, body: Callable[[int], Any], hosts: bool, port: int, pipe: Any) -> None:
    _alive_with_parent()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", TORCHELASTIC_USE_AGENT_STORE=str(not hosts))
    start = time.monotonic()
    try:
        text = str(body(rank))
    except BaseException as error:
        error = errors.named(error)
        text = f"{type(error).__name__}: {error}"
    pipe.send((time.monotonic() - start, text))
    errors.close()
    os._exit(0)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def pipeline_and_torch(rank: int) -> str:
    """Rank 1 stops; rank 0 waits in a receive of its own making, in torch's DTensor, and in torch's clipping."""
    mesh = init_mesh("cpu", LONG, dp=2)
    groups = Groups(mesh)
    meet_for(groups, "the start")
    if rank == 1:
        stop()
    found = []
    for wait in (
        lambda: dist.recv(torch.zeros(4), 1, group=groups.group("dp")),
        lambda: DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False).full_tensor(),
        lambda: dist.barrier(group=groups.group("dp")),
    ):
        try:
            with autopar.error_context("waiting for rank 1"):
                wait()
        except errors.CollectiveError as error:
            found.append(str(error))
    return "\n".join(found)


def test_a_stopped_rank_is_named_in_waits_of_torch(worlds: dict[str, World]) -> None:
    """gloo alone would wait for the timeout; the second and third wait end at once."""
    seconds, text = worlds["waits of torch"].end()[0]
    assert seconds < SOON
    lines = [line for line in text.splitlines() if line.startswith("comm:")]
    assert len(lines) == 3, text
    for line in lines:
        assert line.startswith("comm: waiting for rank 1 failed on rank 0: rank 1 did not respond: no sign"), line


def the_host_stops(rank: int) -> None:
    groups = Groups(init_mesh("cpu", LONG, dp=3))
    meet_for(groups, "the start")
    if rank == 0:
        stop()
    if rank == 1:
        meet_for(groups, "the end")
    dist.barrier(group=groups.group("dp"))


def test_a_stopped_host_of_the_store_is_named(worlds: dict[str, World]) -> None:
    """The ranks that ask it, and those that wait for them."""
    found = worlds["host stops"].end()
    assert found.keys() == {1, 2}
    for seconds, text in found.values():
        assert seconds < SOON and "rank 0, which hosts the store, did not respond for" in text, text
    assert all(seconds < SILENT + 12 for seconds, _ in found.values()), "also of who waits for those that ask"
    assert found[1][0] < SILENT + 7 and re.search("agreeing on the (start|end) failed on rank 1", found[1][1])


def one_does_not_come(rank: int) -> str:
    """To an agreement, then to the making of groups: both keep to the timeout of the mesh."""
    groups = Groups(init_mesh("cpu", 2.0, dp=2))
    if rank == 1:
        time.sleep(SOON)
    start, found = time.monotonic(), []
    for wait in (lambda: meet_for(groups, "the plan"), lambda: init_mesh("cpu", 3.0, tp=2)):
        try:
            wait()
        except errors.CollectiveError as error:
            found.append(f"{time.monotonic() - start:.1f} {error}")
    return "\n".join(found)


def test_agreements_and_groups_keep_to_the_timeout_of_the_mesh(worlds: dict[str, World]) -> None:
    first, second = worlds["one does not come"].end()[0][1].splitlines()
    assert "agreeing on the plan failed on rank 0: rank 1 did not respond: alive, but never joined" in first
    assert "making the group mesh_tp failed on rank 0: rank 1 did not respond" in second
    assert float(first.split()[0]) < 10 and float(second.split()[0]) < 20


def gone_while_starting(rank: int) -> None:
    """After all have met in the store, before torch has connected them."""
    if rank == 1:
        dist.init_process_group = lambda *_, **__: os._exit(3)  # type: ignore[assignment]
    init_mesh("cpu", LONG, dp=2)


@pytest.mark.parametrize("hosts", [True, False])
def test_a_rank_that_dies_while_torch_connects_them_is_named(hosts: bool, worlds: dict[str, World]) -> None:
    seconds, text = worlds["gone, rank 0 hosts" if hosts else "gone"].end()[0]
    assert seconds < SOON and "CollectiveError: comm: starting the ranks failed on rank 0: rank 1 did not" in text, text


def uncaught(rank: int) -> str:
    """What the interpreter prints of an error that nobody catches."""
    mesh = init_mesh("cpu", LONG, dp=2)
    meet_for(Groups(mesh), "the start")
    if rank == 1:
        os._exit(3)
    weight = nn.Parameter(DTensor.from_local(torch.ones(4, 2), mesh, [Replicate()], run_check=False))
    weight.grad = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False)
    printed = io.StringIO()
    try:
        nn.utils.clip_grad_norm_([weight], 1.0)
        dist.barrier(group=mesh.get_group("dp"))
    except RuntimeError as error:
        assert not isinstance(error, errors.CollectiveError)
        with redirect_stderr(printed):
            sys.excepthook(type(error), error, error.__traceback__)
    return printed.getvalue()


def test_an_error_of_torch_that_nobody_catches_names_the_rank(worlds: dict[str, World]) -> None:
    _, text = worlds["uncaught"].end()[0]
    last = text.strip().splitlines()[-1]
    assert "CollectiveError: comm: a collective failed on rank 0: rank 1 did not respond: no sign of life" in last, text
    assert "The above exception was the direct cause" in text


@pytest.fixture(scope="module", autouse=True)
def worlds() -> Iterator[dict[str, World]]:
    """All that mostly wait, side by side."""
    made = {
        "waits of torch": World(2, pipeline_and_torch, stays=1),
        "host stops": World(3, the_host_stops, stays=0, hosts=True),
        "one does not come": World(2, one_does_not_come, stays=1),
        "gone": World(2, gone_while_starting, stays=1),
        "gone, rank 0 hosts": World(2, gone_while_starting, stays=1, hosts=True),
        "uncaught": World(2, uncaught, stays=1),
    }
    yield made
    for one in made.values():
        for process in one.processes:
            process.kill()
            process.join()


def early(how: str) -> None:
    groups = Groups(init_mesh("cpu", dp=2))
    meet_for(groups, "the start")
    if groups.rank == 1:
        if how == "returns":
            return
        os.kill(os.getpid(), signal.SIGKILL)
    meet_for(groups, "the end")


@pytest.mark.parametrize("how", ["returns", "is killed"])
def test_the_launcher_says_how_a_rank_went(how: str) -> None:
    serve()
    assert launch(os.getpid, 1)  # the server that forks the ranks has started
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        launch(early, 2, (how,), timeout=LONG)
    text = str(caught.value)
    assert time.monotonic() - start < SOON
    if how == "returns":
        assert "agreeing on the end failed on rank 0: rank 1 finished: its main returned" in text
    else:
        died = "rank 1 died with exit code -9 (killed by SIGKILL, often by the kernel because memory ran out)"
        assert f"launch: {died}" in text and f"failed on rank 0: {died}" in text
        assert "as a consequence, rank 0: CollectiveError" in text
