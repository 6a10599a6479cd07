"""The walk over values for `reached`: what an object is, in texts that are the same in every process.

Tensors by their facts, those that are no state of the model by content; containers in their order; objects by their
class and attributes; what is met again by its number, so that what is one object is told from what is two.
"""

from __future__ import annotations

import abc
import array
import collections
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import io
import logging
import operator
import pathlib
import re
import threading
import types
import uuid
import weakref
import zoneinfo
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from autopar.adapters.copying.fake import MARKS, Owned
from autopar.adapters.function_caches import CACHED
from autopar.adapters.operators import OpOverload
from autopar.adapters.tensors.tags import tags_of
from autopar.cache.fingerprint_code import code_digest
from autopar.capture.layer_dedup.layer_signature import memory_of

_LARGEST = 1 << 26  # bytes of a constant
_LARGEST_COUNT = 1 << 20  # entries
_HEAP_TYPE = 1 << 9  # the flag of classes that are made while a process runs, by Python code or by C
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_OF_A_LIBRARY = (threading.local, threading.Event, threading.Condition, logging.LoggerAdapter, io.IOBase)
_LOGGED = set(vars(logging.Logger("")))  # what each logger has
_TEXTS = (
    pathlib.PurePath, decimal.Decimal, fractions.Fraction, range, torch.dtype,
    datetime.timedelta, datetime.timezone, datetime.date,
    torch.layout, torch.memory_format, torch.device, complex, bytes, bytearray, type(...), type(NotImplemented),
    inspect.Signature, torch.finfo, torch.iinfo, numpy.dtype, array.array, zoneinfo.ZoneInfo, uuid.UUID,
)  # fmt: skip
FINDERS = (getattr, vars, globals, operator.attrgetter)  # of names in texts
_BASES = (
    dict,
    list,
    tuple,
    set,
    frozenset,
    str,
    int,
    float,
    collections.deque,
    collections.defaultdict,
    collections.OrderedDict,
)
_ALL_IN_ATTRIBUTES = (threading.local, types.SimpleNamespace, object)  # of classes in C
_NUMPYS = (type(numpy.mean), numpy.ufunc)  # functions
_UNSET = object()
_FIELD = type(vars(collections.namedtuple("_", "x"))["x"])
_ORDERED = (str, int, float, bool, bytes, type(None), type, torch.dtype, tuple, enum.Enum)
_OF_AN_ENUM = {"_name_", "_sort_order_", "__objclass__", "_inverted_"}
_MOMENTS = (datetime.datetime, datetime.time)
_OTHERS = (BaseException, numpy.ndarray, numpy.generic, functools.partial, *_MOMENTS)
_OF_A_PROCESS = {"_original_object_hash"}  # numbers that differ in each
_HOOKS = {name for name in vars(nn.Module()) if "_hooks" in name}


class Uncacheable(Exception):
    """What may decide what a model does and cannot be told, in words."""


class ValueFingerprints(abc.ABC):
    """``owned``: the tensors of the model that the objects belong to; ``classes``: of its modules. What classes,
    functions and Python's modules are is for the subclass."""

    def __init__(self, owned: Owned | None, classes: Collection[type]) -> None:
        self._owned, self._classes = owned, {*classes, *map(str, classes)}
        self.facts: list[str] = []  # what a digest is made of
        self._met: dict[int, int] = {}  # id -> number
        self._kept: list[Any] = []
        self._storages: dict[int, int] = {}
        self._lenient = False  # within what only libraries read
        self._finds_by_text = False  # whether the user's code does

    @abc.abstractmethod
    def _class(self, cls: type) -> None: ...

    @abc.abstractmethod
    def _function(self, f: types.FunctionType) -> None: ...

    @abc.abstractmethod
    def _is_users(self, value: object) -> bool: ...

    @abc.abstractmethod
    def _file(self, x: types.ModuleType) -> None: ...

    @abc.abstractmethod
    def _name_texts(self, texts: Iterable[str]) -> None: ...

    def _say(self, *facts: Any) -> None:
        self.facts.extend(map(str, facts))

    def _walk(self, x: Any) -> None:
        kind = type(x)
        if x is None or kind in (bool, int, str):
            self._say(kind.__name__, x)
        elif kind is float:
            self._say("float", x.hex())
        elif id(x) in self._met:
            self._say("as", self._met[id(x)])
        else:
            self._skip(x)
            self._met_first(x, kind)

    def _skip(self, x: Any) -> None:
        """It is known, when it is met."""
        self._met[id(x)] = len(self._met)
        self._kept.append(x)

    def _met_first(self, x: Any, kind: type) -> None:
        walk = _WALKS.get(kind)
        if walk is not None:
            walk(self, x)
        elif isinstance(x, type):
            self._class(x)
        elif isinstance(x, Tensor):
            self._tensor(x)
        elif isinstance(x, nn.Module):
            self._module(x)
        elif isinstance(x, enum.Enum):
            self._enum(x, kind)
        elif isinstance(x, (types.GenericAlias, types.UnionType)) or kind.__module__ == "typing":
            self._alias(x, kind)
        elif kind in _LOCKS or isinstance(x, logging.Filterer) or (self._lenient and isinstance(x, _OF_A_LIBRARY)):
            self._opaque(x)
        elif kind in _NUMPYS and getattr(numpy, getattr(x, "__name__", ""), None) is x:
            self._say("function of numpy", getattr(x, "__name__", ""))
        else:
            self._object(x, kind)

    def _walk_all(self, kind: str, entries: Iterable[Any]) -> None:
        entries = list(entries)
        if len(entries) > _LARGEST_COUNT:
            raise Uncacheable(f"a {kind} of {len(entries)} entries")
        self._say(kind, len(entries))
        for entry in entries:
            self._walk(entry)

    def _set(self, x: Iterable[Any]) -> None:
        entries = [y for y in x if not (self._lenient and self._is_of_others(y))]
        if not all(isinstance(y, _ORDERED) for y in entries):
            if not self._lenient:
                raise Uncacheable("a set of objects, whose order is another in each process")
            self._say("some set", len(entries))
            return
        by_name = sorted(entries, key=lambda y: (type(y).__name__, getattr(y, "__qualname__", None) or repr(y)))
        self._walk_all("set", by_name)

    def _mapping(self, x: Mapping[Any, Any]) -> None:
        entries = list(x.items())
        if self._lenient:
            entries = [(k, x) for k, x in entries if self._is_users(x) or not self._is_of_others(k)]
            if all(_are_texts(pair) for pair in entries):  # which distributions are installed, in the order of a set
                entries.sort(key=operator.itemgetter(0))
        self._walk_all("dict", (entry for pair in entries for entry in pair))

    def _is_of_others(self, key: Any) -> bool:
        """Whether a library notes something of a class under this key that is none of the model's."""
        named = isinstance(key, type) or (isinstance(key, str) and key.startswith("<class '"))
        return named and key not in self._classes

    def _tensor(self, x: Tensor) -> None:
        if x.layout != torch.strided or type(x) not in (Tensor, nn.Parameter, nn.Buffer):
            raise Uncacheable(f"a tensor of type {type(x).__qualname__}, {x.layout}")
        if any(type(n) is not int for n in tuple(x.shape)):
            raise Uncacheable("a tensor whose sizes are no numbers")
        storage = self._storages.setdefault(memory_of(x), len(self._storages))
        name = self._owned.name_of(x) if self._owned is not None else None
        self._say(
            "tensor", type(x).__name__, storage, tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device,
            x.requires_grad, x.is_leaf, x.is_inference(), MARKS.get(x), name,
        )  # fmt: skip
        self._mapping(tags_of(x))
        if not x.is_meta and name is None and MARKS.get(x) is None:
            self._say(self._contents(x))
        if name is None and x.is_leaf and x.grad is not None:
            self._walk(x.grad)

    def _contents(self, x: Tensor) -> str:
        if x.nbytes > _LARGEST:
            raise Uncacheable(f"a constant {tuple(x.shape)}, too large to be read")
        data = x.detach().to("cpu").contiguous().reshape(-1)
        return hashlib.blake2b(data.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()

    def _array(self, x: Any) -> None:
        self._say("array", x.dtype, x.shape, x.strides)
        if x.dtype == object:
            self._walk_all("objects", numpy.asarray(x).reshape(-1).tolist())
        elif x.dtype.hasobject or x.nbytes > _LARGEST:
            raise Uncacheable("an array with objects, or a large one")
        else:
            self._say(hashlib.blake2b(x.tobytes(), digest_size=16).hexdigest())

    def _enum(self, x: enum.Enum, kind: type) -> None:
        self._say("enum", x.name)
        self._walk(kind)
        self._mapping({name: value for name, value in x.__dict__.items() if name not in _OF_AN_ENUM})

    def _alias(self, x: Any, kind: type) -> None:
        """list[int], Annotated[int, 2], a type variable."""
        inner = [getattr(x, name, None) for name in ("__origin__", "__args__", "__metadata__")]
        self._say(kind.__qualname__, *([] if any(inner) else [repr(x)]))
        self._walk_all("alias", inner)

    def _opaque(self, x: Any) -> None:
        """A lock, or what is told where a program runs: of a logger, whether it would tell."""
        self._say("opaque")
        if isinstance(x, logging.Logger) and not self._lenient:
            self._say(x.name, x.getEffectiveLevel(), x.disabled)
            self._mapping({name: value for name, value in vars(x).items() if name not in _LOGGED})

    def _moment(self, x: datetime.datetime | datetime.time) -> None:
        self._say(type(x).__qualname__, repr(x.replace(tzinfo=None)), x.fold)
        self._walk(x.tzinfo)

    def _variable(self, x: contextvars.ContextVar[Any]) -> None:
        """What it is in this context, and whether somebody has set it."""
        try:
            found = x.get()
        except LookupError:
            found = None
        self._say("context variable", x.get(_UNSET) is _UNSET)
        self._walk(found)

    def _module(self, x: nn.Module) -> None:
        self._say("module")
        self._walk(type(x))
        entries = x.__dict__
        self._say(len(entries))
        for name, value in entries.items():
            self._say(name)
            if name in _HOOKS:  # by numbers, which count all hooks of a process
                self._walk_all("hooks", value.values() if isinstance(value, dict) else [value])
            elif name in ("_parameters", "_buffers", "_modules"):
                self._say(len(value))
                for key, entry in value.items():
                    self._say(key)
                    self._walk(entry)
            else:
                self._walk(value)

    def _object(self, x: Any, kind: type) -> None:
        texts = () if isinstance(x, _MOMENTS) else _TEXTS
        text = next((base for base in kind.__mro__ if base in texts), None)
        if hasattr(kind, "n_sequence_fields") or (text is not None and not self._is_users(kind)):
            self._say(kind.__qualname__, repr(x))
            return
        base: Any = text or next(filter(_is_written_in_c, kind.__mro__))
        if not (base is text or base in _BASES or base in _ALL_IN_ATTRIBUTES or issubclass(kind, _OTHERS)):
            if self._lenient:
                self._say("some", kind.__module__, kind.__qualname__)
                return
            raise Uncacheable(f"a {kind.__module__}.{kind.__qualname__}")
        self._say("object", base.__module__, base.__qualname__)
        if kind is not base:
            self._walk(kind)
        self._content(x, base)
        entries = getattr(x, "__dict__", None)
        if isinstance(entries, dict):
            self._mapping({name: value for name, value in entries.items() if name not in _OF_A_PROCESS})
        for cls in kind.__mro__[: kind.__mro__.index(base)]:
            self._slots(x, cls)

    def _content(self, x: Any, base: Any) -> None:
        """What an object of a class has as one of a base in C."""
        if isinstance(x, dict):
            self._mapping(dict(dict.items(x)))
            self._walk(getattr(x, "default_factory", None) if isinstance(x, collections.defaultdict) else None)
        elif isinstance(x, (set, frozenset)):
            self._set(set.__iter__(x) if isinstance(x, set) else frozenset.__iter__(x))
        elif isinstance(x, (list, tuple, collections.deque)):
            self._walk_all("list", list(base.__iter__(x)))
            self._say(x.maxlen if isinstance(x, collections.deque) else "")
        elif isinstance(x, (numpy.ndarray, numpy.generic)):
            self._array(x)
        elif isinstance(x, functools.partial):
            self._partial(x)
        elif isinstance(x, _MOMENTS):
            self._moment(x)
        elif isinstance(x, BaseException):
            self._walk((x.args, x.__cause__, getattr(x, "filename", None)))
        elif base not in _ALL_IN_ATTRIBUTES:
            self._say(repr(base.__repr__(x)))

    def _slots(self, x: Any, cls: type) -> None:
        for name, slot in list(vars(cls).items()):
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    value = slot.__get__(x)
                except AttributeError:
                    continue
                self._say(name)
                self._walk(value)

    def _bound(self, x: types.MethodType) -> None:
        self._say("method")
        self._walk(x.__func__)
        self._walk(x.__self__)

    def _builtin(self, x: Any) -> None:
        self._say("builtin", getattr(x, "__module__", ""), x.__qualname__)
        if not isinstance(x.__self__, (types.ModuleType, type, type(None))):
            self._walk(x.__self__)

    def _partial(self, x: Any) -> None:
        self._finds_by_text |= not self._lenient and any(x.func is f for f in FINDERS)
        self._walk_all("partial", (x.func, x.args, x.keywords, x.__dict__))

    def _getter(self, x: Any) -> None:
        self._say(repr(x))
        self._name_texts(re.findall(r"\w+", repr(x)))

    def _cached(self, x: Any) -> None:
        self._say("cached")
        self._walk(x.__wrapped__)

    def _property(self, x: Any) -> None:
        self._walk_all("property", (x.fget, x.fset, x.fdel))


def _are_texts(pair: tuple[Any, Any]) -> bool:
    """A text for a text, or for a list of them."""
    return all(type(x) is str for x in (pair[0], *(pair[1] if type(pair[1]) is list else pair[1:])))


@functools.lru_cache(4096)
def _is_written_in_c(cls: type) -> bool:
    """Whether objects of the class may hold what no attribute shows."""
    if not cls.__flags__ & _HEAP_TYPE:
        return True
    kinds = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
    own = [value for value in vars(cls).values() if isinstance(value, kinds)]
    made = vars(cls).get("__new__")
    return any(x.__objclass__ is cls for x in own) or getattr(made, "__self__", None) is cls


_ATTRIBUTE_KINDS = (
    types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
_WALKS: dict[type, Callable[[ValueFingerprints, Any], None]] = {
    tuple: lambda self, x: self._walk_all("tuple", x),
    list: lambda self, x: self._walk_all("list", x),
    torch.Size: lambda self, x: self._walk_all("size", x),
    slice: lambda self, x: self._walk_all("slice", (x.start, x.stop, x.step)),
    dict: ValueFingerprints._mapping,
    collections.OrderedDict: ValueFingerprints._mapping,
    types.MappingProxyType: ValueFingerprints._mapping,
    set: ValueFingerprints._set,
    frozenset: ValueFingerprints._set,
    types.FunctionType: lambda self, x: self._function(x),
    types.MethodType: ValueFingerprints._bound,
    types.BuiltinFunctionType: ValueFingerprints._builtin,
    functools.partial: ValueFingerprints._partial,
    CACHED: lambda self, x: self._cached(x),
    staticmethod: lambda self, x: self._walk(x.__func__),
    classmethod: lambda self, x: self._walk(x.__func__),
    property: ValueFingerprints._property,
    functools.cached_property: lambda self, x: self._walk(x.func),
    functools.singledispatchmethod: lambda self, x: self._walk(x.func),
    types.ModuleType: lambda self, x: self._file(x),
    **dict.fromkeys((weakref.ref, weakref.WeakMethod, weakref.KeyedRef), lambda self, x: self._walk(x())),
    **dict.fromkeys(map(type, ({}.keys(), {}.values(), {}.items())), lambda self, x: self._walk_all("view", x)),
    types.CellType: lambda self, x: self._walk(x.cell_contents),
    memoryview: lambda self, x: self._say("memory", x.format, x.shape, bytes(x)),
    _FIELD: lambda self, x: self._walk_all("field", x.__reduce__()[1]),
    types.CodeType: lambda self, x: self._say("code", code_digest(x)),
    re.Pattern: lambda self, x: self._say("pattern", x.pattern, x.flags),
    OpOverload: lambda self, x: self._say("operator", x),
    contextvars.ContextVar: ValueFingerprints._variable,
    types.MethodWrapperType: ValueFingerprints._builtin,
    operator.methodcaller: lambda self, x: self._walk_all("method", x.__reduce__()[1]),
    **{kind: lambda self, x: self._say("attribute", x.__qualname__) for kind in _ATTRIBUTE_KINDS},
    operator.itemgetter: lambda self, x: self._say(repr(x)),
    operator.attrgetter: ValueFingerprints._getter,
}
