"""Are the modules still what `parallelize` has captured?

Between `parallelize` and the first step a user may change anything. What a `ModuleWatch` sees is compared as before
every step; and, since that step would have been the first to read them, the names of their files that the modules'
code reads: `SCALE` and `helper` of ``def forward(self, x): return helper(x) * SCALE``, and what `helper` reads. Of
libraries' modules what their forward reads, but not what its functions read: thousands of names that nobody changes.
"""

from __future__ import annotations

import contextlib
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.adapters.hooks import forward_hooks
from autopar.runtime.module_watch import ModuleWatch
from autopar.runtime.tree import Tree

_TORCH = str(Path(torch.__file__).parent)
_PLACES = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = (*(sysconfig.get_paths()[name] for name in _PLACES), _TORCH)
_MISSING = object()
_OPAQUE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_CALLED = {"forward", "backward", "setup_context", "__init__", "__call__"}  # of a class, by another name

Scope = Mapping[str, Any]
Read = tuple[Scope, str, Any]


class PlannedState:
    """``PlannedState(tree).holds()``: whether a capture would see the same modules as when this was made."""

    def __init__(self, tree: Tree) -> None:
        self._tree, self._watch, self._flags = tree, ModuleWatch(tree.root), tree.flags_elsewhere()
        modules = list(tree.root.modules())
        called = [f for m in modules for f in (m.forward, *forward_hooks(m))]
        methods = [code for cls in {cls for m in modules for cls in type(m).__mro__} for code in vars(cls).values()]
        self._reads = [*_reads(called, follow=False), *_reads([*called, *methods])]

    def holds(self) -> bool:
        """Whether nothing is known to differ. What cannot be compared does."""
        with contextlib.suppress(Exception):
            same = self._tree.flags_elsewhere() == self._flags and self._watch.holds()
            now = ((scope.get(name, _MISSING), then) for scope, name, then in self._reads)
            return same and all(x is then or x == then for x, then in now)
        return False


def _reads(found: Iterable[Any], follow: bool = True) -> Iterator[Read]:
    """(scope, name, value) of what functions read; ``follow``: of those outside of libraries, and what functions read
    that they read."""
    left, seen = list(found), set[int]()
    while left:
        function = left.pop()
        function = getattr(function, "__func__", getattr(function, "fget", function))
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if function.__code__.co_filename.startswith(_LIBRARIES if follow else _TORCH):
            continue
        if follow:
            left += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        for scope, name, value in _of_scope(function.__globals__, _names(function.__code__)):
            left += [value] if follow else []
            yield scope, name, _copied(value)


def _of_scope(scope: Scope, names: set[str]) -> Iterator[Read]:
    """What is there of these names, and what classes, files and plain objects among it have of them (``Gain.of``,
    ``config.SCALE``)."""
    for name in names:
        value = scope.get(name, _MISSING)
        yield scope, name, value
        if not isinstance(value, _OPAQUE) and hasattr(value, "__dict__") and not _is_torch(value):
            inside = vars(value)
            yield from ((inside, other, inside[other]) for other in inside.keys() & (names | _CALLED))


def _is_torch(value: Any) -> bool:
    return str(getattr(value, "__file__", "")).startswith(_TORCH) or str(getattr(value, "__module__", "")) == "torch"


def _is_filled(cell: types.CellType) -> bool:
    with contextlib.suppress(ValueError):
        return cell.cell_contents is not cell
    return False


def _names(code: types.CodeType) -> set[str]:
    """Names that code, and functions inside of it, read from their file or as attributes."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)


def _copied(value: Any) -> Any:
    """A copy of a plain container. A tensor may be written to: it is like nothing."""
    if isinstance(value, Tensor):
        return object()
    if type(value) is dict:
        return {key: _copied(x) for key, x in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value
