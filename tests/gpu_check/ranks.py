"""Two or more ranks: whole steps against one process, bandwidths, and a rank that fails."""

from __future__ import annotations

import functools
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.runtime.exec.executor import Executor
from autopar.runtime.fault.heartbeat import SILENT
from autopar.schedule.request import SCHEDULES
from tests.gpu_check.processes import Check, Machine
from tests.gpu_check.rows import FAILED, NOT_APPLICABLE, OK, Row, told
from tests.gpu_check.step import recorded
from tests.support.plain_models import Net, build, numbers

LAZILY, AT_ONCE = "groups made lazily", "groups made with device_id"
LIMIT, JOIN = 30.0, 20.0  # seconds for a cell; until a collective without its peers fails
FEW = ("llama dp=2 zero=3", "llama tp=2", "llama cp=2 ring", "llama pp=2 1f1b", "t5 pp=2 1f1b")
RECORDED = (*FEW, "llama pp=2 dual_pipe", "llama pp=2 zb_v", "llama cp=2 ulysses", "llama cp=2 token_ring")
ROWS, TOKENS = 8, 16


@dataclass(frozen=True)
class Cell:
    """A model on a mesh, with options of `autopar.parallelize`."""

    name: str
    model: str
    mesh: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return Mesh.parse(self.mesh).world_size


def cells() -> list[Cell]:
    """Every way to cut a model, every attention algorithm, every schedule; T5 is the one whose edges skip stages."""
    plain: list[tuple[str, dict[str, Any]]] = [
        ("dp=2", {}), ("dp=2", {"zero": 3}), ("dp=2", {"zero": 3, "microbatches": 2}), ("tp=2", {}),
        ("tp=2", {"sequence_parallel": True}), ("dp=2,tp=2", {"zero": 3, "sequence_parallel": True}),
    ]  # fmt: skip
    found = [Cell(_name("llama", mesh, options), "llama", mesh, options) for mesh, options in plain]
    for name in ALGORITHMS:
        mesh = "cp=4" if name == "hybrid" else "cp=2"  # groups of heads, and a ring over them
        found.append(Cell(f"llama {mesh} {name}", "llama", mesh, {"attention": name}))
    for name, entry in SCHEDULES.items():
        options: dict[str, Any] = {"schedule": name, "microbatches": 4}
        if entry.sliced:  # only of models whose tokens do not see later ones
            options |= {"microbatches": 2, "token_slices": (7, 9)}
        for model in ("llama",) if entry.sliced else ("llama", "t5"):
            found.append(Cell(f"{model} pp=2 {name}", model, "pp=2", options))
    found += [Cell(f"{m} pp=4 1f1b", m, "pp=4", {"schedule": "1f1b", "microbatches": 8}) for m in ("llama", "t5")]
    return found


def _name(model: str, mesh: str, options: dict[str, Any]) -> str:
    return " ".join([model, mesh, *(f"{k}={v}" for k, v in options.items())])


def checks(machine: Machine) -> list[Check]:
    """A world for each cell, of pipelines for both ways to make groups; bandwidths; a world for each way to fail."""
    if machine.count < 2:
        return [Check("ranks", "ranks", _too_few)]
    chosen = [c for c in cells() if machine.is_gpu or c.name in (FEW[3:4] if machine.quick else FEW)]
    found = [_check(cell, LAZILY, machine) for cell in chosen]
    if machine.is_gpu:
        found += [_check(c, AT_ONCE, machine) for c in chosen if "pp" in c.mesh or c.name in FEW]
    loops = [c for c in chosen if c.name in RECORDED]
    found += [Check("ranks", f"{c.name}, recorded", functools.partial(one_loop, c), c.ranks, 2 * LIMIT) for c in loops]
    found.append(Check("ranks", "bandwidths", bandwidths, ranks=2))
    faults = [(how, inside) for how in FAULTS for inside in (True, False)]
    found += [failing(*fault) for fault in (faults[:1] if machine.quick else faults)]
    return found


def _too_few(machine: Machine) -> Iterator[Row]:
    yield Row("ranks", "two GPUs", NOT_APPLICABLE, words=f"there is {machine.count}; --ranks-per-gpu 4 if NCCL can")


def _check(cell: Cell, way: str, machine: Machine) -> Check:
    what = f"{cell.name}, {way}"
    if cell.ranks > machine.count:
        return Check("ranks", what, functools.partial(_too_many, what, cell.ranks))
    slow = 1.0 if machine.is_gpu else 6.0  # where cores are few and shared
    return Check("ranks", what, functools.partial(one_cell, cell, way), cell.ranks, slow * LIMIT)


def _too_many(what: str, ranks: int, machine: Machine) -> Iterator[Row]:
    yield Row(what, f"{ranks} GPUs", NOT_APPLICABLE, words=f"there are {machine.count}")


def one_cell(cell: Cell, way: str, machine: Machine) -> Iterator[Row]:
    """Loss and every gradient in float64 against one process."""
    mesh = make_mesh(machine, way, JOIN, **Mesh.parse(cell.mesh).sizes)
    model, batch = TINY[cell.model].build(), TINY[cell.model].batch(ROWS, TOKENS)
    report = autopar.verify(model, mesh, batch, **cell.options)
    worst = report.entries[0]
    words = "" if report.passed else str(report).splitlines()[0]
    yield Row(f"{cell.name}, {way}", worst.name, OK if report.passed else FAILED, worst.ratio, "error", words)


def one_loop(cell: Cell, machine: Machine) -> Iterator[Row]:
    """Steps recorded as CUDA graphs, with the collectives and transfers among them."""
    mesh, what = make_mesh(machine, LAZILY, JOIN, **Mesh.parse(cell.mesh).sizes), f"{cell.name}, recorded"
    yield recorded(cell.model, mesh, what, machine, **cell.options)


def make_mesh(machine: Machine, way: str, timeout: float, **sizes: int) -> Any:
    """As a user makes it: by `init_mesh` alone, or with a default group of the user's that is bound to a GPU, whose
    communicators are then made at once."""
    warnings.filterwarnings("ignore")
    if way == AT_ONCE:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % machine.gpus)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    return autopar.init_mesh(machine.device, timeout, **sizes)


# --- bandwidths -------------------------------------------------------------------------------------------

ROUNDS = 10


def bandwidths(machine: Machine) -> Iterator[Row]:
    """Of large tensors between two ranks, in GB/s that cross the link in each direction; and of small ones, the time.
    What arrives is compared."""
    group = make_mesh(machine, LAZILY, JOIN, dp=2).get_group("dp")
    device, rank = torch.device(machine.device), dist.get_rank()
    large, small = (2**26, 2**10) if machine.is_gpu else (2**20, 2**10)  # bytes

    def all_reduce(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    def all_gather(x: Tensor) -> Tensor:
        out = x.new_empty(2 * len(x))
        dist.all_gather_into_tensor(out, x, group=group)
        return out[: len(x)] + out[len(x) :]

    def reduce_scatter(x: Tensor) -> Tensor:
        out = x.new_empty(len(x) // 2)
        dist.reduce_scatter_tensor(out, x, group=group)
        return out

    def exchange(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        ops = [dist.P2POp(dist.isend, x, 1 - rank, group), dist.P2POp(dist.irecv, out, 1 - rank, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out + x

    # of a tensor of N bytes, what leaves a rank: N(n-1)/n in each of the two halves of an all_reduce
    ways: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
        "all_reduce": (all_reduce, 1.0), "all_gather": (all_gather, 1.0), "reduce_scatter": (reduce_scatter, 0.5),
        "exchange": (exchange, 1.0),
    }  # fmt: skip
    for name, (call, share) in ways.items():
        x = torch.full((large // 4,), rank + 1.0, device=device)
        right = bool((call(x.clone()) == 3.0).all())
        seconds = _seconds(call, torch.zeros_like(x), machine)
        yield Row(f"{name} of {large >> 20} MiB", "", OK if right else FAILED, share * large / seconds / 1e9, "GB/s")
        seconds = _seconds(call, torch.zeros(small // 4, device=device), machine)
        yield Row(f"{name} of {small} bytes", "", OK, 1e6 * seconds, "us")


def _seconds(call: Callable[[Tensor], Tensor], x: Tensor, machine: Machine) -> float:
    for count in (2, ROUNDS):
        _wait(machine)
        start = time.perf_counter()
        for _ in range(count):
            call(x)
        _wait(machine)
    return (time.perf_counter() - start) / ROUNDS


def _wait(machine: Machine) -> None:
    if machine.is_gpu:
        torch.cuda.synchronize()


# --- a rank that fails ------------------------------------------------------------------------------------

VICTIM = 1
STOP_WAITING = 8.0  # seconds: the timeout of the mesh
GRACE = 5.0


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise KeyError("planted")


def _skip() -> None:
    time.sleep(2 * STOP_WAITING + GRACE)  # alive, and elsewhere


# What happens to a rank, and within how many seconds the others have to know.
FAULTS: dict[str, tuple[Callable[[], None], float]] = {
    "a rank that raises": (_raise, SILENT + GRACE),
    "a rank that is killed": (_kill, SILENT + GRACE),
    "a rank that skips a step": (_skip, STOP_WAITING + GRACE),
}


def failing(how: str, inside: bool) -> Check:
    """Two ranks, of which one fails. inside: when they have agreed on a step, so that it is missed in a collective, for
    which a GPU waits and not the host."""
    what = f"{how}, {'within' if inside else 'before'} a step"
    return Check("ranks", what, functools.partial(one_fault, what, how, inside), 2, 90.0, lost=(VICTIM,))


def one_fault(what: str, how: str, inside: bool, machine: Machine) -> Iterator[Row]:
    """Two steps, then one in which a rank is missing: the other's error names it, and comes in time."""
    strike, limit = FAULTS[how]
    mesh = make_mesh(machine, LAZILY, STOP_WAITING, dp=2)
    parallel = autopar.parallelize(build(Net), mesh, example_batch=numbers())
    for _ in range(2):
        float(parallel.train_step(**numbers()))
    dist.barrier()
    start, words = time.monotonic(), "the step went through"
    if dist.get_rank() == VICTIM:
        if not inside:
            strike()
        with patch.object(Executor, "run_step", lambda *_, **__: strike()):
            parallel.train_step(**numbers())
        return
    try:
        float(parallel.train_step(**numbers()))
        _wait(machine)
    except Exception as error:
        words = told(error)
    seconds = time.monotonic() - start
    right = "CollectiveError" in words and f"rank {VICTIM}" in words and seconds <= limit
    yield Row(what, f"named within {limit:.0f} s", OK if right else FAILED, seconds, "s", words)
