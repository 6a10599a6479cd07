"""torch._foreach operations on lists of tensors, and registration of types for them.

`ONE_BY_ONE` maps each to a function that does the same by an operator per tensor, for graphs: each tensor then has a
placement of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer
from torch.utils import _foreach_utils


def take_part(kind: type[Tensor]) -> None:
    """Register a Tensor subclass for foreach implementations of optimizers and clip_grad_norm_: by default one
    parameter of another type makes them loop over the parameters of a group."""
    for types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if kind not in types:
            types.append(kind)


def add_all(sums: Sequence[Tensor], addends: Sequence[Tensor]) -> None:
    """sums[i] += addends[i], in place."""
    torch._foreach_add_(list(sums), list(addends))


def add_one(counts: Sequence[Tensor]) -> None:
    """counts[i] += 1, in place."""
    if counts:
        torch._foreach_add_(list(counts), 1)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """targets[i] = sources[i], in place."""
    for members in _by_dtype(sources).values():
        torch._foreach_copy_([targets[i] for i in members], [sources[i] for i in members])


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """tensors[i] *= factor (of 0 dims), in place and in the dtype of each."""
    for dtype, members in _by_dtype(tensors).items():
        torch._foreach_mul_([tensors[i] for i in members], factor.to(dtype))


def lerp_all(averages: Sequence[Tensor], values: Sequence[Tensor], weight: float) -> None:
    """averages[i] += weight * (values[i] - averages[i]), in place and in the dtypes of the averages."""
    for dtype, members in _by_dtype(averages).items():
        torch._foreach_lerp_([averages[i] for i in members], [values[i].to(dtype) for i in members], weight)


def unscale_all(tensors: Sequence[Tensor], found: Tensor, inverse: Tensor) -> None:
    """tensors[i] *= inverse (of 0 dims), in place; ``found`` becomes 1 where one of them is not finite."""
    for members in _by_dtype(tensors).values():
        torch._amp_foreach_non_finite_check_and_unscale_([tensors[i] for i in members], found, inverse)


def norms(tensors: Sequence[Tensor], p: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The p-norm of each, of 0 dims, computed in ``dtype`` (default: its own); 0 of tensors without elements."""
    out: list[Any] = [None if x.numel() else x.new_zeros((), dtype=dtype) for x in tensors]
    for members in _by_dtype(tensors).values():
        full = [i for i in members if tensors[i].numel()]
        found = torch._foreach_norm([tensors[i] for i in full], p, dtype=dtype) if full else []
        for i, norm in zip(full, found, strict=True):
            out[i] = norm
    return out


def _each(name: str) -> Callable[..., Any]:
    """The function ``torch._foreach_<name>``, tensor by tensor. Arguments are shared, or lists with one for each."""

    def call(tensors: Any, *args: Any, **kwargs: Any) -> list[Tensor] | None:
        count = next(len(x) for x in (tensors, *args) if isinstance(x, (list, tuple)))
        made = []
        for i in range(count):
            x, *own = (a[i] if isinstance(a, (list, tuple)) else a for a in (tensors, *args))
            made.append(_one(name, x, own, kwargs))
        return None if name.endswith("_") else made

    return call


def _one(name: str, x: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The call for one tensor, with the arguments as foreach functions name and order them."""
    plain = name.removesuffix("_")
    if plain in ("addcdiv", "addcmul") and len(args) > 2:
        args, kwargs = args[:2], {"value": args[2]}
    if plain in ("maximum", "minimum"):
        found: Tensor = (torch.clamp_min if plain == "maximum" else torch.clamp_max)(x, *args)
        return x.copy_(found) if name.endswith("_") else found
    if plain == "norm":
        return torch.linalg.vector_norm(x, *(args or (2,)), **kwargs)
    if plain == "pow" and not isinstance(x, Tensor):
        return torch.pow(x, *args)
    made: Tensor = getattr(x, name)(*args, **kwargs)
    return made


ONE_BY_ONE: dict[Any, Callable[..., Any]] = {
    getattr(torch, f"_foreach_{name}"): _each(name)
    for name in (found.removeprefix("_foreach_") for found in dir(torch) if found.startswith("_foreach_"))
    if hasattr(Tensor, name) or name in ("maximum_", "minimum_")
}


def _by_dtype(tensors: Sequence[Tensor]) -> dict[torch.dtype, list[int]]:
    """Indices by dtype: a call with mixed dtypes would be a loop."""
    out: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(tensors):
        out.setdefault(x.dtype, []).append(i)
    return out
