"""What each rank of a case does, and how a rank comes to grief at a given call."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import autopar
from autopar import api
from autopar.compile.model import compile_model, plan_model
from autopar.ir.mesh import Mesh
from autopar.ops.few_bits.delayed_scales import DelayedScales
from autopar.ops.few_bits.eager_products import ScaledProducts
from autopar.options import Options
from autopar.runtime.checkpoint.hf_io import stored_in
from tests.faults.cases import DELAY, SUBJECTS, Case, batch_of, model_of

OURS = (str(Path(autopar.__file__).resolve().parent.parent / "autopar"),)


class Fault:
    """Happens once on the victim: at a call within autopar, counted since the phase began, else at the phase's end."""

    def __init__(self, case: Case, rank: int, note: Path) -> None:
        self._case, self._note = case, note
        self._left = case.moment if rank == case.victim else -1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        armed = name == self._case.phase and self._left >= 0
        if armed:
            sys.setprofile(self._count)
        try:
            yield
        finally:
            sys.setprofile(None)
        if armed and self._left >= 0:
            self._strike()

    def _count(self, frame: Any, event: str, _: Any) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(OURS):
            self._left -= 1
            # what is raised while a generator is closed is lost: Python ignores it
            lost = self._case.action == "raise" and frame.f_code.co_flags & inspect.CO_GENERATOR
            if self._left <= 0 and not lost:
                sys.setprofile(None)
                self._strike()

    def _strike(self) -> None:
        self._left = -1
        self._note.write_text(str(time.time()))
        if self._case.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._case.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._case.action == "raise":
            raise KeyError("planted")
        time.sleep(DELAY)


_plans: dict[str, Any] = {}
_compiled: dict[str, Any] = {}


def prepare(case: Case) -> None:
    """Ahead of the fork: ranks whose fault comes later need not compile the same thing once more, each for itself."""
    if case.phase in ("compile", "bind") or case.subject in _plans:
        return
    subject, model, batch = SUBJECTS[case.subject], model_of(case.subject), batch_of(case.subject)
    mesh, options = Mesh.of(**subject.sizes), Options(**subject.options)
    plan = _plans[case.subject] = plan_model(model, batch, mesh, options)
    _compiled[case.subject] = compile_model(model, batch, mesh, options, outputs=(), fixed=plan[0])


def use_prepared(case: Case) -> None:
    """On a rank: planning and compiling give what was prepared."""
    if case.phase not in ("compile", "bind"):
        vars(api).update(plan_model=lambda *_, **__: _plans[case.subject])
        vars(api).update(compile_model=lambda *_, **__: _compiled[case.subject])


def train(case: Case, rank: int, folder: Path, timeout: float) -> list[float]:
    """Three steps with clipping and an optimizer, whole state, saved over what is there; returns the losses."""
    subject, fault = SUBJECTS[case.subject], Fault(case, rank, folder / "struck")
    use_prepared(case)
    with fault.phase("compile"):
        mesh = autopar.init_mesh("cpu", timeout, **subject.sizes)
        batch = part_of(batch_of(case.subject), subject.sizes, mesh)
        parallel = autopar.parallelize(model_of(case.subject), mesh, example_batch=batch, **subject.options)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses = []
    for phase in ("bind", "step", "last"):
        with fault.phase(phase):
            losses.append(float(parallel.train_step(**batch)))
        if phase == "step":
            with fault.phase("clip"):
                parallel.clip_grad_norm_(1.0)
                optimizer.step()
            with fault.phase("state"):
                parallel.full_state_dict()
            with fault.phase("save"):
                parallel.save_pretrained(folder / "saved", max_shard_size="400B")
                how = {"memory": True} if subject.memory else {"asynchronous": case.victim == 1}
                saving = autopar.save(folder / "run", parallel, optimizer, **how)
        optimizer.zero_grad()
    saving.wait()
    return losses


def part_of(batch: dict[str, Tensor], sizes: dict[str, int], mesh: Any) -> dict[str, Tensor]:
    """This rank's rows."""
    if sizes.get("dp", 1) == 1:
        return batch
    return {name: x.chunk(sizes["dp"])[mesh.get_local_rank("dp")] for name, x in batch.items()}


def alone(subject: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and saved weights of one process."""
    model, batch = model_of(subject), batch_of(subject)
    optimizer, losses, kept = torch.optim.SGD(model.parameters(), lr=0.1), [], {}
    products, advance = scaled_products(subject, model)
    for phase in ("bind", "step", "last"):
        with products:
            loss = model(**batch)
            loss.backward()
        advance()
        losses.append(float(loss.detach()))
        if phase == "step":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            kept = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.zero_grad()
    return losses, kept


def scaled_products(subject: str, model: nn.Module) -> tuple[Any, Callable[[], None]]:
    """A context in which one process computes the products of a subject in few bits, and what follows each step."""
    policy = SUBJECTS[subject].options.get("precision")
    if policy is None:
        return nullcontext(), lambda: None
    mesh, options = Mesh.of(**SUBJECTS[subject].sizes), Options(**SUBJECTS[subject].options)
    plan = plan_model(model_of(subject), batch_of(subject), mesh, options)[0]
    weights = [name for name, why in plan.products.items() if not why]
    assert weights, plan.products
    if policy.scaling != "delayed":
        return ScaledProducts(model, weights, policy.scaling), lambda: None
    scales = DelayedScales(weights, policy.history, policy.amax, policy.margin, torch.float64)
    return ScaledProducts(model, weights, "delayed", delayed=scales), scales.advance


def saved(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by the rule of transformers."""
    sources = stored_in(folder)
    files = {source.file: load_file(source.file) for source in sources.values()}
    return {name: files[source.file][source.name] for name, source in sources.items()}
