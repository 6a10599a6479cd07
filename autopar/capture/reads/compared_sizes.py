"""What a forward decides by sizes of tensors: each comparison of one, whatever it is compared with.

    with SizeLog() as log: model(ids)
    if ids.shape[1] % 64 == 0: ...       Compared(place, (ids.shape[1] % 64) == 0, True)

Sizes are ints that remember how they were computed. Two logs, of two numbers of tokens, say how each size depends on
that number, so the answer of each comparison is known for all others (`autopar.compile.ways_by_length`). Where a size
becomes a plain int, in ``int(n)``, ``len(ids)`` or ``n in {2, 7}``, the log has the integers of the code around it.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.capture.reads.code_owners import TORCH, TRUSTED, owner_of_file

_MODULES = str(Path(TORCH, "nn")) + "/"  # code of torch that is a part of forwards
_BETWEEN = {  # files whose frames are between a line and what it calls: torch.export replaces min and max
    __file__,
    *(str(Path(TORCH, name)) for name in ("_tensor.py", "overrides.py", "__init__.py", "_export/non_strict_utils.py")),
}


@dataclass(frozen=True)
class Asked:
    """A size, or sizes, that the forward has asked for: the k-th of a log are ``values``."""

    place: tuple[CodeType, int]
    values: tuple[int, ...]


@dataclass(frozen=True)
class Compared:
    """A comparison: ``found`` is a number computed from sizes, and its truth was ``truth``."""

    place: tuple[CodeType, int]
    found: Number
    truth: bool


@dataclass(frozen=True)
class MadePlain:
    """A number computed from sizes goes on as a plain int in code with the integers ``constants``."""

    place: tuple[CodeType, int]
    found: Number
    constants: tuple[int, ...]


Event = Asked | Compared | MadePlain


class SizeLog(TorchFunctionMode):
    """Context manager that notes in ``events`` what code in it decides by sizes. numbers: names of inputs of the
    forward that are numbers, which remember, too."""

    def __init__(self, numbers: Collection[str] = ()) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.numbers, self.open = numbers, False

    def given(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs, with numbers that remember."""
        return {n: _kept(self, x, None, (n,)) if n in self.numbers else x for n, x in inputs.items()}

    def __enter__(self) -> SizeLog:
        self.open = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.open = False
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in _ASKS or (place := _place()) is None:
            return made
        if not isinstance(made, (int, tuple)):
            return made
        values = made if isinstance(made, tuple) else (made,)
        if not all(type(n) is int for n in values):
            return made
        known = [Size(n).of(self, None, (len(self.events), i)) for i, n in enumerate(values)]
        self.events.append(Asked(place, tuple(values)))
        if func is Tensor.__len__:
            self.plain(known[0], place)
        return type(made)(known) if isinstance(made, tuple) else known[0]

    def plain(self, found: Number, place: tuple[CodeType, int] | None) -> None:
        if self.open and place is not None:
            self.events.append(MadePlain(place, found, integers_of(place[0])))


_ASKS: set[Any] = {
    vars(torch._C.TensorBase)["shape"].__get__, Tensor.size, Tensor.numel, Tensor.nelement, torch.numel,
    Tensor.__len__, Tensor.stride,
}  # fmt: skip


def _place(frame: FrameType | None = None) -> tuple[CodeType, int] | None:
    """The line of the forward that is running; None in code of torch and autopar."""
    frame = frame or sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    if frame is None or not _decides(frame.f_code.co_filename):
        return None
    return frame.f_code, frame.f_lineno


@cache
def _decides(file: str) -> bool:
    return owner_of_file(file) != TRUSTED or file.startswith(_MODULES)


@cache
def integers_of(code: CodeType) -> tuple[int, ...]:
    """The integers that a function's code has, those in tuples and sets included."""
    return tuple(sorted(set(_integers(code.co_consts))))


def _integers(found: Any) -> Iterator[int]:
    for x in found:
        if isinstance(x, (tuple, frozenset)):
            yield from _integers(x)
        elif type(x) is int:
            yield x


class Number:
    """How a number was computed: ``made(*parts)`` of numbers and constants; of an asked size, None and (event, dim);
    of an input, None and its name."""

    log: SizeLog
    made: Callable[..., Any] | None
    parts: tuple[Any, ...]

    def of(self, log: SizeLog, made: Callable[..., Any] | None, parts: tuple[Any, ...]) -> Number:
        self.log, self.made, self.parts = log, made, parts
        return self

    def __reduce__(self) -> Any:
        return type(plain(self)), (plain(self),)


class Size(Number, int):
    """An int that remembers how it was computed from sizes."""


class Ratio(Number, float):
    """The same, a float."""


def plain(x: Any) -> Any:
    """The value of a number."""
    return int.__int__(x) if isinstance(x, Size) else float.__float__(x) if isinstance(x, Ratio) else x


def _kept(log: SizeLog, value: Any, made: Callable[..., Any] | None, parts: tuple[Any, ...]) -> Any:
    """The value, remembering."""
    if not log.open:
        return value
    if type(value) is int:
        return Size(value).of(log, made, parts)
    return Ratio(value).of(log, made, parts) if type(value) is float else value


def _computes(name: str, made: Callable[..., Any], reflected: bool = False) -> Any:
    def compute(self: Any, *others: Any) -> Any:
        if any(not isinstance(x, (int, float)) for x in others):
            return NotImplemented
        parts = (*others, self) if reflected else (self, *others)
        return _kept(self.log, made(*map(plain, parts)), made, parts)

    compute.__name__ = name
    return compute


def _compares(name: str, made: Callable[..., Any]) -> Any:
    def compare(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        truth = made(plain(self), plain(other))
        if self.log.open and (place := _place()) is not None:
            found = Size(truth).of(self.log, made, (self, other))
            self.log.events.append(Compared(place, found, truth))
        return truth

    compare.__name__ = name
    return compare


def _becomes(name: str, made: Callable[[Any], Any]) -> Any:
    def become(self: Any, *how: Any) -> Any:
        self.log.plain(self, _place())
        return made(plain(self), *how)

    become.__name__ = name
    return become


def _truth(self: Any) -> bool:
    truth = bool(plain(self))
    if self.log.open and (place := _place()) is not None:
        self.log.events.append(Compared(place, Size(truth).of(self.log, operator.ne, (self, 0)), truth))
    return truth


_BOTH = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow")
_INTEGERS_ONLY = ("lshift", "rshift", "and", "or", "xor")
for _kind in (Size, Ratio):
    for _name in _BOTH + (_INTEGERS_ONLY if _kind is Size else ()):
        _made = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
        setattr(_kind, f"__{_name}__", _computes(_name, _made))
        setattr(_kind, f"__r{_name}__", _computes(_name, _made, reflected=True))
    setattr(_kind, "__divmod__", lambda self, other: (self // other, self % other))  # noqa: B010
    setattr(_kind, "__rdivmod__", lambda self, other: (other // self, other % self))  # noqa: B010
    for _name in ("neg", "pos", "abs") + (("invert",) if _kind is Size else ()):
        setattr(_kind, f"__{_name}__", _computes(_name, getattr(operator, _name)))
    for _name, _made in (("round", round), ("floor", math.floor), ("ceil", math.ceil), ("trunc", math.trunc)):
        setattr(_kind, f"__{_name}__", _computes(_name, _made))
    for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
        setattr(_kind, f"__{_name}__", _compares(_name, getattr(operator, _name)))
    for _name, _made in (("int", int), ("float", float), ("hash", hash)):
        setattr(_kind, f"__{_name}__", _becomes(_name, _made))
    setattr(_kind, "__bool__", _truth)  # noqa: B010
Size.bit_length = _becomes("bit_length", int.bit_length)  # type: ignore[method-assign]
