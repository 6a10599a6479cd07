"""Visits the values that a forward may read, each once, and adds the guards that compare them (`forward_reads`)."""

from __future__ import annotations

import abc
import contextlib
import contextvars
import functools
import logging
import os
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from autopar.adapters.function_caches import CACHED, kept_results, lookup_of
from autopar.adapters.torch_flags import SETTINGS
from autopar.capture.reads.code_owners import USER, owner_of_module
from autopar.capture.reads.read_guards import CONTAINERS, ReadGuards, Where, shows_memory

_ATOMS = frozenset([int, float, bool, complex, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice,
                    types.CodeType, torch.layout, torch.memory_format, type(...)])  # fmt: skip
_PLAIN = (list, dict, set, deque, OrderedDict, defaultdict)
_OPAQUE = (type(threading.Lock()), type(threading.RLock()), logging.Filterer, logging.LoggerAdapter, logging.Handler,
           threading.Event, threading.Condition, threading.Thread, torch.optim.Optimizer)  # fmt: skip
_NOT_VISITED = ("torch._", "torch.fx", "torch.utils", "torch.jit", "torch.distributed", "typing", "autopar.")
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, functools.partialmethod,
             functools.singledispatchmethod, CACHED)  # fmt: skip
_WITHIN = ("__func__", "fget", "fset", "func", "__wrapped__", "dispatcher")  # attributes of these with functions
GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
_MOST = 50_000  # values
_LARGEST = 1 << 26  # bytes of an array
_PARTS, _CELL = attrgetter("__code__", "__defaults__", "__kwdefaults__"), attrgetter("cell_contents", "__class__")
_CLASS = attrgetter("__class__", "__class__")
_PARTIAL = attrgetter("func", "args", "keywords")


class ReadValues(abc.ABC):
    """Visitor of values. ``known``: values that others watch. Subclasses handle functions, classes and Python
    modules."""

    def __init__(self, known: Iterable[Any], modes: bool) -> None:
        self.guards = ReadGuards()
        self.uncomparable: list[tuple[Where, Any]] = []
        self._modes = modes
        self._seen: dict[int, Any] = {id(x): x for x in known}
        self._kept: list[Any] = []

    @abc.abstractmethod
    def _has_run(self, f: types.FunctionType, where: Where) -> bool: ...

    @abc.abstractmethod
    def _class(self, cls: type) -> None: ...

    @abc.abstractmethod
    def _python_module(self, x: types.ModuleType, where: Where) -> None: ...

    @abc.abstractmethod
    def _attributes(self, x: Any, where: Where) -> None: ...

    @abc.abstractmethod
    def _module(self, x: nn.Module, where: Where) -> None: ...

    @abc.abstractmethod
    def _text(self, x: str) -> None: ...

    @abc.abstractmethod
    def _loaded_modules(self, where: Where) -> None: ...

    def _visit(self, x: Any, where: Where) -> None:
        kind = type(x)
        if kind in _ATOMS or id(x) in self._seen:
            return
        if kind is str:
            self._text(x)
            return
        self._seen[id(x)] = x
        if len(self._seen) > _MOST:
            self.uncomparable.append((where, x))
            return
        try:
            visit = next((visit for wanted, visit in _VISITS if isinstance(x, wanted)), ReadValues._object)
            visit(self, x, where)
        except Exception:  # reading attributes may run any code
            self.uncomparable.append((where, x))

    def _visit_all(self, values: Iterable[Any], where: Where) -> None:
        for value in values:
            self._visit(value, where)

    def _visit_entries(self, entries: Iterable[tuple[Any, Any]], where: Where) -> None:
        for key, value in entries:
            if type(value) not in _ATOMS:
                self._visit(value, where.entry(key))

    def _tensor(self, x: Tensor, where: Where) -> None:
        self.guards.tensor(x, where)

    def _other_module(self, x: nn.Module, where: Where) -> None:
        """An nn.Module that is not a submodule of the model: its tensors are constants."""
        for path, inner in x.named_modules():
            self._seen[id(inner)] = inner
            at = Where("", str(where.attribute(path) if path else where), "attribute ")
            self._module(inner, at)
            for held in (inner._parameters, inner._buffers, inner._modules):
                if held:
                    self.guards.container(held, at)
            for name, tensor in (*inner._parameters.items(), *inner._buffers.items()):
                if tensor is not None and id(tensor) not in self._seen:
                    self._seen[id(tensor)] = tensor
                    self.guards.tensor(tensor, at.attribute(name))

    def _function(self, f: types.FunctionType, where: Where) -> None:
        if f in SETTINGS:
            self.guards.value(_answer, f, where, equal=True)
            return
        if f.__module__ is not None and f.__module__.startswith("autopar."):
            return
        own = self._has_run(f, where)
        if own:
            self.guards.value(_PARTS, f, where)
            self._visit_all((*(f.__defaults__ or ()), f.__kwdefaults__), where)
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
            with contextlib.suppress(ValueError):
                content = cell.cell_contents
                if own and id(cell) not in self._seen:
                    self._seen[id(cell)] = cell
                    self.guards.value(_CELL, cell, Where(name, f.__qualname__))
                self._visit(content, Where(name, f.__qualname__))
        self._visit(f.__dict__.get("__wrapped__"), where)

    def _method(self, x: types.MethodType, where: Where) -> None:
        self._visit(x.__func__, where)
        self._visit(x.__self__, where)

    def _builtin(self, x: types.BuiltinFunctionType, where: Where) -> None:
        if x in SETTINGS:
            self.guards.value(_answer, x, where, equal=True)
            return
        if not isinstance(x.__self__, (types.ModuleType, type, type(None))):
            self._visit(x.__self__, where)

    def _partial(self, x: functools.partial[Any], where: Where) -> None:
        self.guards.value(_PARTIAL, x, where)
        self._visit_all((x.func, *x.args, x.keywords), where)

    def _wrapper(self, x: Any, where: Where) -> None:
        if type(x) is CACHED and owner_of_module(x.__module__) == USER:
            self.guards.kept(lookup_of(x), Where(x.__qualname__, str(x.__module__), "the cache of "))
            self._visit_all(kept_results(x).values(), where)
        self._visit_all((getattr(x, name, None) for name in _WITHIN), where)

    def _a_class(self, x: type, where: Where) -> None:
        self._class(x)

    def _container(self, x: Any, where: Where) -> None:
        if x is sys.modules:
            self._loaded_modules(where)
            return
        self.guards.container(x, where)
        self._visit_entries(list(dict.items(x)) if isinstance(x, dict) else enumerate(list(x)), where)
        if isinstance(x, defaultdict):
            self._visit(x.default_factory, where)
        if type(x) not in _PLAIN:
            self._attributes(x, where)

    def _fixed(self, x: Iterable[Any], where: Where) -> None:
        """A tuple: its items may change inside, but are always the same objects."""
        self._visit_entries(enumerate(x), where)
        if getattr(x, "__dict__", None):
            self._attributes(x, where)

    def _proxy(self, x: Mapping[str, Any], where: Where) -> None:
        self.guards.value(_items, x, where)
        self._visit_entries(x.items(), where)

    def _context(self, x: contextvars.ContextVar[Any], where: Where) -> None:
        self.guards.value(_in_context, x, where)
        self._visit(x.get(None), where)

    def _weak(self, x: weakref.ref[Any], where: Where) -> None:
        self.guards.value(_target, x, where)
        self._visit(x(), where)

    def _local(self, x: threading.local, where: Where) -> None:
        self.guards.value(_of_thread, x, where)
        self._visit_entries(vars(x).items(), where)
        self._class(type(x))

    def _environ(self, x: Any, where: Where) -> None:
        self.guards.value(_texts, x, where, equal=True)

    def _iterator(self, x: Iterator[Any], where: Where) -> None:
        self.uncomparable.append((where, x))
        if not isinstance(x, types.GeneratorType):
            self._attributes(x, where)

    def _generator(self, x: Any, where: Where) -> None:
        self.uncomparable.append((where, x))

    def _still(self, x: Any, where: Where) -> None:
        """Objects without state that a forward reads."""
        self._kept.append(x)

    def _object(self, x: Any, where: Where) -> None:
        if type(x).__module__.startswith(_NOT_VISITED):
            return
        if owner_of_module(type(x).__module__) == USER:
            self.guards.value(_CLASS, x, where)
        if shows_memory(x):
            if memoryview(x).nbytes <= _LARGEST:
                self.guards.contents(x, where)
            else:
                self.uncomparable.append((where, x))
        self._attributes(x, where)


def _in_context(x: contextvars.ContextVar[Any]) -> tuple[Any]:
    return (x.get(None),)


def _target(x: weakref.ref[Any]) -> tuple[Any]:
    return (x(),)


def _items(x: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*x, *x.values())


def _of_thread(x: threading.local) -> tuple[Any, ...]:
    return (*vars(x), *vars(x).values())


def _answer(x: Callable[[], Any]) -> tuple[Any]:
    return (x(),)


def _texts(x: Mapping[str, str]) -> tuple[dict[str, str]]:
    return (dict(x),)


_VISITS: tuple[tuple[Any, Callable[..., None]], ...] = (
    (Tensor, ReadValues._tensor),
    (nn.Module, ReadValues._other_module),
    (types.FunctionType, ReadValues._function),
    (types.MethodType, ReadValues._method),
    (types.BuiltinFunctionType, ReadValues._builtin),
    (functools.partial, ReadValues._partial),
    (_WRAPPERS, ReadValues._wrapper),
    (type, ReadValues._a_class),
    (types.ModuleType, lambda self, x, where: self._python_module(x, where)),  # in the subclass
    (CONTAINERS, ReadValues._container),
    ((tuple, frozenset), ReadValues._fixed),
    (types.MappingProxyType, ReadValues._proxy),
    (contextvars.ContextVar, ReadValues._context),
    (weakref.ref, ReadValues._weak),
    (threading.local, ReadValues._local),
    (type(os.environ), ReadValues._environ),
    ((*_OPAQUE, numpy.generic, torch.Generator), ReadValues._still),
    (GENERATORS, ReadValues._generator),
    (Iterator, ReadValues._iterator),
)
