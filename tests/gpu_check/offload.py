"""Values and states of optimizers in host memory: bitwise equal, less on the device, and no step that waits."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch

import autopar
from autopar.ac_policies import AC_POLICIES, HOST
from autopar.cost.memory import memory
from autopar.models.tiny import TINY
from tests.benchmarks.common import Workload
from tests.gpu_check.processes import Check, Machine
from tests.gpu_check.rows import FAILED, NOT_APPLICABLE, OK, Row, guarded
from tests.gpu_check.step import no_waits

EVERYTHING = "everything on the host"
WIDE = Workload(hidden=1024, layers=8, inner=2816, heads=16, vocab=4096, batch=4, length=1024)
STEPS = 3
LESS = 0.6  # of the bytes on the host at least are no longer on the device: some come back ahead of time


def checks(machine: Machine) -> list[Check]:
    """A process each."""
    names = ("llama", "gpt2", "mixtral") if machine.is_gpu else ("gpt2",)
    found = [Check("offload", f"{name} offload", functools.partial(one_model, name), seconds=300.0) for name in names]
    return found + ([Check("offload", "wide llama offload", less_on_the_device)] if machine.is_gpu else [])


def one_model(name: str, machine: Machine) -> Iterator[Row]:
    """With dropout."""
    warnings.filterwarnings("ignore")
    AC_POLICIES.add(EVERYTHING, lambda value: HOST)
    what, mesh = f"{name} offload", autopar.init_mesh(machine.device, dp=1)
    for case, options in {
        "values": {"activation_checkpoint": EVERYTHING},
        "states": {"optimizer_cpu_offload": True, "bucket_bytes": 20_000},
    }.items():
        yield from guarded(what, f"{case}: bitwise equal", functools.partial(same, name, mesh, what, case, options))
    yield from guarded(what, "no step waits", functools.partial(unwatched, name, mesh, what, machine))


def _loop(name: str, mesh: Any, **options: Any) -> Any:
    """A model, and a step of the loop of a user."""
    model, batch = TINY[name].build(dtype=torch.float32, dropout=0.1), TINY[name].batch(4, 16, dtype=torch.float32)
    parallel = autopar.parallelize(model, mesh, **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)

    def step() -> torch.Tensor:
        loss: torch.Tensor = parallel.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return parallel, step


def same(name: str, mesh: Any, what: str, case: str, options: dict[str, Any]) -> Row:
    """Losses and weights of some steps."""
    found = []
    for chosen in ({}, options):
        parallel, step = _loop(name, mesh, **chosen)
        losses = [step() for _ in range(STEPS)]
        found.append([*losses, *parallel.full_state_dict().values()])
    unlike = sum(not torch.equal(a, b) for a, b in zip(*found, strict=True))
    return Row(what, f"{case}: bitwise equal", FAILED if unlike else OK, unlike, "tensors differ")


def unwatched(name: str, mesh: Any, what: str, machine: Machine) -> Row:
    """A later step may not make the host wait. (The first ones make buffers.)"""
    _, step = _loop(name, mesh, activation_checkpoint=EVERYTHING, optimizer_cpu_offload=True, bucket_bytes=20_000)
    losses = [step() for _ in range(STEPS)]
    with no_waits(machine):
        losses.append(step())
    right = all(bool(loss.isfinite()) for loss in losses)
    if not machine.is_gpu and right:
        return Row(what, "no step waits", NOT_APPLICABLE, words="four steps ran; no device to wait for")
    return Row(what, "no step waits", OK if right else FAILED, words="" if right else f"losses {losses}")


def less_on_the_device(machine: Machine) -> Iterator[Row]:
    """The most that torch's allocator gave, with values on the device and on the host."""
    mesh, batch, peaks, hosted = autopar.init_mesh(machine.device, dp=1), WIDE.tokens(), [], 0
    for policy in ("none", "offload"):
        parallel = autopar.parallelize(WIDE.model().to(torch.bfloat16), mesh, activation_checkpoint=policy)
        for _ in range(STEPS):
            parallel.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            parallel.train_step(**batch)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        hosted = memory(parallel.compiled()[0]).host
        del parallel
    freed = (peaks[0] - peaks[1]) / max(hosted, 1)
    words = f"{peaks[0] / 2**20:.0f} MiB, then {peaks[1] / 2**20:.0f}, with {hosted / 2**20:.0f} on the host"
    yield Row("wide llama offload", "less on the device", OK if freed > LESS else FAILED, freed, "of the bytes", words)
