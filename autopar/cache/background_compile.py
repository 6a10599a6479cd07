"""The step that a run is likely to need next, compiled beside it, into the folder of the cache.

    ahead = Ahead(mesh, options, lift_to_float64)
    ahead.ask(structure, batch, longer, how)     returns at once; later the entry of the longer batch is in the folder

Compiling changes what all threads of a process see (classes that a capture patches, warnings, the collector) and holds
the interpreter that the training needs: it is no thread's work. A process of its own, with a low priority, makes what
`stored_step` would make, from a pickle of the modules without weights, and leaves it where `stored_step` looks. So
ranks agree on nothing new: who needs the step while it is made waits for its turn, as ranks of a node wait for each
other. A process that fails leaves nothing: the step is compiled when it is needed, and says then what is wrong.

The process first looks for the step of the batch at hand, which is in the folder. If it finds none, its keys are others
(a flag of torch that it lacks, a class that it has from elsewhere), nobody would find what it makes, and it ends.
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

NICER = 10  # than the training
_PROGRAM = f"import sys; from {__name__} import work; sys.exit(work())"
ABSENT = 3  # exit status: the step of the batch at hand is not in the folder
_FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
}  # what programs set, and a key knows


@dataclass(frozen=True)
class _LongerStep:
    """What the process needs to know. ``batch``, ``longer``: one rank's parts, on the meta device."""

    model: nn.Module
    overlaps: tuple[tuple[str, str], ...]  # of its parameters
    batch: Mapping[str, Any]
    longer: Mapping[str, Any]
    mesh: Mesh
    options: Options
    how: Mapping[str, Any]


class BackgroundCompile:
    """Requests of one model, worked off one after the other."""

    def __init__(self, mesh: Mesh, options: Options, lift_to_float64: bool) -> None:
        self._mesh, self._options, self._lift_to_float64 = mesh, options, lift_to_float64
        self._asked: set[tuple[str, ...]] = set()
        self._waiting: queue.Queue[IO[bytes]] = queue.Queue()
        self._worker: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def ask(
        self, model: nn.Module, batch: Mapping[str, Any], longer: Mapping[str, Any] | None, how: Mapping[str, Any]
    ) -> None:
        """Compile the training step of ``longer`` too, if it was not asked for before; ``how``: as `stored_step`."""
        if longer is None or entry_folder() is None or facts_of(longer) in self._asked:
            return
        self._asked |= {facts_of(batch), facts_of(longer)}
        how = {"lift_to_float64": self._lift_to_float64, **how}
        try:
            data = _dumped(_LongerStep(model, owned_by(model).overlaps, batch, longer, self._mesh, self._options, how))
        except Exception as error:  # objects may do anything when they are pickled
            log.debug("not compiled ahead: %s cannot be sent to a process: %s", type(model).__name__, error)
            return
        file = tempfile.TemporaryFile()  # noqa: SIM115  (who works it off closes it)
        file.write(data)
        file.seek(0)
        self._waiting.put(file)
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="autopar ahead", daemon=True)
            self._worker.start()
            atexit.register(self.close)

    def close(self) -> None:
        """End what is under way."""
        if self._process is not None:
            self._process.kill()

    def _work(self) -> None:
        """Waits for processes; they end with this thread."""
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
                log.debug("not compiled ahead: exit status %s %s", self._process.returncode, last)


def _dumped(request: _LongerStep) -> bytes:
    """With what is to be set before it is read. By cloudpickle, if it is there: it sends what only the script has."""
    head = [type(x).__module__ for x in ADAPTERS], {name: get() for name, (get, _) in _FLAGS.items()}
    dumps = pickle.dumps
    with suppress(ImportError):
        dumps = importlib.import_module("cloudpickle").dumps
    return pickle.dumps(head) + dumps(request)


def serve(file: IO[bytes]) -> int:
    """Work off a request; returns the exit status."""
    adapters, flags = pickle.load(file)
    for name in adapters:
        importlib.import_module(name)
    for name, value in flags.items():
        _FLAGS[name][1](value)
    request: _LongerStep = pickle.load(file)
    came_from_elsewhere(request.model, request.overlaps)
    if (settle := getattr(adapter_for(request.model), "settle", None)) is not None:
        settle(request.model)  # of a library that notes which models were made
    if _part(request, request.batch, known_step) is None:
        return ABSENT
    _part(request, request.longer, stored_step)
    return 0


class _Absent(Exception):
    """There is no such entry."""


def _part(request: _LongerStep, batch: Mapping[str, Any], make: Callable[..., Compiled | None]) -> Compiled | None:
    """A step for one rank's part of a batch, or None."""

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
    """The process."""
    end_with_parent()
    os.nice(NICER)
    torch.set_num_threads(1)
    return serve(sys.stdin.buffer)
