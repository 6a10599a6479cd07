"""A training step on a world of one: equal to one process, and the host does not wait for the device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch

import autopar
from autopar.models.tiny import TINY
from tests.gpu_check.processes import Check, Machine
from tests.gpu_check.rows import FAILED, NOT_APPLICABLE, OK, Row, guarded
from tests.plain_models import Net, build, numbers

# Compiling for the CPU takes long, so there a small module stands for all.
MODELS = ("llama", "gpt2", "mixtral", "gpt_oss", "t5", "bert")
CPU_MODELS = ("gpt2", "mixtral")
PLAIN = "two layers"
# In bfloat16 they differ by rounding alone: tokens near a tie go to other experts, and T5 does not scale its scores.
DELICATE = ("mixtral", "gpt_oss", "t5")


def checks(machine: Machine) -> list[Check]:
    """A process for each model and backend."""
    eager = MODELS if machine.is_gpu else CPU_MODELS
    pairs = [(name, "eager") for name in eager]
    pairs += [
        (name, "inductor") for name in ((PLAIN, *MODELS) if machine.is_gpu else () if machine.quick else (PLAIN,))
    ]
    return [
        Check("step", f"{name} {backend}", functools.partial(one_model, name, backend), seconds=300.0)
        for name, backend in pairs
    ]


def one_model(name: str, backend: str, machine: Machine) -> Iterator[Row]:
    """In float64 against one process, in fewer bits as far as roundings let; then steps that do not wait."""
    what, mesh = f"{name} {backend}", autopar.init_mesh(machine.device, dp=1)
    warnings.filterwarnings("ignore")
    precise = functools.partial(verified, name, backend, torch.float64, mesh, what)
    yield from guarded(what, "float64 equals one process", precise)
    if machine.is_gpu:
        dtype = torch.float32 if name in DELICATE else torch.bfloat16
        rounded = functools.partial(verified, name, backend, dtype, mesh, what)
        yield from guarded(what, "rounded, near one process", rounded)
    yield from guarded(what, "no step waits", functools.partial(unwatched, name, backend, mesh, what, machine))


def subject(name: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """A model with dropout, and a batch."""
    if name == PLAIN:
        return build(Net).to(dtype), {k: x.to(dtype) for k, x in numbers().items()}
    return TINY[name].build(dtype=dtype, dropout=0.1), TINY[name].batch(4, 16, dtype=dtype)


def verified(name: str, backend: str, dtype: torch.dtype, mesh: Any, what: str) -> Row:
    """Loss and every gradient."""
    model, batch = subject(name, dtype)
    report = autopar.verify(model, mesh, batch, backend=backend, exact=dtype == torch.float64)
    worst = report.entries[0]
    verdict = OK if report.passed else FAILED
    case = f"{str(dtype).removeprefix('torch.')}, {worst.name}"
    return Row(what, case, verdict, worst.ratio, "error", "" if report.passed else str(report).splitlines()[0])


def unwatched(name: str, backend: str, mesh: Any, what: str, machine: Machine) -> Row:
    """The loop of a user: the third step may not make the host wait. (The first compiles; the optimizer is lazy.)"""
    dtype = torch.bfloat16 if machine.is_gpu else torch.float64
    model, batch = subject(name, dtype)
    parallel = autopar.parallelize(model, mesh, example_batch=batch, backend=backend)
    optimizer = torch.optim.AdamW(parallel.parameters())

    def step() -> torch.Tensor:
        loss = parallel.train_step(**batch)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() if isinstance(loss, torch.Tensor) else torch.stack([x.detach() for x in loss]).sum()

    losses = [step(), step()]
    if machine.is_gpu:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        losses.append(step())
    finally:
        if machine.is_gpu:
            torch.cuda.set_sync_debug_mode("default")
    if not all(bool(loss.isfinite()) for loss in losses):
        return Row(what, "no step waits", FAILED, words=f"losses {[float(x) for x in losses]}")
    if not machine.is_gpu:
        return Row(what, "no step waits", NOT_APPLICABLE, words="three steps ran; no device to wait for")
    return Row(what, "no step waits")
