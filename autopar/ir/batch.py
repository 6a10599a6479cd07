"""The batch of a step: the global batch of all dp ranks, and one rank's shard.

Every rank of a dp coordinate passes its shard of the global batch; a step is compiled for the global one. Dims are by
path of the input ({"x": 1, "past.0": 0, "table": None}), None for an input without a batch dim: all ranks pass the
same. `autopar.planner.batch_dims` decides which dims they are.

Inputs that the user names as ``static_inputs`` are not tensors of the batch: their values specialize the graph, as
numbers and texts do, and are compared like these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.capture.trace.export import flatten, one_level, paths, unflatten

BatchDims = Mapping[str, int | None]


_SHOWN = 32  # values of a constant in messages and keys; of more, a digest


class ConstantTensor:
    """A tensor whose values specialize the graph: equal to others of the same dtype, shape and values."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.detach().cpu().contiguous()
        few = self.values.numel() <= _SHOWN
        self._told = str(self.values.tolist()) if few else _digest(self.values)

    def __repr__(self) -> str:
        return f"constant {described(self.values)} {self._told}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConstantTensor) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def _digest(x: Tensor) -> str:
    return hashlib.sha256(x.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def with_static_inputs(batch: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The batch with the tensors of some inputs as constants. Raises ValueError for those without values."""

    def constant(name: str, x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_meta:
            raise ValueError(
                f"static_inputs: input {name} needs values, found it on the meta device; pass a real tensor"
            )
        return ConstantTensor(x) if isinstance(x, Tensor) else x

    out = dict(batch)
    for name in names:
        if name in batch:
            leaves, spec = flatten(batch[name])
            out[name] = unflatten([constant(name, x) for x in leaves], spec)
    return out


def without_static_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with all tensors as tensors."""
    leaves, spec = flatten(dict(batch))
    out: dict[str, Any] = unflatten([x.values if isinstance(x, ConstantTensor) else x for x in leaves], spec)
    return out


def static_inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that are constants, with their values."""
    held = {name: [x for _, x in paths({name: value})] for name, value in batch.items()}
    names = [name for name, leaves in held.items() if any(isinstance(x, ConstantTensor) for x in leaves)]
    return without_static_inputs({name: batch[name] for name in names})


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """Tensors of a nested batch by path: {'past': (a, b)} -> past.0, past.1."""
    return {path: x for path, x in paths(batch) if isinstance(x, Tensor)}


def facts_of(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """What a compiled step depends on: shapes and dtypes of tensors, values of everything else, how they are nested."""
    return tuple(f"{name}: {described(value)}" for name, value in batch.items())


def described(value: Any) -> str:
    """A nested value as text, its tensors by dtype and shape: (float32 [2, 3], {'mask': None})"""
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
    """The global batch as shapes on the meta device, from the shard of one rank. Constants are repeated: all ranks have
    the same."""

    def repeated(name: str, x: ConstantTensor) -> ConstantTensor:
        dim = dims.get(name)
        return x if dim is None or ranks == 1 else ConstantTensor(torch.cat([x.values] * ranks, dim))

    def widened(name: str, x: Tensor) -> Tensor:
        shape, dim = list(x.shape), dims.get(name)
        if dim is not None:
            shape[dim] *= ranks
        return torch.empty(shape, dtype=x.dtype, device="meta")

    _, spec = flatten(out := map_tensors(dict(batch), widened))
    leaves = [repeated(path, x) if isinstance(x, ConstantTensor) else x for path, x in paths(out)]
    out = unflatten(leaves, spec)
    return out


def part_of_batch(
    batch: Mapping[str, Any], dims: BatchDims, ranks: int, index: int, experts: int = 1, microbatches: int = 1
) -> dict[str, Any]:
    """The shard of one data-parallel rank: consecutive examples. Where ``experts`` neighbouring ranks share experts,
    these have consecutive examples of each of the ``microbatches``, so that each sample has the position, and so the
    random numbers, that it has in one process.

    Raises ValueError for a batch that does not divide."""

    def part(name: str, x: Tensor) -> Tensor:
        dim = dims.get(name)
        if dim is None:
            return x
        if x.shape[dim] % ranks:
            raise ValueError(
                f"data_parallel: the batch of {x.shape[dim]} (dim {dim} of input {name}) does not divide over axis "
                f"'dp' of size {ranks}; use a batch of {-(-x.shape[dim] // ranks) * ranks}"
            )
        whole = x.chunk(ranks // experts, dim)[index // experts]
        if experts == 1 or whole.shape[dim] % (experts * microbatches):
            return whole.chunk(experts, dim)[index % experts].contiguous()
        return torch.cat([x.chunk(experts, dim)[index % experts] for x in whole.chunk(microbatches, dim)], dim)

    out: dict[str, Any] = map_tensors(dict(batch), part)
    return out
