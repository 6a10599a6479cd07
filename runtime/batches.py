"""What the user passes to a step: arguments by name, what a compiled step depends on, tensors by path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from autopar.adapters.export import flatten, unflatten


def by_name(model: nn.Module, args: tuple[Any, ...], batch: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments by their names in the model's forward."""
    if not args:
        return batch
    names = [n for n, p in inspect.signature(model.forward).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        raise ValueError(f"model: its forward takes {len(names)} positional arguments, found {len(args)}")
    return {**dict(zip(names, args, strict=False)), **batch}


def facts_of(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a compiled step depends on: shapes and dtypes of tensors, values of everything else."""
    leaves, spec = flatten(dict(batch))
    facts = tuple((tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return (*facts, str(spec))


def shapes_of(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its tensors on the meta device."""
    leaves, spec = flatten(batch)
    out: dict[str, Any] = unflatten([x.to("meta") if isinstance(x, Tensor) else x for x in leaves], spec)
    return out


def tensors_of(batch: Any, path: str = "") -> dict[str, Tensor]:
    """Tensors of a nested batch by path: {'past': (a, b)} -> past.0, past.1."""
    if isinstance(batch, Tensor):
        return {path: batch}
    items = (
        batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, (tuple, list)) else ()
    )
    out: dict[str, Tensor] = {}
    for key, value in items:
        out |= tensors_of(value, f"{path}.{key}" if path else str(key))
    return out
