"""Functions by what they are: their code, and the names that it reads of its file, of classes and of modules.

    def forward(self, x): return helper(x) * config.SCALE        code; helper; config.SCALE

A digest of code leaves out where it stands (its lines): that is for the digest of its file.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from autopar.cache.libraries import USER, owner_of_module

_BUILTINS = vars(builtins)
_IMPURE_MODULES = {
    "time", "posix", "nt", "io", "_io", "_socket", "socket", "subprocess", "tempfile", "glob", "shutil", "secrets",
    "uuid", "platform", "urllib.request", "genericpath",
}  # fmt: skip
_ENVIRONMENT = {"environ", "getenv", "environb"}
_OF_TEXTS = (eval, exec, compile, __import__, importlib.import_module)
_PURE = {"getenv", "fspath", "cpu_count"}
_READS_FILES = {"read_text", "read_bytes", "open", "exists", "is_file", "is_dir", "iterdir", "glob", "stat"}
_CLOCKS = {"now", "today", "utcnow"}
_known_codes: dict[types.CodeType, str] = {}


def code_digest(code: types.CodeType) -> str:
    """Equal for code that does the same."""
    known = _known_codes.get(code)
    if known is None or len(_known_codes) > 1 << 16:
        facts = (
            code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags,
            code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable, code.co_qualname,
            tuple(map(_constant, code.co_consts)),
        )  # fmt: skip
        known = hashlib.blake2b(repr(facts).encode(), digest_size=12).hexdigest()
        if not code.co_filename.startswith("<"):
            _known_codes[code] = known
    return known


def _constant(x: Any) -> Any:
    if isinstance(x, types.CodeType):
        return "code", code_digest(x)
    if isinstance(x, frozenset):
        return "frozenset", sorted(map(repr, map(_constant, x)))
    if isinstance(x, tuple):
        return tuple(map(_constant, x))
    return type(x).__name__, repr(x)


def names_in(code: types.CodeType) -> set[str]:
    """Names that code, and functions inside of it, read of their file or as attributes; texts in it that may be such
    (``getattr(self, "gate")``)."""
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= names_in(const)
        elif isinstance(const, str) and const.isidentifier():
            found.add(const)
        elif isinstance(const, (tuple, frozenset)):
            found.update(x for x in const if isinstance(x, str) and x.isidentifier())
    return found


def globals_read(function: types.FunctionType, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a function reads of its file, and of modules among that (``config.SCALE``, and what it
    imports while it runs), in the order of names."""
    names = sorted(names)
    scope = function.__globals__
    for name in names:
        if name in scope:
            yield name, scope[name]
            yield from _inside(name, scope[name], names, set())
        elif name in _BUILTINS:
            yield name, _BUILTINS[name]
    for name in function.__code__.co_names:  # of imports within it
        for module in _imported(name, str(scope.get("__package__") or scope.get("__name__") or "")):
            yield from _inside(name, module, names, set())


def _imported(name: str, package: str) -> Iterator[types.ModuleType]:
    """Modules that an import of this name within a package may mean."""
    for path in _paths(name, package):
        if (module := sys.modules.get(path)) is not None:
            yield module


@functools.lru_cache(65536)
def _paths(name: str, package: str) -> tuple[str, ...]:
    parts = package.split(".")
    return name, *(f"{'.'.join(parts[:i])}.{name}" for i in range(1, len(parts) + 1))


def _inside(path: str, value: Any, names: list[str], seen: set[int]) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, types.ModuleType) or id(value) in seen:
        return
    seen.add(id(value))
    entries, package = vars(value), value.__name__.partition(".")[0]
    others = owner_of_module(value.__name__) != USER  # what a library imports of others is its own business
    for name in names:
        entry = entries.get(name)
        if others and isinstance(entry, types.ModuleType) and entry.__name__.partition(".")[0] != package:
            continue
        if name not in entries and not others and "__getattr__" in entries:
            yield f"{path}.__getattr__", entries["__getattr__"]
        if name in entries:
            yield f"{path}.{name}", entries[name]
            yield from _inside(f"{path}.{name}", entries[name], names, seen)


def environment_read(names: set[str], texts: Iterable[str]) -> dict[str, str | None] | None:
    """The environment's variables that code may read, those that it names; None where it makes up names."""
    if _ENVIRONMENT.isdisjoint(names):
        return {}
    known = sorted({*texts, *names} - _ENVIRONMENT)
    if not any(re.fullmatch("[A-Z][A-Z0-9_]*", text) for text in known):
        return None
    return {text: os.environ.get(text) for text in known}


def impurity(name: str, value: Any, names: set[str]) -> str | None:
    """What a function that reads this may find out that is no part of it: the clock, files, the machine."""
    if isinstance(value, type):
        kind = f"{value.__module__}.{value.__qualname__}"
        if kind == "datetime.datetime" or kind == "datetime.date":
            return "the clock" if names & _CLOCKS else None
        return "files" if value.__module__.startswith("pathlib") and names & _READS_FILES else None
    if not callable(value):
        return None
    if any(value is f for f in _OF_TEXTS):
        return "code that is found by a text"
    last = name.rpartition(".")[2]
    module = getattr(value, "__module__", None)
    if value is builtins.open or value is builtins.input or (module in _IMPURE_MODULES and last not in _PURE):
        return "the clock" if module == "time" else "files, or the machine"
    return None
