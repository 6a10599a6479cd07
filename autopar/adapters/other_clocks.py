"""Clocks that answer something else: does a forward compute with what they say, or branch on it?

    with other_clocks(replica, turned=True): replica(**batch)

An hour later `time.time() % 1` is another number, but ``datetime.now().hour < 12`` and ``localtime().tm_min == 7`` may
be what they were. So numbers that a clock tells are of classes whose comparisons, with ``turned``, answer the opposite.
A clock is found under its own name, under names and in partials of the user's files, and as an attribute of a module:
there functions of C that are called by others (`map`, `operator.call`), which no profiler sees, meet it as well.
"""

from __future__ import annotations

import datetime
import functools
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from autopar.adapters.code_owners import USER, owner_of_file

_LATER = 41_234_567.891  # seconds: another month, day, hour, minute and second
_SECONDS = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
_OF_A_TIME = {"localtime": 0, "gmtime": 0, "ctime": 0, "strftime": 1}  # at which place they may be given one
_TIME, _LOCAL = time.time, time.localtime
_MOST_ANSWERS = 10_000  # a loop that waits for a clock would not end
_ASKED = {time, datetime, random, secrets, uuid}  # modules whose functions the user's code may hand on


class _Endless(Exception):
    """Too many comparisons."""


class _Turning:
    """Whether comparisons answer the opposite, and how many have been asked."""

    on, answers = False, 0

    @classmethod
    def of(cls, answer: Any) -> Any:
        cls.answers += 1
        if cls.answers > _MOST_ANSWERS:
            raise _Endless
        return not answer if cls.on and isinstance(answer, bool) else answer


_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_ARITHMETIC = tuple(f"__{r}{op}__" for op in ("add", "sub", "mul", "mod", "floordiv", "truediv") for r in ("", "r"))


def _told_class(base: Any, results: tuple[str, ...]) -> Any:
    """A class of numbers or dates that a clock has told; so are ``results`` of its methods."""
    turned = {n: lambda self, *other, f=getattr(base, n): _Turning.of(f(self, *other)) for n in _COMPARISONS}
    kept = {n: lambda self, *other, f=getattr(base, n): _told(f(self, *other)) for n in results if hasattr(base, n)}
    hashed = {"__hash__": base.__hash__}
    if base in (int, float):
        hashed["__bool__"] = lambda self: _Turning.of(base.__bool__(self))
    return type(base.__name__, (base,), turned | kept | hashed)


_INT, _FLOAT = (_told_class(base, (*_ARITHMETIC, "__neg__", "__abs__", "__round__")) for base in (int, float))


def _told(x: Any) -> Any:
    if type(x) is time.struct_time:
        return time.struct_time([*map(_told, x)])
    return _INT(x) if type(x) is int else _FLOAT(x) if type(x) is float else x


def _dates(base: Any, fields: tuple[str, ...]) -> Any:
    """A class of dates: fields are numbers that a clock has told."""
    found = _told_class(base, ("weekday", "isoweekday", "timestamp", "toordinal"))
    for name in fields:
        setattr(found, name, property(lambda self, f=getattr(base, name): _told(f.__get__(self))))
    return found


_DATE = _dates(datetime.date, ("year", "month", "day"))
_DATETIME = _dates(datetime.datetime, ("year", "month", "day", "hour", "minute", "second", "microsecond"))


def _later(cls: Any, made: datetime.date) -> Any:
    then = made + datetime.timedelta(seconds=_LATER)
    if not isinstance(then, datetime.datetime):
        return cls(then.year, then.month, then.day)
    return cls(then.year, then.month, then.day, then.hour, then.minute, then.second, then.microsecond, then.tzinfo)


for _base, _class in ((datetime.date, _DATE), (datetime.datetime, _DATETIME)):
    for _name in {"today", "now", "utcnow"} & {*dir(_base)}:
        _ask = getattr(_base, _name)
        setattr(_class, _name, classmethod(lambda cls, *args, f=_ask, **kw: _later(cls, f(*args, **kw))))


def _stand_in(name: str) -> Callable[..., Any]:
    clock = getattr(time, name)
    if name not in _OF_A_TIME:
        more: float = int(_LATER * 1e9) if name.endswith("_ns") else _LATER
        return lambda *args: _told(clock(*args) + more)
    place = _OF_A_TIME[name]

    def at_a_time(*args: Any) -> Any:
        if len(args) > place and args[place] is not None:
            return clock(*args)
        now = _TIME() + _LATER
        return _told(clock(*args[:place], _LOCAL(now) if place else now))

    return at_a_time


_CLOCKS: dict[Any, Any] = {
    getattr(time, name): _stand_in(name)
    for name in (*_SECONDS, *(f"{n}_ns" for n in _SECONDS), *_OF_A_TIME)
    if hasattr(time, name)
} | {datetime.date: _DATE, datetime.datetime: _DATETIME}


def _instead(x: Any) -> Any:
    """What stands in for a clock, or a partial of one; None for all else."""
    if isinstance(x, functools.partial) and _is_clock(x.func):
        return functools.partial(_CLOCKS[x.func], *x.args, **x.keywords)
    return _CLOCKS[x] if _is_clock(x) else None


def _is_clock(x: Any) -> bool:
    return isinstance(x, type(time.time) | type) and x in _CLOCKS


def _users_files() -> list[ModuleType]:
    files = ((m, getattr(m, "__file__", None)) for m in list(sys.modules.values()) if isinstance(m, ModuleType))
    return [m for m, file in files if isinstance(file, str) and owner_of_file(file) == USER]


@contextmanager
def other_clocks(replica: nn.Module, turned: bool) -> Iterator[None]:
    """Within: clocks are a year ahead."""
    files = _users_files()
    scopes = [vars(time), vars(datetime), *map(vars, files), *(vars(m) for m in replica.modules())]
    found = [(scope, n, x, new) for scope in scopes for n, x in scope.items() if (new := _instead(x)) is not None]
    _Turning.on, _Turning.answers = turned, 0
    for scope, name, _, new in found:
        scope[name] = new
    try:
        yield
    finally:
        for scope, name, clock, _ in found:
            scope[name] = clock
        _Turning.on = False


def named_in_files_of(replica: nn.Module) -> str:
    """What asks a clock or draws, and may be called by a function of C: a name that code of the user's files with the
    modules' classes has, such as "time" or a partial of `time.time`. "" if there is none."""
    files = {id(f): f for c in {type(m) for m in replica.modules()} if (f := sys.modules.get(c.__module__)) is not None}
    for file in (f for f in files.values() if f in _users_files()):
        scope = vars(file)
        names = {n for x in scope.values() for code in _codes(x) for n in code.co_names}
        for name in sorted(names & scope.keys()):
            x = scope[name]
            x = x.func if isinstance(x, functools.partial) else x
            held = getattr(x, "__self__", None)
            if _is_clock(x) or (isinstance(x, ModuleType) and x in _ASKED) or isinstance(held, random.Random):
                return name
    return ""


def _codes(x: Any) -> Iterator[CodeType]:
    if isinstance(x, FunctionType):
        yield from _within(x.__code__)
    elif isinstance(x, type):
        for method in vars(x).values():
            if isinstance(method, FunctionType):
                yield from _within(method.__code__)


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _within(x)
