"""`plan_model` and `compile_model` through the compile cache: read an entry, or compile and write it.

Side effects of a compilation are kept: observers (a dump) always compile, warnings are stored and repeated, errors are
not stored. `AUTOPAR_CACHE_CHECK=1` compiles anyway and compares with the entry.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import nn

from autopar.cache.disk_cache import DiskCache, entry_folder, log
from autopar.cache.step_codec import Sections, plan_of_sections, plan_sections, step_of_sections, step_sections
from autopar.cache.step_key import step_key
from autopar.cache.value_codec import Damaged, Unstorable
from autopar.capture.trace.gc_pause import paused_collector
from autopar.compile.model import capture_example, capture_step, compile_graph, plan_graph
from autopar.ir.mesh import Mesh
from autopar.ir.signature import ParameterSpec
from autopar.options import Options
from autopar.plan import Plan
from autopar.rewrite.compilation import timed
from autopar.steps.graphs import Compiled

CHECK = "AUTOPAR_CACHE_CHECK"
_logged: set[str] = set()  # messages that were logged once
T = TypeVar("T")


def stored_plan(
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    options: Options,
    fixed: Plan | None = None,
    **how: Any,
) -> tuple[Plan, tuple[ParameterSpec, ...]]:
    """`plan_model` through the cache, with the same other arguments."""
    gm = capture_example(model, batch, options, fixed, **how)
    return _Wanted(
        lambda: plan_graph(gm, mesh, options, fixed),
        lambda: step_key("plan", gm, mesh, options=options, fixed=fixed),
        plan_sections, plan_of_sections, _about(model, mesh, "plan"),
    ).found()  # fmt: skip


def stored_step(
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    options: Options | None = None,
    *,
    observed: bool = False,
    observers: Sequence[Any] = (),
    **how: Any,
) -> Compiled:
    """`compile_model` through the cache, with the same other arguments. ``observed``: compile in any case."""
    wanted = _wanted_step(model, batch, mesh, options, observers, **how)
    return wanted.make() if observed else wanted.found()


def known_step(
    model: nn.Module, batch: Mapping[str, Any], mesh: Mesh, options: Options | None = None, **how: Any
) -> Compiled | None:
    """The entry that `stored_step` would read; None if it would compile."""
    return _wanted_step(model, batch, mesh, options, **how).known()


def _wanted_step(
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    options: Options | None = None,
    observers: Sequence[Any] = (),
    *,
    train: bool = True,
    plan: Plan | None = None,
    fixed: Plan | None = None,
    outputs: Sequence[str] | None = None,
    tangents: Sequence[str] = (),
    **how: Any,
) -> _Wanted[Compiled]:
    asked, timings = options or (plan.options if plan is not None else Options()), dict[str, float]()
    gm = timed(timings, "capture", lambda: capture_step(model, batch, asked, fixed, train=train, **how))
    constants = gm.meta["constants"]
    question: dict[str, Any] = {
        "train": train, "plan": plan, "fixed": fixed, "outputs": outputs and tuple(outputs), "tangents": tuple(tangents)
    }  # fmt: skip
    return _Wanted(
        lambda: compile_graph(gm, mesh, options, timings=timings, observers=observers, **question),
        lambda: step_key("step", gm, mesh, options=options, **question),
        step_sections, lambda sections: step_of_sections(sections, constants),
        _about(model, mesh, "eval" if not train else "train" if outputs is not None else "forward"), timings,
    )  # fmt: skip


def _about(model: nn.Module, mesh: Mesh, kind: str) -> dict[str, Any]:
    return {"model": type(model).__name__, "mesh": str(mesh), "kind": kind}


@dataclass(frozen=True)
class _Wanted(Generic[T]):
    """A request: how to compile the result, its key, its encoding, and its description in lists of entries."""

    make: Callable[[], T]
    key_of: Callable[[], str]
    pack: Callable[[T], dict[str, bytes]]
    unpack: Callable[[Sections], T]
    about: dict[str, Any]
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds of earlier phases

    def found(self) -> T:
        """Read the entry, or compile and write it."""
        folder = entry_folder()
        key = self._key() if folder is not None else None
        if folder is None or key is None:
            return self.make()
        if os.environ.get(CHECK, "") not in ("", "0"):
            return self._checked(folder, key)
        found = self._read(folder, key)
        if found is not None:
            return found
        if folder.is_refused(key):
            return self._made(folder, key)
        with folder.turn(key):
            found = self._read(folder, key)  # another process may have written it meanwhile
            return self._made(folder, key) if found is None else found

    def known(self) -> T | None:
        """Read the entry; None if there is none."""
        folder = entry_folder()
        key = self._key() if folder is not None else None
        return self._read(folder, key) if folder is not None and key is not None else None

    def _key(self) -> str | None:
        try:
            with paused_collector():
                return self.key_of()
        except (Unstorable, RecursionError) as error:
            self._log("not cached", error)
        return None

    def _read(self, folder: DiskCache, key: str) -> T | None:
        start = time.perf_counter()
        entry = folder.read(key)
        if entry is None:
            return None
        try:
            with paused_collector():
                found = self.unpack(entry.sections)
        except Damaged as error:
            self._log("not read", error)
            return None
        for text in entry.about.get("warned", ()):
            warnings.warn(str(text), UserWarning, stacklevel=3)
        if hasattr(found, "timings"):
            found.timings.update(self.timings, cache=time.perf_counter() - start)
        return found

    def _made(self, folder: DiskCache, key: str) -> T:
        """Compile, and write the result if it can be stored."""
        with noticed_warnings() as warned:
            made = self.make()
        try:
            folder.write(key, self.about | {"created": time.time(), "warned": warned}, self.pack(made))
        except (Unstorable, RecursionError) as why:
            self._log("not stored", why)
            folder.refuse(key)
        return made

    def _checked(self, folder: DiskCache, key: str) -> T:
        """Compile, and compare the result with the entry. Raises ValueError if they differ."""
        entry = folder.read(key)
        if entry is None:
            return self._made(folder, key)
        made = self.make()
        try:
            packed = self.pack(made)
        except Unstorable:
            packed = {}
        for name, data in packed.items():
            if name not in entry.sections or entry.sections[name] != data:
                raise ValueError(
                    f"cache: {CHECK}: the {self.about['kind']} step of {self.about['model']} on {self.about['mesh']} "
                    f"differs from the cache entry in {name}{_difference(entry.sections, name, data)}; set "
                    "AUTOPAR_CACHE=0, or clear the cache (python -m autopar cache --clear)"
                )
        return made

    def _log(self, what: str, why: Exception) -> None:
        said = f"{self.about['kind']} of {self.about['model']} is {what}: {why}"
        level = logging.DEBUG if said in _logged else logging.INFO
        _logged.add(said)
        log.log(level, "%s; see docs/cache.md for what can be cached", said)


def _difference(sections: Sections, name: str, data: bytes) -> str:
    if name not in sections:
        return ", which it does not have"
    old, new = json.loads(sections[name]), json.loads(data)
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [key for key in new if new[key] != old.get(key)]
        return f" ({', '.join(parts)})"
    return ""


@contextmanager
def noticed_warnings() -> Iterator[list[str]]:
    """Context manager: yields the texts of autopar's warnings, which are also shown."""
    noted: list[str] = []
    warn = warnings.warn

    def noticed(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **more: Any) -> None:
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if caller is None or str(caller.f_globals.get("__name__", "")).startswith("autopar."):
            noted.append(str(message))
        warn(message, category, stacklevel + 1, source, **more)

    warnings.warn = noticed
    try:
        yield noted
    finally:
        warnings.warn = warn
