"""What each option may be: its type, its range, its names. One sentence says what was expected and what was found.

`checked` runs when `autopar.plan.Options` is made; `check_names`, when a plan is: tables of names are full by then.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autopar.adapters.operators import OpOverload
from autopar.attention import ALGORITHMS, LAYOUTS
from autopar.mesh import Mesh
from autopar.schedule import SCHEDULES
from autopar.topology import Topologies

_MOST_SHOWN = 80  # characters of a value


def refuse(name: str, expected: str, found: Any) -> ValueError:
    """The error for a value that an argument does not take."""
    plain = isinstance(found, (str, int, float, list, tuple, type(None)))
    shown = repr(found) if plain else f"a {type(found).__name__}"
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
    return ValueError(f"{name}: expected {expected}, found {shown}")


def whole_number(name: str, value: Any, least: int = 0, most: float = math.inf) -> int:
    """An int (numpy's, too), and neither a bool nor a float: True micro-batches are a mistake."""
    top = "" if most == math.inf else f" and at most {most}"
    expected = f"a whole number of at least {least}{top}"
    try:
        number = operator.index(value)
    except TypeError:
        raise refuse(name, expected, value) from None
    if isinstance(value, (bool, torch.Tensor)) or not least <= number <= most:
        raise refuse(name, expected, value)
    return number


def byte_count(name: str, value: Any) -> int:
    """A whole number; 80e9 is one, too."""
    whole = isinstance(value, float) and value.is_integer()
    return whole_number(name, int(value) if whole else value)


def number(name: str, value: Any, least: float = -math.inf) -> float:
    """A number that is none of torch's and no bool, nor nan."""
    expected = "a number" if least == -math.inf else f"a number of at least {least:g}"
    if isinstance(value, (bool, complex, str, bytes, torch.Tensor)) or not hasattr(value, "__float__"):
        raise refuse(name, expected, value)
    found = float(value)
    if not found >= least:
        raise refuse(name, expected, value)
    return found


def a_path(name: str, value: Any) -> Path:
    """The path of a file or folder."""
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise refuse(name, "a path", value if isinstance(value, str) else type(value).__name__)
    return Path(value)


def yes_or_no(name: str, value: Any) -> bool:
    """True or False, and no number."""
    if not isinstance(value, bool):
        raise refuse(name, "True or False", value)
    return value


def one_of(name: str, value: Any, known: Sequence[Any]) -> Any:
    """One of the known values, and of its type."""
    if isinstance(value, bool) or type(value) not in {type(k) for k in known} or value not in known:
        raise refuse(name, f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}", value)
    return value


def a_text(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise refuse(name, "a text", value)
    return value


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Names; a single one in a string would be taken apart into letters."""
    if isinstance(value, str) or not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        example = f"({value!r},)" if isinstance(value, str) and len(value) < _MOST_SHOWN else '("a", "b")'
        raise refuse(name, f"a tuple of names such as {example}", value)
    return tuple(value)


def number_or_lengths(name: str, value: Any) -> int | tuple[int, ...]:
    """A count, or the lengths of each."""
    if isinstance(value, (list, tuple)):
        return tuple(whole_number(name, length, 1) for length in value)
    return whole_number(name, value)


def dims_by_name(name: str, value: Any) -> tuple[tuple[str, int | None], ...]:
    """{"mask": 1, "table": None}, or its items."""
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(value, (Mapping, list, tuple)) or not all(_is_pair(p) for p in pairs):
        raise refuse(name, "the dim, or None, of inputs by name, such as {'mask': 1, 'table': None}", value)
    for key, dim in pairs:
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
            raise ValueError(f"{name}: expected the number of a dim or None for {key!r}, found {dim!r}")
    return tuple(sorted((key, dim) for key, dim in pairs))


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str)


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "zero": partial(one_of, known=(0, 3)),
    "sequence_parallel": yes_or_no,
    "micro_batches": partial(whole_number, least=1),
    "whole_ops": texts,
    "bucket_bytes": byte_count,
    "schedule": a_text,
    "cuts": texts,
    "chunks": whole_number,
    "slices": number_or_lengths,
    "gathers": partial(one_of, known=("step", "layer")),
    "memory_limit": byte_count,
    "attention": a_text,
    "layout": partial(one_of, known=("auto", *LAYOUTS)),
    "topology": a_text,
    "batch_dims": dims_by_name,
}


def checked(name: str, value: Any) -> Any:
    """The value of an option in its own type. Raises ValueError."""
    return CHECKS[name](name, value)


def check_names(options: Any) -> None:
    """Names of things that are registered: a misspelled one is an error on any mesh. Raises ValueError."""
    if options.schedule:
        SCHEDULES[options.schedule]
    for name in options.attention.split("+") if options.attention != "auto" else ():
        ALGORITHMS[name]
    Topologies.parse(options.topology)
    for name in options.whole_ops:
        if not _is_operator(name):
            raise ValueError(f"whole_ops: no operator {name!r}; their names are such as 'aten.cumsum.default'")


# The axes with which an option counts; without any of them it would be ignored.
AXES_OF = {
    "zero": ("dp", "cp"),
    "sequence_parallel": ("tp",),
    **dict.fromkeys(("schedule", "cuts", "chunks", "slices", "gathers", "memory_limit"), ("pp",)),
    **dict.fromkeys(("attention", "layout", "topology"), ("cp",)),
}


def check_used(options: Any, mesh: Mesh) -> None:
    """Options without an axis that they are about: whoever sets one expects that it does something. An axis of one rank
    will do, so that a script runs on meshes of all sizes. Raises ValueError."""
    default = type(options)()
    for name, axes in AXES_OF.items():
        value = getattr(options, name)
        if value != getattr(default, name) and not any(axis in mesh.sizes for axis in axes):
            raise ValueError(
                f"{name}: counts with an axis {' or '.join(axes)} only, found {name}={value!r} on the mesh {mesh}; "
                f"leave it out, or add such an axis"
            )
    if options.gathers != default.gathers and options.zero == 0:
        raise ValueError(
            f"gathers: says when parameters that ZeRO cuts are gathered, found gathers={options.gathers!r} with "
            "zero=0; leave it out, or set zero=3"
        )
    for axis in Topologies.parse(options.topology).axes:
        if axis != "*" and axis not in mesh.sizes:
            raise ValueError(f"topology: names links of the axis {axis!r}, found the mesh {mesh}; leave that axis out")


def _is_operator(name: str) -> bool:
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace, None), packet, None) if namespace and packet else None
    return isinstance(getattr(found, overload or "default", None), OpOverload)
