"""Nested values to JSON, with tensors stored separately, and back: states of schedulers and loaders, optimizer options.

Numbers, strings, None and lists are themselves; everything else is an object with one key, its type: ``{"dict": {"lr":
0.1}}``, ``{"tuple": [0.9, 0.999]}``. So nothing is pickled, and reading never runs code.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Put = Callable[[str, Tensor], Any]
Get = Callable[[Any], Tensor]

_PLAIN = (bool, int, float, str, type(None))


def encoded(value: Any, put: Put, at: str) -> Any:
    """A value as JSON. ``put`` takes (path, tensor) and returns a reference to it in JSON; ``at``: the path of the
    value, for errors. Raises ValueError for a value that is neither plain nor has a ``state_dict``."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return {"tensor": put(at, value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {"array": put(at, torch.from_numpy(np.ascontiguousarray(value)))}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return _mapping(value, put, at)
    if type(value) is list:
        return [encoded(x, put, f"{at}.{i}") for i, x in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        return {"tuple": [encoded(x, put, f"{at}.{i}") for i, x in enumerate(value)]}
    if type(value) in (set, frozenset):
        return {type(value).__name__: [encoded(x, put, f"{at}.{i}") for i, x in enumerate(sorted(value, key=repr))]}
    if callable(getattr(value, "state_dict", None)):
        return encoded(value.state_dict(), put, at)
    raise ValueError(
        f"save: {at} is a {type(value).__name__}, needs tensors, numbers, strings, or lists and dicts of these; pass "
        "an object with state_dict(), or a plain description of it"
    )


def _mapping(value: Mapping[Any, Any], put: Put, at: str) -> Any:
    if isinstance(value, Counter):
        return {"counter": [[encoded(k, put, f"{at}.{k}"), n] for k, n in value.items()]}
    if all(type(k) is str for k in value):
        return {"dict": {k: encoded(x, put, f"{at}.{k}") for k, x in value.items()}}
    return {"items": [[encoded(k, put, at), encoded(x, put, f"{at}.{k}")] for k, x in value.items()]}


def decoded(tree: Any, get: Get) -> Any:
    """The value that was encoded; ``get`` takes the reference of a tensor. Raises ValueError for an invalid tree."""
    if isinstance(tree, list):
        return [decoded(x, get) for x in tree]
    if not isinstance(tree, dict):
        return tree
    (kind, inner), *more = tree.items() or [("nothing", None)]
    if more or kind not in _DECODERS:
        raise ValueError(f"needs one of {', '.join(_DECODERS)}, found {list(tree)[:3]}")
    try:
        return _DECODERS[kind](inner, get)
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{str(inner)[:60]} is no {kind}") from error


_DECODERS: dict[str, Callable[[Any, Get], Any]] = {
    "tensor": lambda note, get: get(note),
    "array": lambda note, get: get(note).numpy(),
    "complex": lambda pair, get: complex(*pair),
    "bytes": lambda text, get: base64.b64decode(text, validate=True),
    "dtype": lambda name, get: dtype_called(name),
    "counter": lambda pairs, get: Counter({decoded(k, get): n for k, n in pairs}),
    "dict": lambda items, get: {k: decoded(x, get) for k, x in items.items()},
    "items": lambda pairs, get: {decoded(k, get): decoded(x, get) for k, x in pairs},
    "tuple": lambda items, get: tuple(decoded(x, get) for x in items),
    "set": lambda items, get: {decoded(x, get) for x in items},
    "frozenset": lambda items, get: frozenset(decoded(x, get) for x in items),
}


def names_with_values(found: Any) -> dict[str, Any]:
    """Returns ``found``. Raises ValueError unless it is a dict with string keys."""
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"needs names with values, found a {type(found).__name__}")
    return found


def dtype_called(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16". Raises ValueError for an unknown name."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"needs the name of a dtype, found {name!r}")
    return found
