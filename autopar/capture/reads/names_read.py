"""Globals that functions read, with attributes of classes and objects among them.

    def forward(self, x): return helper(x) * Gain.of       helper, Gain, Gain.of; and what helper reads

Functions outside of libraries are followed to the functions that they read. (In libraries that would be thousands of
names that do not change.)
"""

from __future__ import annotations

import contextlib
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autopar.capture.reads.code_owners import TORCH, is_torchs, lies_in

_PLACES = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = (*(sysconfig.get_paths()[name] for name in _PLACES), TORCH)
MISSING = object()
_OPAQUE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_CALLED = {"forward", "backward", "setup_context", "__init__", "__call__"}  # methods called by other names

Scope = Mapping[str, Any]
Read = tuple[Scope, str, Any]


def names_read(found: Iterable[Any], follow: bool = True) -> Iterator[Read]:
    """(scope, name, value) of what functions read. ``follow``: skip functions of libraries, and include functions that
    the others read."""
    left, seen = list(found), set[int]()
    while left:
        function = left.pop()
        function = getattr(function, "__func__", getattr(function, "fget", function))
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if lies_in(function.__code__.co_filename, _LIBRARIES if follow else (TORCH,)):
            continue
        if follow:
            left += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        for scope, name, value in _of_scope(function.__globals__, _names(function.__code__)):
            left += [value] if follow else []
            yield scope, name, value


def _of_scope(scope: Scope, names: set[str]) -> Iterator[Read]:
    """Values of these names in a scope, and in classes, Python modules and plain objects among them (``Gain.of``,
    ``config.SCALE``)."""
    for name in names:
        value = scope.get(name, MISSING)
        yield scope, name, value
        if not isinstance(value, _OPAQUE) and hasattr(value, "__dict__") and not _is_torch(value):
            inside = vars(value)
            yield from ((inside, other, inside[other]) for other in inside.keys() & (names | _CALLED))


def _is_torch(value: Any) -> bool:
    of_torch = is_torchs(str(getattr(value, "__file__", "")))
    return of_torch or str(getattr(value, "__module__", "")) == "torch"


def _is_filled(cell: types.CellType) -> bool:
    with contextlib.suppress(ValueError):
        return cell.cell_contents is not cell
    return False


def _names(code: types.CodeType) -> set[str]:
    """Names that a code object and its nested functions read as globals or attributes."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)
