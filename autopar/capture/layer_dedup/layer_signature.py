"""What a module's forward can read: two modules with equal facts, called with equal facts, leave equal graphs.

    facts_of_block(layer)      classes, flags, attributes, tensors of the modules in it; integers apart
    facts_of_call(args, ...)   values and tensors that it is called with
    surroundings()             grad mode, autocast, default dtype, modes

Another object that a module holds or is called with (a config, a closure) is compared by identity, and by all that is
reached from it: an unknown is never taken for something known. Tensors that it holds are no operands that are known.
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
    """Something of which it is not known what it does."""


class Tensors:
    """Tensors in the order in which they are met, each once, with the facts of which of them are one."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []
        self._places: dict[int, int] = {}
        self._storages: dict[int, int] = {}

    def fact(self, x: Tensor) -> Any:
        """Its place; at the first meeting also what it is."""
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
        """Its number, if it was met."""
        return self._places.get(id(x))


def memory_of(x: Tensor) -> int:
    """Equal for tensors that share memory."""
    return int(x.untyped_storage()._cdata)


class LayerSignature(NamedTuple):
    """``fixed``: everything but ``numbers``, the integers among the attributes; ``names``: where each of them is."""

    fixed: Any
    numbers: tuple[int, ...]
    names: tuple[tuple[str, str], ...]


def facts_of_block(module: nn.Module, tensors: Tensors, states: dict[int, Any] | None = None) -> LayerSignature:
    """Of a module and all below it; its parameters and buffers go to ``tensors``. ``states``: facts of objects that
    modules hold, while nothing changes.

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
            fixed.append((name, None if tensor is None else tensors.fact(tensor)))
    return LayerSignature(tuple(fixed), tuple(numbers), tuple(names))


def _modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of a tree; what stands at two places comes twice."""
    yield path, module
    for name, child in module.__dict__["_modules"].items():
        if child is not None:
            yield from _modules(child, f"{path}.{name}" if path else name)


def base_class(module: nn.Module) -> type:
    """The class that the model's author wrote: the export puts subclasses before the modules that it follows."""
    base: Any = module
    return type(base.get_base()) if hasattr(type(module), "get_base") else type(module)


def _held(x: Any, states: dict[int, Any]) -> Any:
    """A fact of an attribute; ``states``: of objects that are held more than once."""
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
        states[id(x)] = Same(x)  # should it hold itself
        states[id(x)] = _object(x, states)
    return states[id(x)]


def _object(x: Any, states: dict[int, Any]) -> Any:
    """It, and all that is reached from it. Functions that hold nothing are alike if their code is."""
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


_READS: WeakKeyDictionary[Any, list[tuple[Mapping[str, Any], str]]] = WeakKeyDictionary()  # some hold tensors


def facts_of_call(value: Any, tensors: Tensors) -> Any:
    """Of an argument, or of the tuple of all of them; tensors go to ``tensors``.

    Raises NotComparable for tensors whose sizes are no numbers.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        return tensors.fact(value)
    if kind in _VALUES:
        return kind, value
    if kind in _SEQUENCES:
        return kind, tuple(facts_of_call(x, tensors) for x in value)
    if kind in _DICTS:
        return kind, tuple((_held(key, {}), facts_of_call(x, tensors)) for key, x in value.items())
    if dataclasses.is_dataclass(kind) and not isinstance(value, Mapping):
        names = [field.name for field in dataclasses.fields(value)]
        if set(getattr(value, "__dict__", names)) <= set(names):
            return kind, tuple(facts_of_call(getattr(value, name), tensors) for name in names)
    return _held(value, {})


def _is_plain(value: Any) -> bool:
    """A function that holds nothing."""
    return isinstance(value, types.FunctionType) and not (value.__closure__ or value.__defaults__ or value.__dict__)


def surroundings(module: nn.Module) -> tuple[Any, ...]:
    """What beside a module and its arguments decides what its forward does: modes, the numbers and texts that its
    classes and their files hold, and what its code reads by name."""
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
    """(classes that are not torch's and their files, what their code reads by name: scopes and names). Asked once as
    long as nobody puts other forwards in."""
    own = [cls for cls in classes if cls.__module__.split(".")[0] not in ("torch", "builtins")]
    files = dict.fromkeys(sys.modules[cls.__module__] for cls in own if cls.__module__ in sys.modules)
    methods = [code for cls in own for code in vars(cls).values()]
    found = [*names_read((cls.forward for cls in own if hasattr(cls, "forward")), follow=False), *names_read(methods)]
    return [*own, *files], [(scope, name) for scope, name, _ in found]


def _named(x: Any, states: dict[int, Any]) -> Any:
    """A fact of what code reads by name. Attributes of objects are names of their own."""
    if isinstance(x, contextvars.ContextVar):
        return Same(x), _held(x.get(None), states)
    return _held(x, states) if type(x) in (*_VALUES, *_SEQUENCES, *_DICTS, set, frozenset) else Same(x)


@contextmanager
def noticed_reads(module: nn.Module, watched: Collection[tuple[str, str]]) -> Iterator[set[tuple[str, str]]]:
    """Within: gives those attributes in ``watched``, by path and name, that somebody reads."""
    read: set[tuple[str, str]] = set()
    owners: dict[tuple[type, str], dict[int, str]] = {}
    for path, inner in _modules(module):
        for name in (name for at, name in watched if at == path):
            if hasattr(base_class(inner), name):  # a default of the class, or an accessor
                read.add((path, name))
            else:
                owners.setdefault((base_class(inner), name), {})[id(inner.__dict__)] = path
    try:
        for (cls, name), paths in owners.items():
            setattr(cls, name, _noticing(name, paths, read))
        yield read
    finally:
        for cls, name in owners:
            if name in vars(cls):
                delattr(cls, name)


def _noticing(name: str, paths: Mapping[int, str], read: set[tuple[str, str]]) -> property:
    """An attribute of a class that stands before those of its objects."""

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
