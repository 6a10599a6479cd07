"""`plan_model` and `compile_model` by way of the folder of the cache: read if it is there, else made and written.

What a compilation does beside its result is done with the cache as well: who watches it (a dump) sees it happen, what
it warns of is told again, errors are not stored. `AUTOPAR_CACHE_CHECK=1` compiles anyway and compares.
"""

from __future__ import annotations

import inspect
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from autopar.adapters.collector import resting_collector
from autopar.cache.entry_folder import EntryFolder, entry_folder, log
from autopar.cache.step_codec import Sections, plan_of_sections, plan_sections, step_of_sections, step_sections
from autopar.cache.step_key import step_key
from autopar.cache.value_codec import Damaged, Unstorable
from autopar.cache.values_reached import CannotTell
from autopar.compile.model import compile_model
from autopar.compile.parameters import plan_model
from autopar.compile.shared_capture import SharedCapture
from autopar.ir.mesh import Mesh
from autopar.ir.parameter import ParameterSpec
from autopar.options import Options
from autopar.plan import Plan
from autopar.steps.graphs import Compiled

CHECK = "AUTOPAR_CACHE_CHECK"
T = TypeVar("T")


def stored_plan(
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    options: Options,
    fixed: Plan | None = None,
    *,
    exact: bool = False,
    shared: SharedCapture | None = None,
) -> tuple[Plan, tuple[ParameterSpec, ...]]:
    """As `plan_model`. Where the plan is read nothing is captured, nor kept in ``shared``."""
    return _stored(
        lambda: plan_model(model, batch, mesh, options, fixed, exact=exact, shared=shared),
        lambda: step_key("plan", model, batch, mesh, options=options, fixed=fixed, exact=exact),
        plan_sections, plan_of_sections, _about(model, mesh, "plan"),
    )  # fmt: skip


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
    kind = "train" if how.get("train", True) else "eval"
    kind = kind if how.get("outputs", ()) is not None or kind == "eval" else "forward"
    found = _stored(
        make,
        lambda: step_key("step", model, batch, mesh, options=options, **how),
        step_sections, step_of_sections, _about(model, mesh, kind),
    )  # fmt: skip
    if shared is not None:
        shared.forget()
    return found


def _about(model: nn.Module, mesh: Mesh, kind: str) -> dict[str, Any]:
    return {"model": type(model).__name__, "mesh": str(mesh), "kind": kind}


def _stored(
    make: Callable[[], T],
    key_of: Callable[[], str],
    pack: Callable[[T], dict[str, bytes]],
    unpack: Callable[[Sections], T],
    about: dict[str, Any],
) -> T:
    folder = entry_folder()
    if folder is None:
        return make()
    try:
        with resting_collector():
            key = key_of()
    except CannotTell as why:
        log.debug("%s of %s is not cached: %s", about["kind"], about["model"], why)
        return make()
    except Exception:  # objects may do anything when they are looked at; a model is compiled all the same
        log.debug("%s of %s is not cached", about["kind"], about["model"], exc_info=True)
        return make()
    start = time.perf_counter()

    def read() -> T | None:
        found = _read(folder, key, unpack)
        if found is not None and hasattr(found, "timings"):
            found.timings["cache"] = time.perf_counter() - start
        return found

    if os.environ.get(CHECK, "") not in ("", "0"):
        return _checked(make, folder, key, pack, about, key_of)
    found = read()
    if found is not None:
        return found
    if folder.is_refused(key):
        return _made(make, folder, key, pack, about, key_of)
    with folder.turn(key):
        if (found := read()) is not None:  # another one may have written it just before
            return found
        return _made(make, folder, key, pack, about, key_of)


def _read(folder: EntryFolder, key: str, unpack: Callable[[Sections], T]) -> T | None:
    entry = folder.read(key)
    if entry is None:
        return None
    try:
        with resting_collector():
            found = unpack(entry.sections)
    except Damaged as error:
        log.debug("a file is not used: %s", error)
        return None
    for text in entry.about.get("warned", ()):
        warnings.warn(str(text), UserWarning, stacklevel=4)
    return found


def _made(
    make: Callable[[], T],
    folder: EntryFolder,
    key: str,
    pack: Callable[[T], dict[str, bytes]],
    about: dict[str, Any],
    key_of: Callable[[], str],
) -> T:
    """What is made now, and written if it may be."""
    with _noticed_warnings() as warned:
        made = make()
    try:
        if key_of() != key:
            raise Unstorable("compiling it changes what it was compiled from")
        folder.write(key, about | {"created": time.time(), "warned": warned}, pack(made))
    except (Unstorable, CannotTell) as why:
        log.debug("%s of %s is not stored: %s", about["kind"], about["model"], why)
        folder.refuse(key)
    except Exception:  # as above
        log.debug("%s of %s is not stored", about["kind"], about["model"], exc_info=True)
        folder.refuse(key)
    return made


def _checked(
    make: Callable[[], T],
    folder: EntryFolder,
    key: str,
    pack: Callable[[T], dict[str, bytes]],
    about: dict[str, Any],
    key_of: Callable[[], str],
) -> T:
    """What is made now, once it is found equal to what is in the folder."""
    entry = folder.read(key)
    if entry is None:
        return _made(make, folder, key, pack, about, key_of)
    made = make()
    try:
        packed = pack(made)
    except Unstorable:
        packed = {}
    for name, data in packed.items():
        if name not in entry.sections or entry.sections[name] != data:
            raise ValueError(
                f"cache: {CHECK}: the {about['kind']} step of {about['model']} on {about['mesh']} is another than in "
                f"the cache, in {name}{_difference(entry.sections, name, data)}; set AUTOPAR_CACHE=0, or clear the "
                "cache (python -m autopar cache --clear)"
            )
    return made


def _difference(sections: Sections, name: str, data: bytes) -> str:
    if name not in sections:
        return ", which it lacks"
    old, new = json.loads(sections[name]), json.loads(data)
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [key for key in new if new[key] != old.get(key)]
        return f" ({', '.join(parts)})"
    return ""


@contextmanager
def _noticed_warnings() -> Iterator[list[str]]:
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
