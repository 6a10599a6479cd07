"""Compiled code: where its collectives start and are waited for; and how fast a llama trains."""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import autopar
from autopar.chips import CHIPS
from autopar.cost.memory import memory
from autopar.runtime.mesh import process_groups as group_making
from tests.benchmarks.common import Workload
from tests.gpu_check.peers import peer_checks
from tests.gpu_check.processes import Check, Machine
from tests.gpu_check.rows import FAILED, NOT_APPLICABLE, OK, Row, guarded


def order_checks(machine: Machine) -> list[Check]:
    """A world of two, of which the other rank is not there; nothing is run. Not where only seconds are to be spent."""
    return [] if machine.quick else [Check("order", "compiled order", compiled_order)]


def compiled_order(machine: Machine) -> Iterator[Row]:
    """As on the CPU."""
    from tests.runtime.test_compiled_order import CASES, calls  # imports pytest and registers a backend

    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    with patch.object(group_making, "check_devices", lambda *_: None):  # nobody else is there
        groups = group_making.Groups(autopar.init_mesh(machine.device, tp=2))

    def check(name: str) -> Row:
        shapes, build, expected = CASES[name]
        found = calls(groups, shapes, build)
        return Row("compiled order", name, OK if found == expected else FAILED, words=f"{found}; needs {expected}")

    for name in CASES:
        yield from guarded("compiled order", name, functools.partial(check, name))


# --- speed ------------------------------------------------------------------------------------------------

LARGE = {"hidden": 2048, "layers": 16, "inner": 8192, "heads": 32, "vocab": 32000, "length": 2048}  # 1.2 billion
SMALL = Workload(hidden=512, layers=8, inner=1536, heads=8, vocab=8192, batch=1, length=128)  # launches take longest
TINY = Workload(hidden=64, layers=2, inner=128, heads=4, vocab=256, batch=2, length=32)
ENOUGH = 60 * 2**30  # bytes of a GPU that holds four rows
ROUNDS, WARMUP = 8, 3
MOST = 1.25  # of the plan's peak


@dataclass(frozen=True)
class Run:
    """backend: "plain" for the model itself. ranks: on dp, with parameters cut. small: a model that takes a GPU less
    time than the host its launches."""

    backend: str
    ranks: int = 1
    small: bool = False

    def __str__(self) -> str:
        words = "small llama" if self.small else "llama"
        return f"{words} {self.backend}" + (f", zero=3 on {self.ranks} ranks" if self.ranks > 1 else "")


def speed_checks(machine: Machine) -> list[Check]:
    """The model itself, ours on one rank, and on all of a machine."""
    most = min(machine.gpus, 8) if machine.is_gpu else machine.count
    runs = [Run("plain"), Run("eager")]
    runs += [Run(backend) for backend in ("inductor", "cudagraphs", "inductor+cudagraphs")] if machine.is_gpu else []
    runs += [Run(run.backend, small=True) for run in runs] if machine.is_gpu and not machine.quick else []
    if most > 1 and not machine.quick:
        runs += [Run(backend, most) for backend in (("eager", "inductor") if machine.is_gpu else ("eager",))]
    return [Check("speed", str(r), functools.partial(speed, r), r.ranks, 400.0) for r in runs] + peer_checks(machine)


def speed(run: Run, machine: Machine) -> Iterator[Row]:
    """Steps without an optimizer: tokens, time of the host and of the device, memory."""
    warnings.filterwarnings("ignore")
    mesh = autopar.init_mesh(machine.device, dp=run.ranks)
    work = SMALL if run.small else workload(machine)
    batch = work.tokens()
    with torch.device(machine.device):
        model = work.model()
    torch.nn.Module.to(model, torch.bfloat16 if machine.is_gpu else torch.float32)
    weights = sum(p.numel() for p in model.parameters())
    parallel = None
    if run.backend != "plain":
        parallel = autopar.parallelize(model, mesh, backend=run.backend, zero=3 if run.ranks > 1 else 0)
        del model
        step: Callable[[], Any] = functools.partial(_ours, parallel, batch)
    else:
        step = functools.partial(_plain, model, {k: x.to(machine.device) for k, x in batch.items()})
    if machine.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    host, whole, loss = timed(step, machine)
    tokens = run.ranks * work.batch * work.length
    yield Row(
        f"{run}: speed",
        f"loss {loss:.4f}",
        OK,
        tokens / whole,
        "tokens/s",
        product_rate(weights, tokens / run.ranks, work, whole),
    )
    yield Row(f"{run}: a step", "", OK, 1e3 * whole, "ms")
    yield Row(f"{run}: of it the host", "until train_step returns", OK, 1e3 * host, "ms")
    if parallel is not None and not run.small:
        yield memory_row(f"{run}: memory", parallel, machine)


def workload(machine: Machine) -> Workload:
    """What fits."""
    if not machine.is_gpu:
        return TINY
    return Workload(**LARGE, batch=4 if torch.cuda.get_device_properties(0).total_memory > ENOUGH else 1)


def _ours(parallel: Any, batch: dict[str, Any]) -> torch.Tensor:
    parallel.zero_grad(set_to_none=True)
    loss: torch.Tensor = parallel.train_step(**batch)
    return loss.detach()


def _plain(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss: torch.Tensor = model(**batch).loss
    loss.backward()
    return loss.detach()


def timed(step: Callable[[], Any], machine: Machine) -> tuple[float, float, float]:
    """Median seconds until the call returns and until the device is done; the loss."""

    def wait() -> None:
        if machine.is_gpu:
            torch.cuda.synchronize()

    host, whole, loss = [], [], float("nan")
    for i in range(WARMUP + ROUNDS):
        wait()
        start = time.perf_counter()
        found = step()
        returned = time.perf_counter()
        wait()
        if i >= WARMUP:
            host.append(returned - start)
            whole.append(time.perf_counter() - start)
        loss = float(found)
    assert loss == loss and abs(loss) < 1e4, f"loss {loss}"
    return statistics.median(host), statistics.median(whole), loss


def product_rate(weights: int, tokens: float, work: Workload, seconds: float) -> str:
    """What a rank computes: six operations per weight and token, and causal attention's."""
    weights -= work.vocab * work.hidden  # the table is looked up
    rate = tokens * (6 * weights + 6 * work.layers * work.hidden * work.length) / seconds
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    known = next((chip for chip in CHIPS if chip in name), None)
    return f"{rate / 1e12:.3g} TFLOP/s" + (f", {rate / CHIPS[known].flops:.0%} of an {known}'s" if known else "")


def memory_row(what: str, parallel: Any, machine: Machine) -> Row:
    """The most that torch's allocator gave, over the plan's. No optimizer is there."""
    found = memory(parallel.compiled()[0])
    planned = found.peak - found.optimizer
    if not machine.is_gpu:
        return Row(what, f"plan {planned / 2**30:.3g} GiB", NOT_APPLICABLE, words="no allocator of a device")
    peak = torch.cuda.max_memory_allocated()
    words = f"{peak / 2**30:.1f} GiB, plan {planned / 2**30:.1f}"
    return Row(what, f"at most {MOST}", OK if peak <= MOST * planned else FAILED, peak / planned, "of the plan", words)
