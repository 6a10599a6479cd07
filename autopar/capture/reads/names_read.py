"""What functions read beside their arguments: the names of their files, of classes and objects among those.

    def forward(self, x): return helper(x) * Gain.of       helper, Gain, Gain.of; and what helper reads

Of code outside of libraries also what the functions read that it reads. (Of libraries that would be thousands of names
that nobody changes.)
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
_CALLED = {"forward", "backward", "setup_context", "__init__", "__call__"}  # of a class, by another name

Scope = Mapping[str, Any]
Read = tuple[Scope, str, Any]


def names_read(found: Iterable[Any], follow: bool = True) -> Iterator[Read]:
    """(scope, name, value) of what functions read; ``follow``: of those outside of libraries, and what functions read
    that they read."""
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
    """What is there of these names, and what classes, files and plain objects among it have of them (``Gain.of``,
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
    """Names that code, and functions inside of it, read from their file or as attributes."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)
