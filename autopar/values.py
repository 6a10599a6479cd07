"""Checks of values from arguments and files: type and range, with a ValueError in one sentence."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.spelling import did_you_mean

_MOST_SHOWN = 80  # characters of a value


def refuse(name: str, expected: str, found: Any, hint: str = "") -> ValueError:
    """The error for an argument of a wrong value. ``hint`` is appended, such as that of `did_you_mean`."""
    plain = isinstance(found, (str, int, float, list, tuple, type(None)))
    shown = repr(found) if plain else f"a {type(found).__name__}"
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
    return ValueError(f"{name}: expected {expected}, found {shown}{hint}")


def whole_number(name: str, value: Any, least: float = 0, most: float = math.inf) -> int:
    """Check an int (numpy's, too). A bool or a float is refused: ``microbatches=True`` is a mistake."""
    top = "" if most == math.inf else f" and at most {most}"
    expected = f"a whole number of at least {least}{top}"
    try:
        number = operator.index(value)
    except TypeError:
        raise refuse(name, expected, value) from None
    if isinstance(value, bool) or _is_tensor(value) or not least <= number <= most:
        raise refuse(name, expected, value)
    return number


def _is_tensor(value: Any) -> bool:
    """Without importing torch."""
    return hasattr(value, "requires_grad")


_UNITS = {"": 1, "B": 1} | {
    prefix + unit: base**power
    for base, unit in ((1000, "B"), (1024, "iB"))
    for power, prefix in enumerate(("K", "M", "G", "T"), 1)
}


def byte_count(name: str, value: Any) -> int:
    """Check a number of bytes: an int, a whole float (80e9), or a text with a unit, "80GB" (10^9) or "75GiB" (2^30)."""
    if isinstance(value, str):
        return _bytes_in_words(name, value)
    whole = isinstance(value, float) and value.is_integer()
    return whole_number(name, int(value) if whole else value)


def _bytes_in_words(name: str, value: str) -> int:
    found = re.fullmatch(r"\s*(\d+\.?\d*(?:e\d+)?)\s*([A-Za-z]*)\s*", value)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    size = float(found[1]) * units.get(found[2].lower(), math.nan) if found is not None else math.nan
    if not math.isfinite(size):
        raise refuse(name, "a number of bytes, such as 80e9, 80GB or 75GiB", value)
    return round(size)


DTYPES = {
    "bfloat16": ("bf16",),
    "float16": ("fp16", "half"),
    "float32": ("fp32", "float"),
    "float64": ("fp64", "double"),
}  # torch's name -> other names
DTYPE_BYTES = dict(zip(DTYPES, (2, 2, 4, 8), strict=True))


def dtype_name(text: str) -> str:
    """ "bf16" -> "bfloat16"; a text that names no dtype is returned unchanged."""
    plain = text.strip().lower().removeprefix("torch.")
    return next((name for name, others in DTYPES.items() if plain == name or plain in others), text)


def byte_rate(text: str) -> float:
    """Bytes per second: 50e9, 50GB or 50GB/s. Raises ValueError."""
    plain = text.strip()
    try:
        return float(plain)
    except ValueError:
        return float(_bytes_in_words("bandwidth", plain.removesuffix("/s")))


def number(name: str, value: Any, least: float = -math.inf) -> float:
    """Check a float: no tensor, bool or nan."""
    expected = "a number" if least == -math.inf else f"a number of at least {least:g}"
    if isinstance(value, (bool, complex, str, bytes)) or _is_tensor(value) or not hasattr(value, "__float__"):
        raise refuse(name, expected, value)
    found = float(value)
    if not found >= least:
        raise refuse(name, expected, value)
    return found


def a_path(name: str, value: Any) -> Path:
    """Check a path of a file or folder."""
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise refuse(name, "a path", value if isinstance(value, str) else type(value).__name__)
    return Path(value)


_TRUTHS = {"1": True, "yes": True, "on": True, "0": False, "no": False, "off": False, "none": False}


def yes_or_no(name: str, value: Any) -> bool:
    """Check a bool; numbers are refused."""
    if not isinstance(value, bool):
        hint = did_you_mean(value, (True, False), _TRUTHS)
        raise refuse(name, "True or False", value, hint)
    return value


def one_of(name: str, value: Any, known: Sequence[Any], meant: Mapping[str, Any] | None = None) -> Any:
    """Check that a value is one of ``known``, and has its type. ``meant``: other names -> known value."""
    if type(value) not in {type(k) for k in known} or value not in known:
        raise refuse(
            name, f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}", value, did_you_mean(value, known, meant)
        )
    return value


def a_text(name: str, value: Any) -> str:
    """Check a string."""
    if not isinstance(value, str):
        raise refuse(name, "a text", value)
    return value


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Check a tuple or list of names. A single string is refused: it would be split into letters."""
    if isinstance(value, str) or not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        example = f"({value!r},)" if isinstance(value, str) and len(value) < _MOST_SHOWN else '("a", "b")'
        raise refuse(name, f"a tuple of names such as {example}", value)
    return tuple(value)


def number_or_lengths(name: str, value: Any) -> int | tuple[int, ...]:
    """Check a count, or a tuple of lengths."""
    if isinstance(value, (list, tuple)):
        return tuple(whole_number(name, length, 1) for length in value)
    return whole_number(name, value)


def dims_by_name(name: str, value: Any) -> tuple[tuple[str, int | None], ...]:
    """Check {"mask": 1, "table": None}, or its items; returns them sorted."""
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(value, (Mapping, list, tuple)) or not all(_is_pair(p) for p in pairs):
        raise refuse(name, "the dim, or None, of inputs by name, such as {'mask': 1, 'table': None}", value)
    for key, dim in pairs:
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
            raise ValueError(f"{name}: expected the number of a dim or None for {key!r}, found {dim!r}")
    return tuple(sorted((key, dim) for key, dim in pairs))


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str)


Readers = Mapping[Any, Callable[[Any, str], Any]]  # annotation -> function of (value, its position)


def parse(text: str) -> Any:
    """Parse JSON. A key that appears twice in one object is refused, since parsers differ in which one they take.
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
    """Convert parsed JSON to an annotated type: str, int, float, bool, None, unions, tuples, mappings with string keys,
    dataclasses, and the types of ``readers``. ``at`` is the position that errors name. Raises ValueError."""
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
        hint = did_you_mean(unknown[0], missing) if unknown else ""
        raise ValueError(f"expected {', '.join(hints)} at {at}, found {what}{hint}")
    return kind(**{name: read(hint, value[name], f"{at}.{name}", readers) for name, hint in hints.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}
