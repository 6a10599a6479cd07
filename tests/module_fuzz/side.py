"""One side of a program: its model on plain torch or on a mesh of one process, and a log of what came of it.

This file is also part of the scripts that are printed for programs which fail: it imports nothing of the tests.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import autopar


@functools.cache
def mesh_of_one() -> Any:
    return autopar.init_mesh("cpu", 30.0, dp=1)


def batch(step: int, rows: int = 4) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {name: torch.randn(rows, 3, generator=g, dtype=torch.float64) for name in ("x", "target")}


@contextlib.contextmanager
def imported(path: Path, name: str) -> Iterator[Any]:
    """The module in a file; environment, torch's functions and its default dtype, and the class of models on a mesh are
    as before afterwards."""
    environment, functions = dict(os.environ), dict(vars(torch.nn.functional))
    dtype, known = torch.get_default_dtype(), set(vars(autopar.ParallelModule))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    mod = sys.modules[name] = importlib.util.module_from_spec(spec)
    torch.set_default_dtype(torch.float64)
    try:
        spec.loader.exec_module(mod)
        yield mod
    finally:
        torch.set_default_dtype(dtype)
        del sys.modules[name]
        os.environ.clear(), os.environ.update(environment)
        vars(torch.nn.functional).update(functions)
        for added in set(vars(autopar.ParallelModule)) - known:
            delattr(autopar.ParallelModule, added)


class Side:
    """``log``: (what, value) in order. ``way``: to step on a mesh, "train_step", "phases" (forward and backward by
    themselves) or "mixed" (in turns); plain torch knows one."""

    def __init__(self, mod: Any, way: str, on_mesh: bool) -> None:
        self.log: list[tuple[str, Any]] = []
        self.mod, self.on_mesh, self.way, self.steps = mod, on_mesh, way, 0
        self.kept: list[Tensor] = []
        self.loss: Any = None

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = self.mod.Net()
        if self.on_mesh:
            self.net = autopar.parallelize(self.net, mesh_of_one(), example_batch=batch(0))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def play(self, statements: list[str]) -> None:
        """Each statement sees the methods below by their names; what it raises is raised."""
        self.build()
        names = {name: getattr(self, name) for name in METHODS} | {"log": self.note}
        names |= {"net": self.net, "mod": self.mod, "side": self, "kept": self.kept, "torch": torch, "nn": nn}
        for name in ("os", "math", "types", "dataclasses", "functools", "pathlib"):
            names[name] = importlib.import_module(name)
        names |= {"F": torch.nn.functional, "np": np}
        for statement in statements:
            exec(compile(statement, "<event>", "exec"), names)
        self.note("parameters", dict(self.net.named_parameters()))
        self._note_buffers()

    # --- what statements call ---------------------------------------------------------------------------------

    def step(self, k: int, rows: int = 4) -> None:
        """Forward, backward, optimizer."""
        self.accumulate(k, rows)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.note("parameters after the step", dict(self.net.named_parameters()))

    def accumulate(self, k: int, rows: int = 4) -> None:
        """Forward and backward."""
        self.steps += 1
        whole = self.way == "train_step" or (self.way == "mixed" and self.steps % 2)
        if self.on_mesh and whole:
            self.note("loss", self.net.train_step(**batch(k, rows)))
        else:
            out = self.net(**batch(k, rows))
            self.note("loss", out["loss"])
            if not whole:  # where the mesh has them
                self._note_outputs(out)
            out["loss"].backward()
        self._note_state()

    def two(self, k: int) -> None:
        """Two forwards, then the backward of both."""
        one, other = self.net(**batch(k)), self.net(**batch(k + 20))
        (one["loss"] + 2 * other["loss"]).backward()
        self.note("losses", [one["loss"], other["loss"]])
        self._note_state()
        self.optimizer.zero_grad()

    def retained(self, k: int) -> None:
        """One forward, two backwards."""
        loss = self.net(**batch(k))["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
        self._note_state()
        self.optimizer.zero_grad()

    def own_loss(self, k: int) -> None:
        """Forward, and the backward of a loss that is made of another output."""
        loss = self.net(**batch(k))["y"].square().sum()
        self.note("loss", loss)
        loss.backward()
        self._note_state()
        self.optimizer.zero_grad()

    def keep(self, k: int) -> None:
        """A forward, whose outputs are kept, and a backward."""
        out = self.net(**batch(k))
        self.kept += [out[name] for name in sorted(out) if isinstance(out[name], Tensor)]
        out["loss"].backward()
        self._note_state()
        self.optimizer.zero_grad()

    def begin(self, k: int) -> None:
        """A forward, whose backward is in `end`."""
        self.loss = self.net(**batch(k))["loss"]
        self.note("loss", self.loss)

    def end(self) -> None:
        self.loss.backward()
        self._note_state()
        self.optimizer.zero_grad()

    def evaluate(self, k: int) -> None:
        """In eval mode, without gradients."""
        modes = [(m, m.training) for m in self.net.modules()]
        self.net.eval()
        with torch.no_grad():
            self._note_outputs(self.net(**batch(k)))
        for module, mode in modes:
            module.training = mode
        self._note_buffers()

    def quiet(self, k: int) -> None:
        """In the modes that modules have, without gradients."""
        with torch.no_grad():
            self._note_outputs(self.net(**batch(k)))
        self._note_buffers()

    def inference(self, k: int) -> None:
        with torch.inference_mode():
            self._note_outputs(self.net(**batch(k)))
        self._note_buffers()

    def note(self, name: str, value: Any) -> None:
        """For the log: tensors by their values of now."""
        if isinstance(value, dict):
            for key, x in value.items():
                self.note(f"{name} {key}", x)
        elif isinstance(value, (list, tuple)):
            for i, x in enumerate(value):
                self.note(f"{name} {i}", x)
        elif isinstance(value, Tensor):
            with torch.no_grad():
                whole: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
                self.log.append((name, whole.detach().clone()))
        else:
            self.log.append((name, value))

    def _note_outputs(self, out: dict[str, Any]) -> None:
        self.note("output", {name: out[name] for name in sorted(out)})

    def _note_state(self) -> None:
        self.note("gradient", {name: p.grad for name, p in self.net.named_parameters()})
        self._note_buffers()

    def _note_buffers(self) -> None:
        self.note("buffer", dict(self.net.named_buffers()))
        self.note("kept", self.kept)


METHODS = (
    "step",
    "accumulate",
    "two",
    "retained",
    "own_loss",
    "keep",
    "begin",
    "end",
    "evaluate",
    "quiet",
    "inference",
)


def difference(expected: list[tuple[str, Any]], found: list[tuple[str, Any]], whole: bool = True) -> str:
    """The first entry of two logs that differs, "" if none does. ``whole``: one must not be shorter."""
    for (name, x), (other, y) in zip(expected, found):
        if name != other:
            return f"{name} is expected, found {other}"
        if not alike(x, y):
            return f"{name}: {shown(x)} is expected, found {shown(y)}"
    if whole and len(expected) != len(found):
        longer = max(expected, found, key=len)
        return f"{longer[min(len(expected), len(found))][0]} is on one side only"
    return ""


def alike(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and x == y
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.allclose(x.double(), y.double(), rtol=1e-10, atol=1e-10, equal_nan=True)


def shown(x: Any) -> str:
    return f"{x.dtype} {x.tolist()}".replace("torch.", "") if isinstance(x, Tensor) else repr(x)


def compared(path: Path, statements: list[str], way: str) -> tuple[str, Exception | None, Exception | None]:
    """A program in a file on both sides: what differs, what plain torch raised, what the mesh raised."""
    sides, raised = [], []
    for on_mesh in (False, True):
        with imported(path, f"{path.stem}_{'mesh' if on_mesh else 'plain'}") as mod:
            side, error = Side(mod, way, on_mesh), None
            try:
                side.play(statements)
            except Exception as found:
                error = found
            sides.append(side.log), raised.append(error)
        if error is not None and not on_mesh:
            return "", error, None
    return difference(*sides, whole=raised[1] is None), raised[0], raised[1]
