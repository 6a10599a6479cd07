"""Values from JSON, checked against type annotations: what is unknown, missing or of another type is refused in words.

    read(Options, {"zero": 3, ...}, "options", READERS)    ->  Options(zero=3, ...)

The annotations of dataclasses are the schema; there is no second one to keep in step.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

Readers = Mapping[Any, Callable[[Any, str], Any]]  # annotation -> reads (value, where it stands)


def parse(text: str) -> Any:
    """JSON; a name that stands twice in one object is refused, since readers differ in which one they take.
    Raises ValueError."""
    if not isinstance(text, (str, bytes, bytearray)):
        raise ValueError(f"needs a text, found a {type(text).__name__}")
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON at line {error.lineno}, column {error.colno}") from error
    except RecursionError:
        raise ValueError("too many brackets within each other") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(n for n in names if names.count(n) > 1)!r} stands twice in one object")
    return found


def read(kind: Any, value: Any, at: str, readers: Readers) -> Any:
    """A value of an annotated type: str, int, float, bool, None, unions, tuples, mappings of names, dataclasses, and
    what ``readers`` know. ``at`` says where it stands, for errors: ValueError."""
    if kind in readers:
        return readers[kind](value, at)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _one_of(inner, value, at, readers)
    if origin is tuple:
        return _tuple(inner, value, at, readers)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        _need(isinstance(value, dict), "names with values", value, at)
        return {name: read(inner[1], v, f"{at}.{name}", readers) for name, v in value.items()}
    if dataclasses.is_dataclass(kind):
        return _fields(kind, value, at, readers)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    _need(fits, "null" if kind is types.NoneType else kind.__name__, value, at)
    return value


def _need(holds: bool, what: str, value: Any, at: str) -> None:
    if not holds:
        shown = repr(value)
        raise ValueError(f"expected {what} at {at}, found {shown if len(shown) < 80 else f'{shown[:80]}...'}")


def _one_of(kinds: tuple[Any, ...], value: Any, at: str, readers: Readers) -> Any:
    errors = []
    for kind in kinds:
        try:
            return read(kind, value, at, readers)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError(", or ".join(errors))


def _tuple(kinds: tuple[Any, ...], value: Any, at: str, readers: Readers) -> tuple[Any, ...]:
    _need(isinstance(value, list), "a list", value, at)
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(value)
    _need(len(value) == len(kinds), f"{len(kinds)} entries", value, at)
    return tuple(read(kind, v, f"{at}[{i}]", readers) for i, (kind, v) in enumerate(zip(kinds, value, strict=True)))


def _fields(kind: Any, value: Any, at: str, readers: Readers) -> Any:
    _need(isinstance(value, dict), "names with values", value, at)
    hints = _hints(kind)
    unknown, missing = [n for n in value if n not in hints], [n for n in hints if n not in value]
    if unknown or missing:
        what = f"unknown name {unknown[0]!r}" if unknown else f"no {missing[0]!r}"
        raise ValueError(f"expected {', '.join(hints)} at {at}, found {what}")
    return kind(**{name: read(hint, value[name], f"{at}.{name}", readers) for name, hint in hints.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}
