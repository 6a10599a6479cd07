"""What compiling captures is captured once in a run of the tests: all workers and their ranks share a folder of it.

    python -m pytest tests                          compile_model, plan_model, parallelize: the first of all captures
    with captured_by_each(): ...                    everybody captures

A captured graph is found by what tests do to models (`tests.support.compile_cache.facts_of_model`): modules, their
attributes, and what their code reads. A model of a few modules is captured, and who calls
`autopar.capture.front_end.capture` captures: tests of it do.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from autopar.adapters.copying.fake import new_mode
from autopar.adapters.dispatch import modes_around
from autopar.adapters.fx.lazy import lazy_code
from autopar.adapters.torch_flags import default_devices, torch_flags
from autopar.cache.compile_cache import noticed_warnings
from autopar.cache.disk_cache import DiskCache
from autopar.cache.graph_codec import GraphDecoder, GraphEncoder
from autopar.cache.value_codec import Damaged, Unstorable
from autopar.capture.front_end import capture
from autopar.capture.trace.gc_pause import paused_collector
from autopar.compile import parameters, shared_capture
from autopar.ir.batch import facts_of, tensors_of
from autopar.ir.graph import copy_graph
from autopar.precision import Precision

FOLDER = "AUTOPAR_TESTS_CAPTURED"  # variable of the environment: of this run
ROOM = 2 << 30  # bytes
KEPT = 24  # graphs in a process, beside the files
FEW = 12  # modules: so small a model is captured as fast as its key is made


class CapturedOnce:
    """`capture`, or a copy of what it gave for the same question. (An object: to autopar it is no changed function.)"""

    def __init__(self) -> None:
        self.asked, self.made = 0, 0
        self._kept: OrderedDict[str, GraphModule] = OrderedDict()

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], **how: Any) -> GraphModule:
        self.asked += 1
        key, files = _key(model, batch, how), _files()
        if key is None or files is None:
            return self._captured(model, batch, how)
        found = self._kept.get(key) or _read(files, key)
        if found is None:
            with noticed_warnings() as warned:
                found = self._captured(model, batch, how)
            if warned:
                return found
            _write(files, key, found)
        self._kept[key] = found
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return copy_graph(found)

    def _captured(self, model: nn.Module, batch: Mapping[str, Any], how: Mapping[str, Any]) -> GraphModule:
        self.made += 1
        return capture(model, batch, **how)


captured_once = CapturedOnce()


def share_captures() -> None:
    """From now on, in this process and those that it forks."""
    shared_capture.capture = parameters.capture = captured_once  # type: ignore[assignment]


@contextmanager
def captured_by_each() -> Iterator[None]:
    """Within: nothing that others have captured is taken."""
    before = shared_capture.capture, parameters.capture
    shared_capture.capture = parameters.capture = capture
    try:
        yield
    finally:
        shared_capture.capture, parameters.capture = before


@contextmanager
def folder_of_run() -> Iterator[None]:
    """For the process that starts workers, which inherit the folder."""
    with tempfile.TemporaryDirectory(prefix="autopar-tests-", dir=_in_memory(), ignore_cleanup_errors=True) as path:
        os.environ[FOLDER] = path
        try:
            yield
        finally:
            del os.environ[FOLDER]


def _in_memory() -> str | None:
    """A place for tens of thousands of small files, which a disk makes slowly; None where there is no such place."""
    place = "/dev/shm"
    roomy = os.access(place, os.W_OK) and shutil.disk_usage(place).free > ROOM
    return place if roomy else None


def _files() -> DiskCache | None:
    path = os.environ.get(FOLDER)
    return DiskCache(Path(path)) if path else None


def _key(model: nn.Module, batch: Mapping[str, Any], how: Mapping[str, Any]) -> str | None:
    """None where it is not worth it."""
    from tests.support.compile_cache import facts_of_model

    small = isinstance(model, nn.Module) and sum(1 for _ in model.modules()) < FEW
    if small or modes_around() or torch.is_inference_mode_enabled():
        return None
    asked = inspect.signature(capture).bind(model, batch, **how)
    asked.apply_defaults()
    asked.arguments["precision"] = asked.arguments.get("precision") or Precision()  # as `capture` reads it
    given = (
        {name: x.stride() for name, x in tensors_of(batch).items()},
        str(pytree.tree_map_only(Tensor, lambda x: type(x), dict(batch))),
    )
    with paused_collector():
        facts = facts_of_model(model), facts_of(batch), given, asked.kwargs, [*torch_flags()], default_devices()
    return hashlib.blake2b(str(facts).encode(), digest_size=20).hexdigest()


def _write(files: DiskCache, key: str, gm: GraphModule) -> None:
    try:
        with lazy_code(), paused_collector():
            text = json.dumps(GraphEncoder().graph(gm))
    except (Unstorable, TypeError, ValueError):
        return
    files.write(key, {}, {"graph": text.encode()})


def _read(files: DiskCache, key: str) -> GraphModule | None:
    entry = files.read(key)
    if entry is None:
        return None
    try:
        with lazy_code(), paused_collector():
            return GraphDecoder(new_mode()).graph(json.loads(entry.sections["graph"]))
    except Damaged:
        return None
