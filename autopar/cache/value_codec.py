"""Exact encoding of values as JSON, for files of the cache.

    (1, 2.0, torch.float32)   -->   ["t", 1, ["f", "0x1.0p+1"], ["y", "float32"]]

Decoding runs no code: no pickle, no text that becomes code, no import. A class must be loaded already, and be a
dataclass, a named tuple or an enum of autopar (or any class that is only referred to); an operator must be one that
steps may call (`stored_operators`). Any other value cannot be stored: `Unstorable`.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import enum
import functools
import json
import math
import operator
import sys
import types
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.fx.immutable_collections import immutable_dict, immutable_list

from autopar.adapters.fx.graph_data import TreeSpec, parts_of_spec, spec_of
from autopar.adapters.operators import OpOverload, argument_defaults, name_of, overload_of
from autopar.cache.stored_operators import SPACES, may_be_stored
from autopar.rules.core import CORE
from autopar.rules.table import RULES

Json = Any  # a value that json can write
_OPERATORS = (
    "getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge",
)  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS},
    **{f.__name__: f for f in (*RULES, *CORE) if isinstance(f, types.FunctionType)},  # functions with a rule
    "math.ceil": math.ceil, "math.floor": math.floor, "max": max, "min": min,
}  # fmt: skip
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_DEFAULTS = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)  # factories of a defaultdict
_LARGEST = 1 << 26  # bytes of a constant


class Unstorable(Exception):
    """A value that cannot be stored; the message names it."""


class Damaged(ValueError):
    """Data that no encoder has written."""


# --- to JSON ----------------------------------------------------------------------------------------------


class Encoder:
    """``encode(value)``; subclasses add types."""

    def __init__(self) -> None:
        self.kinds: dict[type, Callable[[Any], Json]] = {
            **dict.fromkeys((type(None), bool, int, str), lambda x: x),
            float: lambda x: ["f", x.hex()],
            complex: lambda x: ["i", x.real.hex(), x.imag.hex()],
            bytes: lambda x: ["b", base64.b64encode(x).decode()],
            tuple: lambda x: ["t", *map(self.encode, x)],
            list: lambda x: ["l", *map(self.encode, x)],
            immutable_list: lambda x: ["L", *map(self.encode, x)],
            torch.Size: lambda x: ["S", *map(self.encode, x)],
            set: lambda x: ["s", *self._in_order(x)],
            frozenset: lambda x: ["z", *self._in_order(x)],
            dict: lambda x: ["d", *self._items(x)],
            immutable_dict: lambda x: ["M", *self._items(x)],
            collections.OrderedDict: lambda x: ["o", *self._items(x)],
            collections.Counter: lambda x: ["C", *self._items(x)],
            slice: lambda x: [":", self.encode(x.start), self.encode(x.stop), self.encode(x.step)],
            type(...): lambda x: ["..."],
            Fraction: lambda x: ["/", x.numerator, x.denominator],
            torch.dtype: lambda x: ["y", str(x).removeprefix("torch.")],
            torch.layout: lambda x: ["y", str(x).removeprefix("torch.")],
            torch.memory_format: lambda x: ["y", str(x).removeprefix("torch.")],
            torch.device: lambda x: ["v", str(x)],
            OpOverload: lambda x: ["O", *operator_name(x)],
            type: lambda x: ["c", *class_name(x)],
            Tensor: self._constant,
        }

    def encode(self, value: Any) -> Json:
        """Raises Unstorable."""
        known = self.kinds.get(type(value))
        return known(value) if known is not None else self._other(value)

    def _in_order(self, entries: Any) -> list[Json]:
        """In the same order in every process."""
        return sorted(map(self.encode, entries), key=json.dumps)

    def _items(self, entries: Any) -> list[Json]:
        return [self.encode(x) for pair in entries.items() for x in pair]

    def _other(self, value: Any) -> Json:
        kind = type(value)
        if isinstance(value, TreeSpec):
            container, context, entries = parts_of_spec(value)
            if not _is_plain_context(container, context):
                raise Unstorable(f"a container {container} with factory {context}")
            kept = "namedtuple" if container is collections.namedtuple else self.encode(container)
            return ["T", kept, self.encode(context), *map(self.encode, entries)]
        if isinstance(value, type):
            return ["c", *class_name(value)]
        if callable(value) and value in _NAMES:
            return ["F", _NAMES[value]]
        if isinstance(value, enum.Enum):
            return ["e", *_own_class(kind), value.name]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ["N", *_own_class(kind), *map(self.encode, value)]
        if dataclasses.is_dataclass(kind):
            names = _fields_of(kind)
            kept = {name for cls in kind.__mro__ for name, x in vars(cls).items() if _is_cached(x)}
            if not set(getattr(value, "__dict__", ())) <= {*names, *kept}:
                raise Unstorable(f"a {kind.__qualname__} with attributes that are not fields")
            return ["D", *_own_class(kind), *(self.encode(getattr(value, name)) for name in names)]
        raise Unstorable(f"a {kind.__module__}.{kind.__qualname__}")

    def _constant(self, x: Tensor) -> Json:
        """A real tensor, by its bytes from first to last element; a meta tensor by its metadata."""
        reach = _reach(x.shape, x.stride()) if x.layout == torch.strided else 0
        nbytes = 0 if x.is_meta else reach * x.itemsize
        if x.layout != torch.strided or x.requires_grad or nbytes > _LARGEST or x.device.type not in ("cpu", "meta"):
            raise Unstorable(f"a constant {tuple(x.shape)} on {x.device}")
        data = None if x.is_meta else _bytes_of(x.as_strided((reach,), (1,)))
        kind = str(x.dtype).removeprefix("torch.")
        return ["x", kind, list(x.shape), list(x.stride()), None if data is None else base64.b64encode(data).decode()]


def _is_cached(x: object) -> bool:
    return isinstance(x, functools.cached_property)


def _bytes_of(x: Tensor) -> bytes:
    return bytes(x.view(torch.uint8).numpy()) if x.numel() else b""


def _reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The bytes from the first to the last element."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0


def operator_name(op: OpOverload) -> tuple[str, str, str]:
    """("aten", "add", "Tensor"). Raises Unstorable for other operators. (Torch has several objects for some.)"""
    space, _, name = name_of(op).partition("::")
    known = find_operator(space, name, overload_of(op))
    if known is None or argument_defaults(known) != argument_defaults(op):
        raise Unstorable(f"the operator {op}, which stored steps may not call")
    return space, name, overload_of(op)


def class_name(cls: type) -> tuple[str, str]:
    """(module, qualified name). Raises Unstorable for a class that is not found under this name."""
    if find_class(cls.__module__, cls.__qualname__) is not cls:
        raise Unstorable(f"the class {cls.__qualname__}, which its module does not have under this name")
    return cls.__module__, cls.__qualname__


def _is_plain_context(kind: Any, context: Any) -> bool:
    """Whether classes that pytree calls to build a container are themselves containers or plain values."""
    if kind is collections.namedtuple:
        return _is_named_tuple(context)
    if isinstance(context, type):
        return context in _DEFAULTS or _is_named_tuple(context)
    inner = [*context, *context.values()] if isinstance(context, dict) else context
    return not isinstance(inner, (list, tuple)) or all(_is_plain_context(None, x) for x in inner)


def _is_named_tuple(x: object) -> bool:
    return isinstance(x, type) and issubclass(x, tuple) and hasattr(x, "_fields")


def _own_class(cls: type) -> tuple[str, str]:
    names = class_name(cls)
    if not _is_ours(names[0]):
        raise Unstorable(f"a {cls.__module__}.{cls.__qualname__}")
    return names


def _is_ours(module: str) -> bool:
    return module == "autopar" or module.startswith("autopar.")


@functools.cache
def _fields_of(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


# --- from JSON --------------------------------------------------------------------------------------------


class Decoder:
    """``decode(tree)`` is the inverse of `Encoder.encode`; raises Damaged for other data."""

    def __init__(self) -> None:
        decode = self.decode
        self.kinds: dict[str, Callable[[list[Json]], Any]] = {
            "f": lambda x: float.fromhex(x[1]),
            "i": lambda x: complex(float.fromhex(x[1]), float.fromhex(x[2])),
            "b": lambda x: base64.b64decode(x[1], validate=True),
            "t": lambda x: tuple([decode(y) for y in x[1:]]),
            "l": lambda x: [decode(y) for y in x[1:]],
            "L": lambda x: immutable_list([decode(y) for y in x[1:]]),
            "S": lambda x: torch.Size([decode(y) for y in x[1:]]),
            "s": lambda x: {decode(y) for y in x[1:]},
            "z": lambda x: frozenset([decode(y) for y in x[1:]]),
            "d": self._items,
            "M": lambda x: immutable_dict(self._items(x)),
            "o": lambda x: collections.OrderedDict(self._items(x)),
            "C": lambda x: collections.Counter(self._items(x)),
            ":": lambda x: slice(decode(x[1]), decode(x[2]), decode(x[3])),
            "...": lambda x: ...,
            "/": lambda x: Fraction(decode(x[1]), decode(x[2])),
            "y": lambda x: kind_of_torch(x[1]),
            "v": lambda x: torch.device(x[1]),
            "O": lambda x: found(find_operator(x[1], x[2], x[3]), x),
            "F": lambda x: _FUNCTIONS[x[1]],
            "c": lambda x: found(find_class(x[1], x[2]), x),
            "T": self._spec,
            "e": lambda x: self._class(x, enum.Enum)[x[3]],
            "N": self._named,
            "D": self._dataclass,
            "x": self._constant,
        }

    def decode(self, tree: Json) -> Any:
        """Raises Damaged."""
        if type(tree) is not list:
            return tree
        try:
            return self.kinds[tree[0]](tree)
        except Damaged:
            raise
        except (LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError) as error:
            raise Damaged(f"an invalid value: {str(tree)[:80]}") from error

    def _items(self, x: list[Json]) -> dict[Any, Any]:
        if not len(x) % 2:
            raise Damaged("a key without a value")
        return {self.decode(x[i]): self.decode(x[i + 1]) for i in range(1, len(x), 2)}

    def _spec(self, x: list[Json]) -> Any:
        kind: Any = collections.namedtuple if x[1] == "namedtuple" else self.decode(x[1])
        context = self.decode(x[2])
        if not _is_plain_context(kind, context):
            raise Damaged(f"a container with factory {context}")
        return spec_of(kind, context, [self.decode(y) for y in x[3:]])

    def _class(self, x: list[Json], kind: type | None = None) -> Any:
        cls: Any = found(find_class(x[1], x[2]) if _is_ours(x[1]) else None, x)
        fits = dataclasses.is_dataclass(cls) if kind is None else issubclass(cls, kind)
        return found(cls if fits else None, x)

    def _named(self, x: list[Json]) -> Any:
        cls = self._class(x, tuple)
        return tuple.__new__(found(cls if len(cls._fields) == len(x) - 3 else None, x), map(self.decode, x[3:]))

    def _dataclass(self, x: list[Json]) -> Any:
        """A dataclass with the stored fields, without running its checks again."""
        cls = self._class(x)
        return filled_dataclass(cls, [self.decode(y) for y in x[3:]])

    def _constant(self, x: list[Json]) -> Tensor:
        dtype, shape, stride = kind_of_torch(x[1]), x[2], x[3]
        if x[4] is None:
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        data = base64.b64decode(x[4], validate=True)
        if len(data) != _reach(shape, stride) * dtype.itemsize or len(data) > _LARGEST:
            raise Damaged("a constant with another size")
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.as_strided(shape, stride)


def filled_dataclass(cls: Any, values: list[Any]) -> Any:
    """An instance of a dataclass with these field values; no code of the class runs."""
    names = _fields_of(cls)
    if len(names) != len(values):
        raise Damaged(f"a {cls.__qualname__} of {len(values)} fields")
    made = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def found(what: Any, x: list[Json]) -> Any:
    """``what``. Raises Damaged where there is none."""
    if what is None:
        raise Damaged(f"an unknown name {x[1:4]}")
    return what


def kind_of_torch(name: str) -> Any:
    """A dtype, layout or memory format. Raises Damaged."""
    value = vars(torch).get(name)  # not getattr, which may import modules
    if not isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        raise Damaged(f"{name} is not a dtype")
    return value


def _is_name(text: object) -> bool:
    return isinstance(text, str) and text.isidentifier()


def find_operator(space: str, name: str, overload: str) -> OpOverload | None:
    """An operator that stored steps may call."""
    if space not in SPACES or not (_is_name(name) and _is_name(overload)):
        return None
    packet = getattr(getattr(torch.ops, space), name, None)
    op = getattr(packet, overload, None)
    found = isinstance(op, OpOverload) and overload_of(op) == overload and may_be_stored(op)
    return op if found else None


def find_class(module: str, name: str) -> type | None:
    """A class of a loaded module."""
    here: Any = sys.modules.get(module) if isinstance(module, str) else None
    for part in name.split("."):
        if here is None or not _is_name(part) or part.startswith("__"):
            return None
        here = vars(here).get(part) if hasattr(here, "__dict__") else None
    return here if isinstance(here, type) and (here.__module__, here.__qualname__) == (module, name) else None
