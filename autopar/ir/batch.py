"""The batch of a step: which dim of which input it is, the whole of all dp ranks, and one rank's part.

Every rank of a dp coordinate passes its part of the whole batch; a step is compiled for the whole. Dims are by path of
the input ({"x": 1, "past.0": 0, "table": None}), None for an input that is no part of the batch: all ranks pass the
same.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.adapters.export import flatten, paths, unflatten

BatchDims = Mapping[str, int | None]
UNCLEAR = "has as many rows as the batch, and nothing in the graph tells whether they are its rows"  # a note of plans


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """Tensors of a nested batch by path: {'past': (a, b)} -> past.0, past.1."""
    return {path: x for path, x in paths(batch) if isinstance(x, Tensor)}


def map_tensors(batch: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """The batch with its tensors changed, by path and value."""
    _, spec = flatten(batch)
    return unflatten([change(path, x) if isinstance(x, Tensor) else x for path, x in paths(batch)], spec)


def check_batch_dims(model: nn.Module, batch: Mapping[str, Any], dims: BatchDims) -> None:
    """Names are inputs (an input of the forward may be absent from this batch), dims are theirs. Raises ValueError."""
    tensors = tensors_of(batch)
    takes = inspect.signature(model.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    for name, dim in dims.items():
        first = name.partition(".")[0]
        if name not in tensors and (first in batch or (first not in takes and not anything)):
            raise ValueError(
                f"batch_dims: no input {name!r}; the tensors of the batch are {', '.join(tensors)}, those in tuples, "
                "lists and dicts are named by their path"
            )
        if dim is not None and name in tensors and not -tensors[name].dim() <= dim < tensors[name].dim():
            raise ValueError(
                f"batch_dims: input {name!r} has no dim {dim}, its shape is {tuple(tensors[name].shape)}; name one of "
                "its dims, or None if it is no part of the batch"
            )


def check_dims_exist(known: BatchDims, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Inputs have the dim that an earlier plan has found, or the user has named, as their batch. Raises ValueError."""
    for name, shape in shapes.items():
        dim = known.get(name)
        if dim is not None and not -len(shape) <= dim < len(shape):
            raise ValueError(
                f"batch: the batch is dim {dim} of input {name}, found a tensor of shape {list(shape)}; pass a row for "
                f"each example, or parallelize with batch_dims={{{name!r}: None}} if it is no part of the batch"
            )


def likely_dims(sizes: Mapping[str, tuple[int, ...]], known: BatchDims) -> dict[str, int | None]:
    """The dims as far as shapes tell: what is known, else dim 0 where its size is that of the batch.

    The size is that of the first known dim, else the most common leading size, of several the first.
    """
    rows = next((sizes[n][d] for n, d in known.items() if d is not None and n in sizes), None)
    if rows is None:
        leading = Counter(shape[0] for name, shape in sizes.items() if shape and name not in known)
        rows = max(leading, key=leading.__getitem__, default=0)

    def dim_of(name: str, shape: tuple[int, ...]) -> int | None:
        if name not in known:
            return 0 if shape and shape[0] == rows else None
        dim = known[name]
        return dim if dim is None or dim >= 0 else dim + len(shape)

    return {name: dim_of(name, shape) for name, shape in sizes.items()}


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
