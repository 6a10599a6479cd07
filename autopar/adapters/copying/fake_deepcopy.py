"""Deep copies of modules that also copy functions, which Python's deepcopy shares.

    layer = self.layer;  self.f = lambda x: layer(x)        the copy's f calls the copy's layer

A closure, default, partial, bound method, weak reference, hook or wrapped forward that reaches a module or a tensor is
rebuilt around the copies; others are shared. All use one memo, so shared objects stay shared in the copy. Global
variables and attributes of classes are not copied: users of the copy must check for tensors of the original.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor, nn

from autopar.adapters.function_caches import CACHED

_COPYING = threading.RLock()
_ATOMS = (
    type, types.ModuleType, types.CodeType, str, bytes, int, float, complex, type(None), SymInt, SymFloat, SymBool,
)  # fmt: skip
_LEAVES = (*_ATOMS, Tensor)
_PLAIN = frozenset([str, int, float, bool, type(None), type])  # the most frequent types
_SHARED = (  # shared with the original, since they cannot be copied
    type(threading.Lock()), type(threading.RLock()), types.ModuleType, types.GeneratorType, types.CoroutineType,
    io.TextIOWrapper, io.BufferedReader, io.BufferedWriter,
)  # fmt: skip
_TENSORS = (Tensor, nn.Parameter, nn.UninitializedParameter, nn.UninitializedBuffer)
_HELD = ("_modules", "_parameters", "_buffers")  # dicts of a module whose entries are its attributes
_OF_MODULES = {*nn.Module().__dict__}  # attributes that every module has


Tagged = Sequence[tuple[int, dict[str, Any]]]  # (id of a tensor, its tags)


def rebuild(
    model: nn.Module,
    tensors: Mapping[int, Any],
    other: Callable[[Tensor], Tensor],
    tagged: Tagged = (),
    shared: bool = False,
) -> nn.Module:
    """A deep copy of the model with ``tensors`` (by id) in place of its own, and ``other(x)`` for any further tensor x.
    ``tensors`` may have replacements of modules, too.
    ``tagged``: (id, tags) of tensors with tags, which are copied to the replacements.

    ``shared``: the copy shares objects that reach none of the model's modules and tensors, such as a config. Otherwise
    only objects that cannot be copied, such as a connection, are shared. Raises TypeError, RuntimeError or
    AttributeError for parts of the model that cannot be copied.
    """
    if not shared:
        with contextlib.suppress(Exception):  # __deepcopy__ may raise anything
            return _rebuilt(model, tensors, other, tagged, None)
    return _rebuilt(model, tensors, other, tagged, _apart_from(model, tensors, other))


def _rebuilt(
    model: nn.Module,
    tensors: Mapping[int, Tensor],
    other: Callable[[Tensor], Tensor],
    tagged: Tagged,
    common: Mapping[int, Any] | None,
) -> nn.Module:
    copier, memo = _Copier(model, tensors, other, common), {**(common or {}), **tensors}
    with _COPYING, _installed(copier):
        made = copy.deepcopy(model, memo)
        for number, tags in tagged:
            if number in tensors:
                tensors[number].__dict__.update({name: copier.content(x, memo) for name, x in tags.items()})
        return made


def _apart_from(model: nn.Module, tensors: Mapping[int, Tensor], other: Callable[[Tensor], Tensor]) -> dict[int, Any]:
    """id -> objects that the model reaches and that reach neither its modules nor replaced tensors."""
    found: dict[int, Any] = {}
    holders: dict[int, list[int]] = {}  # of a value
    queue, own = [model], {id(m): m for m in model.modules()}
    parts: list[int] = [*own]
    while queue:
        x = queue.pop()
        found[id(x)] = x
        if isinstance(x, Tensor):
            parts += [id(x)] if id(x) in tensors or other(x) is not x else []
            continue
        inner = [value for _, value in children(x)]
        if id(x) in own:
            parts += [id(value) for name, value in x.__dict__.items() if name in _OF_MODULES]
        if isinstance(x, types.FunctionType):
            inner += x.__closure__ or ()
        for value in inner:
            if type(value) in _PLAIN or isinstance(value, _ATOMS):
                continue
            holders.setdefault(id(value), []).append(id(x))
            if id(value) not in found:
                queue.append(value)
                found[id(value)] = value
    while parts:
        for holder in holders.pop(part := parts.pop(), ()):
            parts.append(holder)
        found.pop(part, None)
    return {number: x for number, x in found.items() if not isinstance(x, Tensor)}


def children(x: Any) -> Iterator[tuple[str, Any]]:
    """(label, value) of all references of a Python object: attributes, entries, closure variables."""
    if isinstance(x, _LEAVES):
        return
    if isinstance(x, types.CellType):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield "()", x.cell_contents
        return
    if isinstance(x, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{i}]", value) for i, value in enumerate(list(x)))
    elif isinstance(x, Mapping):
        yield from ((f"[{key!r}]" if isinstance(key, str) else f"[{key}]", value) for key, value in list(x.items()))
    elif isinstance(x, types.FunctionType):
        yield from _closed_over(x)
    elif isinstance(x, (types.MethodType, types.BuiltinFunctionType)):
        yield ".__self__", x.__self__
        yield ".__func__", getattr(x, "__func__", None)
    elif isinstance(x, functools.partial):
        yield from ((".func", x.func), (".args", x.args), (".keywords", x.keywords))
    elif isinstance(x, weakref.ref):
        yield "()", x()
    yield from _attributes(x)


def _closed_over(f: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
        try:
            yield f"<{name}>", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from ((f"<default {i}>", value) for i, value in enumerate(f.__defaults__ or ()))
    yield from ((f"<{name}>", value) for name, value in (f.__kwdefaults__ or {}).items())


def _attributes(x: Any) -> Iterator[tuple[str, Any]]:
    for name, value in list(getattr(x, "__dict__", {}).items()):
        if isinstance(x, nn.Module) and name in _HELD:
            yield from ((f".{key}", entry) for key, entry in list(value.items()))
        else:
            yield f".{name}", value
    for cls in type(x).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if not name.startswith("__") and hasattr(x, name):
                yield f".{name}", getattr(x, name)


def walk_attributes(root: Any) -> Iterator[tuple[str, Any]]:
    """(path, value) of all objects that an object reaches, breadth first, each once."""
    seen: set[int] = {id(root)}
    queue = deque([("", root)])
    while queue:
        path, x = queue.popleft()
        yield path, x
        for label, value in children(x) if type(x) not in _PLAIN else ():
            if id(value) not in seen or type(value) in _PLAIN or isinstance(value, _ATOMS):
                seen.add(id(value))
                queue.append((f"{path}{label}", value))


def path_of(root: Any, wanted: Any) -> str | None:
    """The path of an object in a model: "block.extra[0]"."""
    return next((path.lstrip(".") for path, x in walk_attributes(root) if x is wanted), None)


class _Copier:
    """The copying functions for types that `copy` shares or cannot copy."""

    def __init__(
        self,
        model: nn.Module,
        tensors: Mapping[int, Tensor],
        other: Callable[[Tensor], Tensor],
        common: Mapping[int, Any] | None,
    ) -> None:
        """``common``: what the copy has in common with the model, if it was asked for."""
        self._tensors, self._other, self._common = tensors, other, common
        self._modules = {id(m) for m in model.modules()}
        self._reaching: dict[int, bool] = {}

    def table(self) -> dict[type, Callable[[Any, Any], Any]]:
        """Type -> copying function."""
        return {
            **{kind: lambda x, memo: x for kind in _SHARED},
            **{kind: self._tensor for kind in _TENSORS},
            types.FunctionType: self._function,
            types.MethodType: self._method,
            types.BuiltinFunctionType: self._builtin,
            weakref.ref: self._weakref,
            CACHED: self._cached,
        }

    def _reaches(self, x: Any) -> bool:
        """Whether a module or tensor is behind it, of the model where copies have the others in common."""
        if self._common is not None:
            return id(x) not in self._common
        if id(x) not in self._reaching:
            self._reaching[id(x)] = any(isinstance(value, (nn.Module, Tensor)) for _, value in walk_attributes(x))
        return self._reaching[id(x)]

    def content(self, x: Any, memo: dict[int, Any]) -> Any:
        """A copy; or the thing itself if it cannot be copied."""
        before = len(memo)
        try:
            return copy.deepcopy(x, memo)
        except Exception:  # __reduce__ may raise anything
            while len(memo) > before:  # drop partial copies: dicts keep their order
                memo.popitem()
            return x

    def _tensor(self, x: Tensor, memo: dict[int, Any]) -> Tensor:
        return self._tensors[id(x)] if id(x) in self._tensors else self._other(x)

    def _function(self, f: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
        if not self._reaches(f):
            return f
        cells = tuple(memo.setdefault(id(cell), types.CellType()) for cell in f.__closure__ or ())
        new = types.FunctionType(f.__code__, f.__globals__, f.__name__, None, cells)
        memo[id(f)] = new
        for cell, made in zip(f.__closure__ or (), cells):
            self._fill(cell, made, memo)
        new.__defaults__ = self.content(f.__defaults__, memo)
        new.__kwdefaults__ = self.content(f.__kwdefaults__, memo)
        new.__dict__.update({name: self.content(value, memo) for name, value in f.__dict__.items()})
        new.__qualname__, new.__module__, new.__doc__ = f.__qualname__, f.__module__, f.__doc__
        new.__annotations__ = f.__annotations__
        return new

    def _fill(self, cell: types.CellType, made: types.CellType, memo: dict[int, Any]) -> None:
        """Copy the content of a cell, which functions may share."""
        try:
            made.cell_contents  # noqa: B018 - filled already, or about to be
        except ValueError:
            try:
                content = cell.cell_contents
            except ValueError:
                return
            made.cell_contents = self.content(content, memo)

    def _method(self, x: types.MethodType, memo: dict[int, Any]) -> types.MethodType:
        if x.__self__ is random._inst:
            return x
        return type(x)(copy.deepcopy(x.__func__, memo), self.content(x.__self__, memo))

    def _builtin(self, x: types.BuiltinFunctionType, memo: dict[int, Any]) -> Any:
        if isinstance(x.__self__, (types.ModuleType, type(None), type)) or not self._reaches(x.__self__):
            return x
        return getattr(self.content(x.__self__, memo), x.__name__)

    def _weakref(self, x: weakref.ref[Any], memo: dict[int, Any]) -> weakref.ref[Any]:
        target = x()
        known = id(target) in self._modules or id(target) in memo
        return weakref.ref(copy.deepcopy(target, memo)) if known else x

    def _cached(self, x: Any, memo: dict[int, Any]) -> Any:
        """An empty cache around the copied function."""
        if not self._reaches(x):
            return x
        return functools.lru_cache(**x.cache_parameters())(copy.deepcopy(x.__wrapped__, memo))


@contextmanager
def _installed(copier: _Copier) -> Iterator[None]:
    table: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    before = dict(table)
    table.update(copier.table())
    try:
        yield
    finally:
        table.clear()
        table.update(before)
