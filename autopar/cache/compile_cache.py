"""`plan_model` and `compile_model` by way of the folder of the cache: read if it is there, else made and written.

What a compilation does beside its result is done with the cache as well: who watches it (a dump) sees it happen, what
it warns of is told again, errors are not stored. `AUTOPAR_CACHE_CHECK=1` compiles anyway and compares.
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
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

from autopar.cache.disk_cache import DiskCache, entry_folder, log
from autopar.cache.fingerprint_values import Uncacheable
from autopar.cache.step_codec import Sections, plan_of_sections, plan_sections, step_of_sections, step_sections
from autopar.cache.step_key import step_key
from autopar.cache.value_codec import Damaged, Unstorable
from autopar.capture.layer_dedup.layer_signature import memory_of
from autopar.capture.reads.forward_reads import ForwardReads
from autopar.capture.trace.gc_pause import resting_collector
from autopar.compile.model import compile_model, plan_model
from autopar.compile.shared_capture import SharedCapture
from autopar.ir.mesh import Mesh
from autopar.ir.signature import ParameterSpec
from autopar.options import Options
from autopar.plan import Plan
from autopar.steps.graphs import Compiled

CHECK = "AUTOPAR_CACHE_CHECK"
_told: set[str] = set()  # what has been said of models that are compiled each time
T = TypeVar("T")


def stored_plan(
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    options: Options,
    fixed: Plan | None = None,
    *,
    shared: SharedCapture | None = None,
    **how: Any,
) -> tuple[Plan, tuple[ParameterSpec, ...]]:
    """As `plan_model`, which has the other arguments. Where the plan is read nothing is captured, nor kept in
    ``shared``."""
    return _Wanted(
        lambda: plan_model(model, batch, mesh, options, fixed, shared=shared, **how),
        lambda: step_key("plan", model, batch, mesh, options=options, fixed=fixed, **how),
        plan_sections, plan_of_sections, _about(model, mesh, "plan"),
    ).found()  # fmt: skip


def stored_step(
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    options: Options | None = None,
    *,
    shared: SharedCapture | None = None,
    observed: bool = False,
    observers: Sequence[Any] = (),
    **how: Any,
) -> Compiled:
    """As `compile_model`, which has the other arguments. ``observed``: somebody wants to see it compiled."""

    def make() -> Compiled:
        return compile_model(model, batch, mesh, options, shared=shared, observers=observers, **how)

    if observed:
        return make()
    found = _wanted_step(make, model, batch, mesh, options, **how).found()
    if shared is not None:
        shared.forget()
    return found


def known_step(
    model: nn.Module, batch: Mapping[str, Any], mesh: Mesh, options: Options | None = None, **how: Any
) -> Compiled | None:
    """What `stored_step` would read; None where it would compile."""

    def never() -> Compiled:
        raise AssertionError("nothing is made here")

    return _wanted_step(never, model, batch, mesh, options, **how).known()


def _wanted_step(
    make: Callable[[], Compiled],
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    options: Options | None,
    **how: Any,
) -> _Wanted[Compiled]:
    kind = "train" if how.get("train", True) else "eval"
    kind = kind if how.get("outputs", ()) is not None or kind == "eval" else "forward"
    return _Wanted(
        make,
        lambda: step_key("step", model, batch, mesh, options=options, **how),
        lambda made: _sections(made, model), step_of_sections, _about(model, mesh, kind),
    )  # fmt: skip


def _sections(made: Compiled, model: nn.Module) -> dict[str, bytes]:
    """Raises Unstorable, also for a step that computes with a tensor which the user has, and may write to."""
    kept = {memory_of(x) for x in ForwardReads(model).guards.tensors if not x.is_meta}
    for name, constant in made.constants.items():
        if memory_of(constant) in kept:
            raise Unstorable(f"{name}, a tensor that may be written to between steps")
    return step_sections(made)


def _about(model: nn.Module, mesh: Mesh, kind: str) -> dict[str, Any]:
    return {"model": type(model).__name__, "mesh": str(mesh), "kind": kind}


@dataclass(frozen=True)
class _Wanted(Generic[T]):
    """What is asked for: how it is made, its key, how it is written and read, and what the list of entries says."""

    make: Callable[[], T]
    key_of: Callable[[], str]
    pack: Callable[[T], dict[str, bytes]]
    unpack: Callable[[Sections], T]
    about: dict[str, Any]

    def found(self) -> T:
        """Read if it is there, else made and written."""
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
            found = self._read(folder, key)  # another one may have written it just before
            return self._made(folder, key) if found is None else found

    def known(self) -> T | None:
        """Read if it is there."""
        folder = entry_folder()
        key = self._key() if folder is not None else None
        return self._read(folder, key) if folder is not None and key is not None else None

    def _key(self) -> str | None:
        try:
            with resting_collector():
                return self.key_of()
        except Exception as error:  # objects may do anything when they are looked at; a model is compiled all the same
            self._log("not cached", error)
        return None

    def _read(self, folder: DiskCache, key: str) -> T | None:
        start = time.perf_counter()
        entry = folder.read(key)
        if entry is None:
            return None
        try:
            with resting_collector():
                found = self.unpack(entry.sections)
        except Damaged as error:
            self._log("not read", error)
            return None
        for text in entry.about.get("warned", ()):
            warnings.warn(str(text), UserWarning, stacklevel=3)
        if hasattr(found, "timings"):
            found.timings["cache"] = time.perf_counter() - start
        return found

    def _made(self, folder: DiskCache, key: str) -> T:
        """What is made now, and written if it may be."""
        with noticed_warnings() as warned:
            made = self.make()
        try:
            if self.key_of() != key:
                raise Unstorable("compiling it changes what it was compiled from")
            folder.write(key, self.about | {"created": time.time(), "warned": warned}, self.pack(made))
        except Exception as why:  # Unstorable, Uncacheable, or what objects do when they are looked at
            self._log("not stored", why)
            folder.refuse(key)
        return made

    def _checked(self, folder: DiskCache, key: str) -> T:
        """What is made now, once it is found equal to what is in the folder."""
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
                    f"is another than in the cache, in {name}{_difference(entry.sections, name, data)}; set "
                    "AUTOPAR_CACHE=0, or clear the cache (python -m autopar cache --clear)"
                )
        return made

    def _log(self, what: str, why: Exception) -> None:
        expected = isinstance(why, (Uncacheable, Unstorable, Damaged))
        said = f"{self.about['kind']} of {self.about['model']} is {what}: {why}"
        level = logging.DEBUG if said in _told else logging.INFO
        _told.add(said)
        log.log(level, "%s; docs/cache.md says what is kept", said, exc_info=not expected)


def _difference(sections: Sections, name: str, data: bytes) -> str:
    if name not in sections:
        return ", which it lacks"
    old, new = json.loads(sections[name]), json.loads(data)
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [key for key in new if new[key] != old.get(key)]
        return f" ({', '.join(parts)})"
    return ""


@contextmanager
def noticed_warnings() -> Iterator[list[str]]:
    """Within: gives the texts of autopar's warnings, which are warned of as well."""
    told: list[str] = []
    warn = warnings.warn

    def noticed(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **more: Any) -> None:
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if caller is None or str(caller.f_globals.get("__name__", "")).startswith("autopar."):
            told.append(str(message))
        warn(message, category, stacklevel + 1, source, **more)

    warnings.warn = noticed
    try:
        yield told
    finally:
        warnings.warn = warn
