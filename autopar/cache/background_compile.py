"""Compiles the step that a run is likely to need next in a background process, into the compile cache.

    background = BackgroundCompile(mesh, options, lift_to_float64)
    background.ask(structure, batch, longer, how)     returns at once; the step of the longer batch is cached later

Compiling changes global state (patched classes, warnings, the garbage collector) and holds the interpreter lock, so a
thread will not do. A separate process with low priority compiles what `stored_step` would, from a pickle of the modules
without weights, and writes it to the cache. Ranks need no new agreement: a rank that needs the step meanwhile waits for
the lock of the cache entry, as ranks of a node wait for each other. If the process fails, it writes nothing: the step
is compiled when it is needed, and the error is raised then.

The process first looks up the step of the current batch, which is in the cache. If it does not find it, its keys differ
(a flag of torch, a class from elsewhere), so nobody would find its result, and it exits.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import nn

from autopar.adapters.copying.fake import came_from_elsewhere, owned_by
from autopar.adapters.processes import end_with_parent
from autopar.cache.compile_cache import known_step, stored_step
from autopar.cache.disk_cache import entry_folder, log
from autopar.capture.front_end import ADAPTERS, adapter_for
from autopar.compile.parameters import for_whole_batch
from autopar.ir.batch import facts_of
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.steps.graphs import Compiled

NICER = 10  # niceness, relative to the training
_PROGRAM = f"import sys; from {__name__} import work; sys.exit(work())"
ABSENT = 3  # exit status: the step of the current batch is not in the cache
_FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
}  # global flags that are part of a key: (getter, setter)


@dataclass(frozen=True)
class _LongerStep:
    """A request to the process. batch, longer: batches of one rank, on the meta device."""

    model: nn.Module
    overlaps: tuple[tuple[str, str], ...]  # of its parameters
    batch: Mapping[str, Any]
    longer: Mapping[str, Any]
    mesh: Mesh
    options: Options
    how: Mapping[str, Any]


class BackgroundCompile:
    """Background compilations of one model, one at a time."""

    def __init__(self, mesh: Mesh, options: Options, lift_to_float64: bool) -> None:
        self._mesh, self._options, self._lift_to_float64 = mesh, options, lift_to_float64
        self._asked: set[tuple[str, ...]] = set()
        self._waiting: queue.Queue[IO[bytes]] = queue.Queue()
        self._worker: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def ask(
        self, model: nn.Module, batch: Mapping[str, Any], longer: Mapping[str, Any] | None, how: Mapping[str, Any]
    ) -> None:
        """Compile the training step of ``longer``, unless it was requested before; ``how``: arguments of
        `stored_step`."""
        if longer is None or entry_folder() is None or facts_of(longer) in self._asked:
            return
        self._asked |= {facts_of(batch), facts_of(longer)}
        how = {"lift_to_float64": self._lift_to_float64, **how}
        try:
            data = _dumped(_LongerStep(model, owned_by(model).overlaps, batch, longer, self._mesh, self._options, how))
        except Exception as error:  # pickling may run any code
            log.debug("no background compile: %s cannot be sent to a process: %s", type(model).__name__, error)
            return
        file = tempfile.TemporaryFile()  # noqa: SIM115  (the worker closes it)
        file.write(data)
        file.seek(0)
        self._waiting.put(file)
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="autopar background compile", daemon=True)
            self._worker.start()
            atexit.register(self.close)

    def close(self) -> None:
        """Kill the running process."""
        if self._process is not None:
            self._process.kill()

    def _work(self) -> None:
        """The thread that runs one process after the other."""
        path = os.pathsep.join(p for p in sys.path if p)
        while True:
            with self._waiting.get() as file:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM], stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": path},
                )  # fmt: skip
                _, said = self._process.communicate()
            if self._process.returncode:
                last = (said.decode(errors="replace").strip().splitlines() or [""])[-1]
                log.debug("no background compile: exit status %s %s", self._process.returncode, last)


def _dumped(request: _LongerStep) -> bytes:
    """A pickled request, after adapters and flags to set before reading it. With cloudpickle it can include code of
    the script."""
    head = [type(x).__module__ for x in ADAPTERS], {name: get() for name, (get, _) in _FLAGS.items()}
    dumps = pickle.dumps
    with suppress(ImportError):
        dumps = importlib.import_module("cloudpickle").dumps
    return pickle.dumps(head) + dumps(request)


def serve(file: IO[bytes]) -> int:
    """Process a request; returns the exit status."""
    adapters, flags = pickle.load(file)
    for name in adapters:
        importlib.import_module(name)
    for name, value in flags.items():
        _FLAGS[name][1](value)
    request: _LongerStep = pickle.load(file)
    came_from_elsewhere(request.model, request.overlaps)
    if (settle := getattr(adapter_for(request.model), "settle", None)) is not None:
        settle(request.model)  # for a library that keeps a registry of created models
    if _part(request, request.batch, known_step) is None:
        return ABSENT
    _part(request, request.longer, stored_step)
    return 0


class _Absent(Exception):
    """There is no such entry in the cache."""


def _part(request: _LongerStep, batch: Mapping[str, Any], make: Callable[..., Compiled | None]) -> Compiled | None:
    """A step for the batch of one rank, or None."""

    def made(whole: dict[str, Any]) -> Compiled:
        found = make(request.model, whole, request.mesh, request.options, **request.how)
        if found is None:
            raise _Absent
        return found

    try:
        return for_whole_batch(
            made, lambda step: step.plan, request.model, batch, request.mesh, request.options, request.how.get("fixed")
        )
    except _Absent:
        return None


def work() -> int:
    """Main function of the process."""
    end_with_parent()
    os.nice(NICER)
    torch.set_num_threads(1)
    return serve(sys.stdin.buffer)
