"""Functions by what they are: their code, and the names that it reads of its file, of classes and of modules.

    def forward(self, x): return helper(x) * config.SCALE        code; helper; config.SCALE

A digest of code leaves out where it stands (its lines): that is for the digest of its file.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any

from autopar.capture.reads.code_names import CodeNames, imported_modules, names_in, package_of
from autopar.capture.reads.code_owners import USER, owner_of_function, owner_of_module

_BUILTINS = vars(builtins)
_IMPURE_MODULES = {
    "time", "posix", "nt", "io", "_io", "_socket", "socket", "subprocess", "tempfile", "glob", "shutil", "secrets",
    "uuid", "platform", "urllib.request", "genericpath", "threading", "_thread", "sys", "gc", "locale", "resource",
}  # fmt: skip
_OF_TEXTS = (eval, exec, compile, __import__, importlib.import_module)
_PURE = {"getenv", "fspath", "cpu_count"}
_READS_FILES = {"read_text", "read_bytes", "open", "exists", "is_file", "is_dir", "iterdir", "glob", "stat"}
_CLOCKS = {"now", "today", "utcnow"}
ABOUT_CODE = {"__annotations__", "get_type_hints", "get_annotations", "__doc__", "getdoc"}  # what no key has
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


def globals_read(function: types.FunctionType, read: CodeNames) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a function reads of its file, and of modules among that (``config.SCALE``, and what it
    imports while it runs), in the order of names."""
    scope = function.__globals__
    for name in read.names:
        if name in scope:
            value = scope[name]
            yield name, value
            if isinstance(value, types.ModuleType):
                yield from _inside(name, value, read.names, set())
        elif name in _BUILTINS:
            yield name, _BUILTINS[name]
    for name in read.imported:
        for module in imported_modules(name, package_of(function)):
            yield from _inside(name, module, read.names, set())


def _inside(path: str, module: types.ModuleType, names: Collection[str], seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for name, entry in entries_named(module, names):
        yield f"{path}.{name}", entry
        if isinstance(entry, types.ModuleType):
            yield from _inside(f"{path}.{name}", entry, names, seen)


def entries_named(module: types.ModuleType, names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """(name, value) of what is in a module under one of these names, in their order; of what it may make up, how."""
    entries, package = vars(module), module.__name__.partition(".")[0]
    others = owner_of_module(module.__name__) != USER  # what a library imports of others is its own business
    makes_up = not others and "__getattr__" in entries
    for name in names if makes_up else [name for name in names if name in entries]:
        entry = entries.get(name)
        if others and isinstance(entry, types.ModuleType) and entry.__name__.partition(".")[0] != package:
            continue
        yield (name, entry) if name in entries else ("__getattr__", entries["__getattr__"])


def reads_data(function: types.FunctionType, seen: set[Any]) -> bool:
    """Whether a function of the user's, or one that it calls, reads what somebody may change: a value of its file, a
    class or a file of the user's, attributes of ``self``. ``seen``: those that are looked at already."""
    seen.add(function)
    scope, read, code = function.__globals__, names_in(function.__code__), function.__code__
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    if code.co_argcount and code.co_varnames[0] in ("self", "cls"):
        return True
    return any(_is_data(x, seen) for x in [*(scope[name] for name in read.names if name in scope), *cells])


def _is_data(x: Any, seen: set[Any]) -> bool:
    if isinstance(x, types.FunctionType):
        return owner_of_function(x) == USER and x not in seen and reads_data(x, seen)
    if isinstance(x, (types.ModuleType, type)):
        return owner_of_module(x.__name__ if isinstance(x, types.ModuleType) else x.__module__) == USER
    return not isinstance(x, types.BuiltinFunctionType) and not any(x is y for y in seen)


def impurity(name: str, value: Any, names: Collection[str]) -> str | None:
    """What a function that reads this may find out that is no part of it: the clock, files, the machine."""
    if isinstance(value, type):
        kind = f"{value.__module__}.{value.__qualname__}"
        if kind == "datetime.datetime" or kind == "datetime.date":
            return "the clock" if not _CLOCKS.isdisjoint(names) else None
        return "files" if value.__module__.startswith("pathlib") and not _READS_FILES.isdisjoint(names) else None
    if value is sys.modules:
        return "a module that is found by a text"
    if not callable(value):
        return None
    if any(value is f for f in _OF_TEXTS):
        return "code that is found by a text"
    last = name.rpartition(".")[2]
    module = getattr(value, "__module__", None)
    if value is builtins.open or value is builtins.input or (module in _IMPURE_MODULES and last not in _PURE):
        return "the clock" if module == "time" else "files, or the machine"
    return None
