"""Detects whether a forward computes with the time, or branches on it, by running it with other clocks.

    with other_clocks(replica, 3600.0, operator.not_): replica(**batch)

An hour later `time.time() % 1` differs, but ``datetime.now().hour < 12`` and ``localtime().tm_min == 7`` may not. So
clocks return instances of classes whose comparisons can be inverted. Clocks are replaced under their own names, under
names and in partials of the user's modules, and in attributes of modules, so that calls from C functions (`map`,
`operator.call`), which no profiler sees, are covered, too.
"""

from __future__ import annotations

import datetime
import functools
import operator
import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from autopar.capture.reads.code_owners import USER, owner_of_file, owner_of_module

# (seconds ahead, result of comparisons): another month, day, hour, minute and second, then another half of the day;
# then at the true time inverted, and constant
OTHER_TIMES: tuple[tuple[float, Callable[[bool], bool]], ...] = (
    (41_234_567.891, bool), (41_281_428.891, bool), (0.0, operator.not_), (0.0, lambda _: True), (0.0, lambda _: False),
)  # fmt: skip
_SECONDS = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
_OF_A_TIME = {"localtime": 0, "gmtime": 0, "ctime": 0, "strftime": 1}  # index of the argument that may be a time
_TIME, _LOCAL, _REAL_DATE, _REAL_DATETIME = time.time, time.localtime, datetime.date, datetime.datetime
_MOST_ANSWERS = 10_000  # else a loop that waits for a clock would not end
_ENTROPY = {"urandom", "getrandom"}
_ASKED = {time, datetime, random, secrets, uuid}  # modules whose functions may be passed on to C functions


class Endless(Exception):
    """Too many comparisons."""


class _Turning:
    """State of the replaced clocks: result of comparisons, number of comparisons, seconds ahead."""

    answers, later = 0, 0.0
    answer: Callable[[bool], bool] = bool

    @classmethod
    def of(cls, answer: Any) -> Any:
        cls.answers += 1
        if cls.answers > _MOST_ANSWERS:
            raise Endless
        return cls.answer(answer) if isinstance(answer, bool) else answer


_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_ARITHMETIC = tuple(f"__{r}{op}__" for op in ("add", "sub", "mul", "mod", "floordiv", "truediv") for r in ("", "r"))


def _clock_class(base: Any, results: tuple[str, ...]) -> Any:
    """A class for results of clocks. Methods in ``results`` return such instances, too."""
    entries: dict[str, Any] = {n: _then(getattr(base, n), _Turning.of) for n in _COMPARISONS}
    entries |= {n: _then(getattr(base, n), _from_clock) for n in results if hasattr(base, n)}
    if base in (int, float):
        entries["__bool__"] = _then(base.__bool__, _Turning.of)
    return _StandIn(base.__name__, (base,), entries | {"__hash__": base.__hash__})


class _StandIn(type):
    """Metaclass: isinstance accepts instances of the replaced class."""

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, cls.__mro__[1])


def _then(method: Callable[..., Any], made_of: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self, *others: made_of(method(self, *others))


def _from_clock(x: Any) -> Any:
    if type(x) is time.struct_time:
        return time.struct_time([*map(_from_clock, x)])
    classes = {int: _INT, float: _FLOAT, str: _STR}
    return classes[type(x)](x) if type(x) in classes else x


_INT, _FLOAT, _STR = (
    _clock_class(base, (*_ARITHMETIC, "__neg__", "__abs__", "__round__", "__getitem__")) for base in (int, float, str)
)


def _later(ask: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
    then = ask(*args, **kwargs) + datetime.timedelta(seconds=_Turning.later)
    if not isinstance(then, _REAL_DATETIME):
        return _REAL_DATE.__new__(cls, then.year, then.month, then.day)
    clock = then.hour, then.minute, then.second, then.microsecond, then.tzinfo
    return _REAL_DATETIME.__new__(cls, then.year, then.month, then.day, *clock)


def _dates(base: Any, fields: tuple[str, ...]) -> Any:
    """A class of dates whose fields are results of clocks."""
    found = _clock_class(base, ("weekday", "isoweekday", "timestamp", "toordinal"))
    found.__new__ = lambda cls, *args, **kwargs: base(*args, **kwargs)  # a date that the forward constructs
    for name in ("today", "now", "utcnow"):
        if hasattr(base, name):
            setattr(found, name, classmethod(functools.partial(_later, getattr(base, name))))
    for name in fields:
        setattr(found, name, property(_then(getattr(base, name).__get__, _from_clock)))
    return found


_DATE = _dates(datetime.date, ("year", "month", "day"))
_DATETIME = _dates(datetime.datetime, ("year", "month", "day", "hour", "minute", "second", "microsecond"))


def _stand_in(name: str) -> Callable[..., Any]:
    clock = getattr(time, name)
    if name not in _OF_A_TIME:
        unit = (lambda x: int(x * 1e9)) if name.endswith("_ns") else float
        return lambda *args: _from_clock(clock(*args) + unit(_Turning.later))
    place = _OF_A_TIME[name]

    def at_a_time(*args: Any) -> Any:
        if len(args) > place and args[place] is not None:
            return clock(*args)
        now = _TIME() + _Turning.later
        return _from_clock(clock(*args[:place], _LOCAL(now) if place else now))

    return at_a_time


_CLOCKS: dict[Any, Any] = {
    getattr(time, name): _stand_in(name)
    for name in (*_SECONDS, *(f"{n}_ns" for n in _SECONDS), *_OF_A_TIME)
    if hasattr(time, name)
} | {datetime.date: _DATE, datetime.datetime: _DATETIME}


def _instead(x: Any) -> Any:
    """The replacement of a clock, or of a partial of one; else None."""
    if isinstance(x, functools.partial) and _is_clock(x.func):
        return functools.partial(_CLOCKS[x.func], *x.args, **x.keywords)
    return _CLOCKS[x] if _is_clock(x) else None


def _is_clock(x: Any) -> bool:
    return isinstance(x, type(time.time) | type) and x in _CLOCKS


def _users_files() -> list[ModuleType]:
    files = ((m, getattr(m, "__file__", None)) for m in list(sys.modules.values()) if isinstance(m, ModuleType))
    return [m for m, file in files if isinstance(file, str) and owner_of_file(file) == USER]


@contextmanager
def other_clocks(replica: nn.Module, later: float, answer: Callable[[bool], bool]) -> Iterator[None]:
    """Context manager: clocks are ``later`` seconds ahead, and comparisons of their results return ``answer(true
    result)``."""
    scopes = [vars(time), vars(datetime), *map(vars, _users_files()), *(vars(m) for m in replica.modules())]
    found = [(scope, n, x, new) for scope in scopes for n, x in scope.items() if (new := _instead(x)) is not None]
    held = [cell for function in _functions(replica) for cell in function.__closure__ or ()]
    cells = [(cell, x, new) for cell in held if (new := _instead(x := _content(cell))) is not None]
    _Turning.answer, _Turning.answers, _Turning.later = staticmethod(answer), 0, later
    try:
        for scope, name, _, new in found:
            scope[name] = new
        for cell, _, new in cells:
            cell.cell_contents = new
        yield
    finally:
        for scope, name, clock, _ in found:
            scope[name] = clock
        for cell, clock, _ in cells:
            cell.cell_contents = clock
        _Turning.answer = bool


def asked_out_of_sight(replica: nn.Module) -> str:
    """Names of clocks and random functions in the user's code that C functions may call unseen, as "clock or random".
    "" if there are none."""
    found = {name: None for m in replica.modules() for name, x in vars(m).items() if _asks(x, set())}
    for function in _functions(replica):
        names = {n for code in _within(function.__code__) for n in code.co_names}
        scope = function.__globals__
        found |= {n: None for n in sorted(names & scope.keys()) if _asks(scope[n], names)}
    return " or ".join(found)


def _functions(replica: nn.Module) -> Iterator[FunctionType]:
    """The user's functions of the modules, and those that their code refers to."""
    left = [x for m in replica.modules() for x in (*vars(m).values(), *type(m).__mro__)]
    seen = set[int]()
    while left:
        x = left.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, type) and owner_of_module(x.__module__) == USER:
            left += vars(x).values()
        elif isinstance(x, FunctionType) and owner_of_file(x.__code__.co_filename) == USER:
            yield x
            names = {n for code in _within(x.__code__) for n in code.co_names}
            left += [x.__globals__[n] for n in names & x.__globals__.keys()]
            left += [_content(c) for c in x.__closure__ or ()]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _asks(x: Any, names: set[str]) -> bool:
    x = x.func if isinstance(x, functools.partial) else x
    if isinstance(x, ModuleType):
        return x in _ASKED or (x is os and not names.isdisjoint(_ENTROPY))
    drawn = isinstance(x, type(time.time)) and x in [getattr(os, n) for n in _ENTROPY if hasattr(os, n)]
    bound = isinstance(x, BuiltinMethodType | MethodType) and isinstance(x.__self__, random.Random)
    return drawn or _is_clock(x) or bound


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _within(x)
