"""Signatures of layers and calls: layers with equal signatures, called with equal signatures, have equal graphs.

    signature_of_layer(layer)      classes, flags, attributes, tensors of its modules; integers are kept separate
    signature_of_call(args, ...)   values and tensors of the arguments
    surroundings()                 grad mode, autocast, default dtype, modes

Other objects in attributes or arguments (a config, a closure) are compared by identity and by all that they reach, so
an unknown object never counts as equal. Tensors inside of them are not operands of a template.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from autopar.adapters.copying.fake import memory_of
from autopar.adapters.copying.fake_deepcopy import children
from autopar.adapters.grad_mode import seen_inference
from autopar.adapters.keys import Same, told_apart
from autopar.adapters.tensors.tags import tags_of
from autopar.capture.reads.names_read import names_read
from autopar.capture.side_effects.trace_side_effects import state_of

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
           torch.memory_format)  # fmt: skip
_SEQUENCES = (list, tuple, torch.Size)
_DICTS = (dict, OrderedDict)
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
_APART = {"_parameters", "_buffers", "_modules", *_HOOKS}
_GLOBAL_HOOKS = tuple(name for name in vars(torch_module) if re.fullmatch("_global_(for|back)ward_(pre_)?hooks", name))


class NotComparable(Exception):
    """A signature would miss something, such as a hook."""


class Tensors:
    """Tensors in the order in which they are found, each once, with metadata that shows aliasing."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []
        self._places: dict[int, int] = {}
        self._storages: dict[int, int] = {}

    def signature(self, x: Tensor) -> Any:
        """The index of a tensor, at its first occurrence with its metadata."""
        place = self._places.get(id(x))
        if place is not None:
            return place
        if x.layout != torch.strided or any(type(n) is not int for n in tuple(x.shape)):
            raise NotComparable
        self._places[id(x)] = len(self.found)
        self.found.append(x)
        storage = self._storages.setdefault(memory_of(x), len(self._storages))
        parameter = isinstance(x, nn.Parameter)
        return (
            len(self.found), storage, x.shape, x.stride(), x.storage_offset(), x.dtype, x.device,
            x.requires_grad, x.is_leaf, parameter, x.is_inference(), _held(tags_of(x), {}),
        )  # fmt: skip

    def place(self, x: Tensor) -> int | None:
        """The index of a tensor that was found before, else None."""
        return self._places.get(id(x))


class LayerSignature(NamedTuple):
    """fixed: everything except integer attributes; numbers: those; names: (path, name) of each."""

    fixed: Any
    numbers: tuple[int, ...]
    names: tuple[tuple[str, str], ...]


def signature_of_layer(module: nn.Module, tensors: Tensors, states: dict[int, Any] | None = None) -> LayerSignature:
    """The signature of a module and its submodules; parameters and buffers are added to ``tensors``. ``states`` caches
    signatures of objects in attributes while nothing changes.

    Raises NotComparable for modules with hooks.
    """
    fixed: list[Any] = []
    numbers: list[int] = []
    names: list[tuple[str, str]] = []
    states = {} if states is None else states
    if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
        raise NotComparable
    for path, inner in _modules(module):
        entries = inner.__dict__
        if any(entries.get(name) for name in _HOOKS):
            raise NotComparable
        fixed.append((path, base_class(inner)))
        for name, value in entries.items():
            if name in _APART:
                continue
            if type(value) is int:
                fixed.append(name)
                numbers.append(value)
                names.append((path, name))
            else:
                fixed.append((name, _held(value, states)))
        for name, tensor in (*entries["_parameters"].items(), *entries["_buffers"].items()):
            fixed.append((name, None if tensor is None else tensors.signature(tensor)))
    return LayerSignature(tuple(fixed), tuple(numbers), tuple(names))


def _modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of a module tree; a shared module is listed once for each path."""
    yield path, module
    for name, child in module.__dict__["_modules"].items():
        if child is not None:
            yield from _modules(child, f"{path}.{name}" if path else name)


def base_class(module: nn.Module) -> type:
    """The class that the model's author wrote: torch.export replaces it by a subclass while tracing."""
    base: Any = module
    return type(base.get_base()) if hasattr(type(module), "get_base") else type(module)


def _held(x: Any, states: dict[int, Any]) -> Any:
    """The signature of an attribute. ``states`` caches those of objects."""
    if type(x) in _VALUES:
        return told_apart(x)
    if type(x) in _SEQUENCES:
        return type(x), tuple(_held(y, states) for y in x)
    if type(x) in (set, frozenset):
        return type(x), frozenset(_held(y, states) for y in x)
    if type(x) in _DICTS:
        return type(x), tuple((_held(key, states), _held(value, states)) for key, value in x.items())
    if isinstance(x, (type, types.BuiltinFunctionType, Tensor)):
        return Same(x)
    if id(x) not in states:
        states[id(x)] = Same(x)  # for cycles
        states[id(x)] = _object(x, states)
    return states[id(x)]


def _object(x: Any, states: dict[int, Any]) -> Any:
    """Signature of an object: its identity and all that it reaches. Functions without state are compared by code."""
    names = _reads_of(x) if isinstance(x, types.FunctionType) else ()
    read = tuple(_named(scope.get(name), states) for scope, name in names)
    if _is_plain(x):
        return Same(x.__code__), Same(x.__globals__), read
    return Same(x), state_of(x), read, tuple((label, _held(value, states)) for label, value in children(x))


def _reads_of(function: Any) -> list[tuple[Mapping[str, Any], str]]:
    known = _READS.get(function)
    if known is None:
        known = _READS[function] = [(scope, name) for scope, name, _ in names_read([function])]
    return known


# Weak keys: functions may hold tensors.
_READS: WeakKeyDictionary[Any, list[tuple[Mapping[str, Any], str]]] = WeakKeyDictionary()


def signature_of_call(value: Any, tensors: Tensors) -> Any:
    """The signature of an argument, or of a tuple of all; tensors are added to ``tensors``.

    Raises NotComparable for tensors with symbolic sizes.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        return tensors.signature(value)
    if kind in _VALUES:
        return kind, value
    if kind in _SEQUENCES:
        return kind, tuple(signature_of_call(x, tensors) for x in value)
    if kind in _DICTS:
        return kind, tuple((_held(key, {}), signature_of_call(x, tensors)) for key, x in value.items())
    if dataclasses.is_dataclass(kind) and not isinstance(value, Mapping):
        names = [field.name for field in dataclasses.fields(value)]
        if set(getattr(value, "__dict__", names)) <= set(names):
            return kind, tuple(signature_of_call(getattr(value, name), tensors) for name in names)
    return _held(value, {})


def _is_plain(value: Any) -> bool:
    """Whether a value is a function without closure, defaults and attributes."""
    return isinstance(value, types.FunctionType) and not (value.__closure__ or value.__defaults__ or value.__dict__)


def surroundings(module: nn.Module) -> tuple[Any, ...]:
    """The global state that a forward depends on: modes, numbers and strings in its classes and their Python modules,
    and what its code reads by name."""
    classes = tuple(dict.fromkeys(cls for _, inner in _modules(module) for cls in base_class(inner).__mro__))
    holders, reads = _holders_and_reads(classes, tuple(vars(cls).get("forward") for cls in classes))
    states: dict[int, Any] = {}
    return (
        torch.is_grad_enabled(),
        seen_inference(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        tuple(map(Same, _get_current_function_mode_stack())),
        tuple(state for holder in holders for x in vars(holder).values() if (state := state_of(x)) is not None),
        tuple(_named(scope.get(name), states) for scope, name in reads),
    )


@functools.lru_cache(256)
def _holders_and_reads(classes: Any, _forwards: Any) -> tuple[list[Any], list[tuple[Mapping[str, Any], str]]]:
    """(classes outside of torch and their Python modules, (scope, name) that their code reads). Cached until a forward
    is replaced: ``_forwards`` is only a part of the key."""
    own = [cls for cls in classes if cls.__module__.split(".")[0] not in ("torch", "builtins")]
    files = dict.fromkeys(sys.modules[cls.__module__] for cls in own if cls.__module__ in sys.modules)
    methods = [code for cls in own for code in vars(cls).values()]
    found = [*names_read((cls.forward for cls in own if hasattr(cls, "forward")), follow=False), *names_read(methods)]
    return [*own, *files], [(scope, name) for scope, name, _ in found]


def _named(x: Any, states: dict[int, Any]) -> Any:
    """Signature of a value that code reads by name. Attributes of objects are read by names of their own."""
    if isinstance(x, contextvars.ContextVar):
        return Same(x), _held(x.get(None), states)
    return _held(x, states) if type(x) in (*_VALUES, *_SEQUENCES, *_DICTS, set, frozenset) else Same(x)


@contextmanager
def noticed_reads(module: nn.Module, watched: Collection[tuple[str, str]]) -> Iterator[set[tuple[str, str]]]:
    """Context manager: yields the (path, name) in ``watched`` that are read within."""
    read: set[tuple[str, str]] = set()
    owners: dict[tuple[type, str], dict[int, str]] = {}
    for path, inner in _modules(module):
        for name in (name for at, name in watched if at == path):
            if hasattr(base_class(inner), name):  # a class attribute or property: cannot be watched
                read.add((path, name))
            else:
                owners.setdefault((base_class(inner), name), {})[id(inner.__dict__)] = path
    try:
        for (cls, name), paths in owners.items():
            setattr(cls, name, _watching_property(name, paths, read))
        yield read
    finally:
        for cls, name in owners:
            if name in vars(cls):
                delattr(cls, name)


def _watching_property(name: str, paths: Mapping[int, str], read: set[tuple[str, str]]) -> property:
    """A property that shadows an attribute of instances and records reads."""

    def get(self: Any) -> Any:
        path = paths.get(id(self.__dict__))
        if path is not None:
            read.add((path, name))
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(name) from None

    def put(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    def drop(self: Any) -> None:
        self.__dict__.pop(name)

    return property(get, put, drop)
