"""Names that code objects read: globals, attributes, and strings that may be names or environment variables."""

from __future__ import annotations

import dis
import functools
import os
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_IMPORTS = dis.opmap["IMPORT_NAME"]
_ENVIRONMENT = {"environ", "getenv", "environb"}
_GIVES_ENVIRONMENT = frozenset(map(id, (os.environ, os.environb, os.getenv, os.getenvb)))
_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_known_names: dict[types.CodeType, CodeNames] = {}
_known_globals: dict[types.CodeType, frozenset[str]] = {}


@dataclass(frozen=True)
class CodeNames:
    """Names in a code object and its nested functions. names: globals, attributes and strings that are identifiers
    (``getattr(self, "gate")``), sorted; texts: all strings; imported: what they may import."""

    names: tuple[str, ...]
    texts: tuple[str, ...]
    imported: tuple[str, ...]

    @classmethod
    def of(cls, code: types.CodeType) -> CodeNames:
        found, texts = set(code.co_names), list[str]()
        imported = code.co_names if _IMPORTS in code.co_code[::2] else ()
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                inner = names_in(const)
                found.update(inner.names)
                texts += inner.texts
                imported += inner.imported
            elif isinstance(const, str):
                texts.append(const)
                found.update([const] if const.isidentifier() else ())
            elif isinstance(const, (tuple, frozenset)):
                found.update(x for x in const if isinstance(x, str) and x.isidentifier())
        return cls(tuple(sorted(found)), tuple(texts), imported)


def names_in(code: types.CodeType) -> CodeNames:
    """Names in a code object, cached for code that is in a file."""
    known = _known_names.get(code)
    if known is None or len(_known_names) > 1 << 16:
        known = CodeNames.of(code)
        if not code.co_filename.startswith("<"):
            _known_names[code] = known
    return known


def globals_in(code: types.CodeType) -> frozenset[str]:
    """Names that a code object and its nested functions read as globals, without attributes."""
    known = _known_globals.get(code)
    if known is None or len(_known_globals) > 1 << 16:
        inner = (globals_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
        own = (str(x.argval) for x in dis.get_instructions(code) if x.opname in _GLOBALS)
        known = _known_globals[code] = frozenset(own).union(*inner)
    return known


def imported_modules(name: str, package: str) -> Iterator[types.ModuleType]:
    """Loaded modules that an import of this name within a package may refer to."""
    for path in _paths(name, package):
        if isinstance(module := sys.modules.get(path), types.ModuleType):
            yield module


@functools.lru_cache(65536)
def _paths(name: str, package: str) -> tuple[str, ...]:
    parts = package.split(".")
    return name, *(f"{'.'.join(parts[:i])}.{name}" for i in range(1, len(parts) + 1))


def package_of(function: types.FunctionType) -> str:
    """The package that relative imports of a function refer to."""
    scope = function.__globals__
    return str(scope.get("__package__") or scope.get("__name__") or "")


def environment_read(
    names: Collection[str], texts: Iterable[str], values: Iterable[Any]
) -> dict[str, str | None] | None:
    """Environment variables that code may read: those that it names, or None for all if it builds names. ``values``:
    the values of its globals, to find ``os.environ`` under other names."""
    if _ENVIRONMENT.isdisjoint(names) and _GIVES_ENVIRONMENT.isdisjoint(map(id, values)):
        return {}
    known = sorted({*texts, *names} - _ENVIRONMENT)
    if not any(re.fullmatch("[A-Z][A-Z0-9_]*", text) for text in known):
        return None
    return {text: os.environ.get(text) for text in known}
