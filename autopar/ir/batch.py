"""The batch of a step: the whole of all dp ranks, and one rank's part.

Every rank of a dp coordinate passes its part of the whole batch; a step is compiled for the whole. Dims are by path of
the input ({"x": 1, "past.0": 0, "table": None}), None for an input that is no part of the batch: all ranks pass the
same. Which dims they are is decided in `autopar.planner.batch_dims`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.adapters.export import flatten, one_level, paths, unflatten

BatchDims = Mapping[str, int | None]


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """Tensors of a nested batch by path: {'past': (a, b)} -> past.0, past.1."""
    return {path: x for path, x in paths(batch) if isinstance(x, Tensor)}


def facts_of(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """What a compiled step depends on: shapes and dtypes of tensors, values of everything else, how they are nested."""
    return tuple(f"{name}: {described(value)}" for name, value in batch.items())


def described(value: Any) -> str:
    """A nested value in words, its tensors by dtype and shape: (float32 [2, 3], {'mask': None})"""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    children, kind = one_level(value)
    if kind is None:
        return repr(value)
    inside = list(map(described, children))
    if isinstance(kind, tuple):  # the keys of a dict
        return "{" + ", ".join(f"{key!r}: {child}" for key, child in zip(kind, inside, strict=True)) + "}"
    opening, closing = {"tuple": ("(", ")"), "list": ("[", "]")}.get(kind, (f"{kind}(", ")"))
    return f"{opening}{', '.join(inside)}{closing}"


def map_tensors(batch: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """The batch with its tensors changed, by path and value."""
    _, spec = flatten(batch)
    return unflatten([change(path, x) if isinstance(x, Tensor) else x for path, x in paths(batch)], spec)


def whole_batch(batch: Mapping[str, Any], dims: BatchDims, ranks: int) -> dict[str, Any]:
    """The batch of all dp ranks as shapes on the meta device, from that of one of them."""

    def widened(name: str, x: Tensor) -> Tensor:
        shape, dim = list(x.shape), dims.get(name)
        if dim is not None:
            shape[dim] *= ranks
        return torch.empty(shape, dtype=x.dtype, device="meta")

    out: dict[str, Any] = map_tensors(dict(batch), widened)
    return out


def part_of_batch(batch: Mapping[str, Any], dims: BatchDims, ranks: int, index: int) -> dict[str, Any]:
    """The part of one dp rank of the whole batch. Raises ValueError for a batch that does not divide."""

    def part(name: str, x: Tensor) -> Tensor:
        dim = dims.get(name)
        if dim is None:
            return x
        if x.shape[dim] % ranks:
            raise ValueError(
                f"data_parallel: the batch of {x.shape[dim]} (dim {dim} of input {name}) does not divide over axis "
                f"'dp' of size {ranks}; use a batch of {-(-x.shape[dim] // ranks) * ranks}"
            )
        return x.chunk(ranks, dim)[index].contiguous()

    out: dict[str, Any] = map_tensors(dict(batch), part)
    return out
