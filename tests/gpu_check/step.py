"""A training step on a world of one: equal to one process, and the host does not wait for the device."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch

import autopar
from autopar.models.tiny import TINY
from autopar.runtime.exec.cuda_graphs import WARM_UP
from tests.gpu_check.processes import Check, Machine
from tests.gpu_check.rows import FAILED, NOT_APPLICABLE, OK, Row, guarded
from tests.support.plain_models import Net, build, numbers

# Compiling for the CPU takes long, so there a small module stands for all.
MODELS = ("llama", "gpt2", "mixtral", "gpt_oss", "t5", "bert")
CPU_MODELS = ("gpt2", "mixtral")
PLAIN = "two layers"
RECORDED = WARM_UP + 2  # steps until those that are recorded are replayed
# In bfloat16 they differ by rounding alone: tokens near a tie go to other experts, and T5 does not scale its scores.
DELICATE = ("mixtral", "gpt_oss", "t5")


def checks(machine: Machine) -> list[Check]:
    """A process for each model and backend."""
    eager = MODELS if machine.is_gpu else CPU_MODELS
    pairs = [(name, "eager") for name in eager]
    pairs += [
        (name, "inductor") for name in ((PLAIN, *MODELS) if machine.is_gpu else () if machine.quick else (PLAIN,))
    ]
    found = [
        Check("step", f"{name} {backend}", functools.partial(one_model, name, backend), seconds=300.0)
        for name, backend in pairs
    ]
    names = MODELS if machine.is_gpu else CPU_MODELS[:1]
    return found + [Check("step", f"{n} cudagraphs", functools.partial(one_recorded, n), seconds=300.0) for n in names]


def one_recorded(name: str, machine: Machine) -> Iterator[Row]:
    """A loop whose steps are recorded as CUDA graphs, against the same loop as always; then steps that do not wait."""
    what, mesh = f"{name} cudagraphs", autopar.init_mesh(machine.device, dp=1)
    warnings.filterwarnings("ignore")
    yield from guarded(what, "a loop is the loop", functools.partial(recorded, name, mesh, what, machine))
    unwatching = functools.partial(unwatched, name, "cudagraphs", mesh, what, machine)
    yield from guarded(what, "no step waits", unwatching)


def recorded(name: str, mesh: Any, what: str, machine: Machine, **options: Any) -> Row:
    """Losses of some steps with dropout and an optimizer, in float32; whether they were replays, or why not."""
    losses, reasons = [], []
    for backend in ("eager", "cudagraphs"):
        model, batch = subject(name, torch.float32)
        parallel = autopar.parallelize(model, mesh, example_batch=batch, backend=backend, **options)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        found = []
        for _ in range(RECORDED + 3):
            found.append(parallel.train_step(**batch))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(torch.stack([x.detach() if isinstance(x, torch.Tensor) else x[0].detach() for x in found]))
        reasons += [step.reason for step in (e._recorded for e in parallel._cache.runners) if step is not None]
    error = float((losses[0] - losses[1]).abs().max())
    if not machine.is_gpu:
        return Row(what, "a loop is the loop", NOT_APPLICABLE, error, "of the loss", words="; ".join(reasons))
    told = "; ".join(reasons) if any(reasons) else f"losses {float(losses[1][0]):.4f} to {float(losses[1][-1]):.4f}"
    right = error <= 1e-4 and float(losses[1][-1]) < float(losses[1][0]) and not any(reasons)
    return Row(what, "a loop is the loop", OK if right else FAILED, error, "of the loss", told)


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
    report = autopar.verify(model, mesh, batch, backend=backend, lift_to_float64=dtype == torch.float64)
    worst = report.entries[0]
    verdict = OK if report.passed else FAILED
    case = f"{str(dtype).removeprefix('torch.')}, {worst.name}"
    return Row(what, case, verdict, worst.ratio, "error", "" if report.passed else str(report).splitlines()[0])


@contextlib.contextmanager
def no_waits(machine: Machine) -> Iterator[None]:
    """Within, torch raises an error where the host would wait for the device."""
    if machine.is_gpu:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if machine.is_gpu:
            torch.cuda.set_sync_debug_mode("default")


def unwatched(name: str, backend: str, mesh: Any, what: str, machine: Machine) -> Row:
    """The loop of a user: a later step may not make the host wait. (The first compiles; the optimizer is lazy.)"""
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

    losses = [step() for _ in range(RECORDED)]
    with no_waits(machine):
        losses.append(step())
    if not all(bool(loss.isfinite()) for loss in losses):
        return Row(what, "no step waits", FAILED, words=f"losses {[float(x) for x in losses]}")
    if not machine.is_gpu:
        return Row(what, "no step waits", NOT_APPLICABLE, words="three steps ran; no device to wait for")
    return Row(what, "no step waits")
