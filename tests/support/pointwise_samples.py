"""Sample tensors, and samples of pointwise operators, made from their schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.testing.soundness import Sample, call

GENERATOR = torch.Generator().manual_seed(7)


def real(*shape: int) -> Tensor:
    """Values between 0.2 and 0.8: inside the domain of every function."""
    return torch.rand(shape, generator=GENERATOR, dtype=torch.float64) * 0.6 + 0.2


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def complex_(*shape: int) -> Tensor:
    return torch.complex(normal(*shape), normal(*shape))


def integer(*shape: int, high: int = 6) -> Tensor:
    return torch.randint(high, shape, generator=GENERATOR)


def truth(*shape: int) -> Tensor:
    return torch.rand(shape, generator=GENERATOR) > 0.4


# --- pointwise, from the schema -------------------------------------------------------------------------------------

_INTEGERS = {"bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__"}
_COMPLEX = {"real", "imag", "view_as_complex", "conj", "_conj_physical"}
_SCALARS: dict[str, Any] = {
    "decimals": 1,
    "n": 1,
    "rounding_mode": "floor",
    "dtype": torch.float64,
    "threshold": 0.5,
    "memory_format": torch.contiguous_format,
    "device": torch.device("cpu"),
    "min": 0.4,
    "max": 0.6,
    "generator": None,
}


_NO_DERIVATIVE = {"floor_divide", "heaviside", "silu_backward", "special_zeta"}
# All share one rule function: these are tried with every way to broadcast, the others with one.
BROADCAST = {"add", "mul", "div", "where", "atan2"}


def pointwise(op: Any) -> Iterator[Sample]:
    """All operands of equal shape, and the last one broadcast: as a row, as a column, as a scalar."""
    tensors = [a for a in op._schema.arguments if "Tensor" in str(a.type)]
    shapes = ((2, 6), (6,), (2, 1), ()) if op._opname in BROADCAST else ((2, 1),) if len(tensors) > 1 else ((2, 6),)
    for shape in shapes:
        filled = iter([(2, 6)] * (len(tensors) - 1) + [shape])
        args = [_filled(op, a, filled) for a in op._schema.arguments if not a.kwarg_only]
        named = {
            a.name: _SCALARS[a.name]
            for a in op._schema.arguments
            if a.kwarg_only and a.default_value is None and a.name in _SCALARS
        }
        if op._opname in ("masked_fill",) and len(tensors) == 2 and "value" in [t.name for t in tensors]:
            return
        derivable = op._opname not in _NO_DERIVATIVE and str(op) != "aten.remainder.Scalar_Tensor"
        yield call(op, *args, gradients=derivable, **(named if op._opname in ("round", "div") else {}))


def _filled(op: Any, argument: Any, shapes: Iterator[tuple[int, ...]]) -> Any:
    kind = str(argument.type)
    if "Tensor" in kind:
        shape = next(shapes)
        if argument.name in ("condition", "mask"):
            return truth(*shape)
        if op._opname in _INTEGERS:
            return integer(*shape)
        return complex_(*shape) if op._opname in _COMPLEX else real(*shape)
    if argument.name in _SCALARS:
        return _SCALARS[argument.name]
    if argument.default_value is not None:
        return argument.default_value
    return 3 if op._opname in _INTEGERS else None if "Optional" in kind else 0.5
