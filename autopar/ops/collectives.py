"""The raw collectives of a graph: one node each, an axis by name, never a process group.

They have shapes but no kernel: `autopar.runtime.exec.lowering` lowers them onto the groups of a running mesh.
``blocks`` are those of `autopar.ir.placement.Shard`, of the whole dim, of which their ratios count: in graphs of token
slices the dim has many sizes. ``size`` is the number of ranks on the axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("autopar", "FRAGMENT")

_library.define("all_reduce(Tensor x, str axis, str op) -> Tensor")
_library.define("all_gather(Tensor x, int dim, int[] blocks, str axis, int size) -> Tensor")
_library.define("reduce_scatter(Tensor x, int dim, int[] blocks, str axis, int size) -> Tensor")
_library.define(
    "all_to_all(Tensor x, int src_dim, int[] src_blocks, int dst_dim, int[] dst_blocks, str axis, int size) -> Tensor"
)
_library.define("all_to_all_rows(Tensor x, Tensor splits, bool back, str axis, int size) -> Tensor")
_library.define("shard_slice(Tensor x, int dim, int[] blocks, str axis, int size) -> Tensor")
_library.define("shard_pad(Tensor x, int dim, int[] blocks, str axis, int size) -> Tensor")


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def _divided(x: Tensor, dim: int, size: int) -> int:
    assert x.shape[dim] % size == 0, f"dim {dim} of {tuple(x.shape)} does not divide over {size}"
    return x.shape[dim] // size


@torch.library.register_fake("autopar::all_reduce", lib=_library)
def _all_reduce(x: Tensor, axis: str, op: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("autopar::all_gather", lib=_library)
def _all_gather(x: Tensor, dim: int, blocks: list[int], axis: str, size: int) -> Tensor:
    return _resized(x, dim, x.shape[dim] * size)


@torch.library.register_fake("autopar::reduce_scatter", lib=_library)
def _reduce_scatter(x: Tensor, dim: int, blocks: list[int], axis: str, size: int) -> Tensor:
    return _resized(x, dim, _divided(x, dim, size))


@torch.library.register_fake("autopar::all_to_all", lib=_library)
def _all_to_all(
    x: Tensor, src_dim: int, src_blocks: list[int], dst_dim: int, dst_blocks: list[int], axis: str, size: int
) -> Tensor:
    whole = _resized(x, src_dim, x.shape[src_dim] * size)
    return _resized(whole, dst_dim, _divided(whole, dst_dim, size))


@torch.library.register_fake("autopar::all_to_all_rows", lib=_library)
def _all_to_all_rows(x: Tensor, splits: Tensor, back: bool, axis: str, size: int) -> Tensor:
    """As many as go, if routing is even."""
    return x.new_empty(x.shape)


@torch.library.register_fake("autopar::shard_slice", lib=_library)
def _shard_slice(x: Tensor, dim: int, blocks: list[int], axis: str, size: int) -> Tensor:
    return _resized(x, dim, _divided(x, dim, size))


@torch.library.register_fake("autopar::shard_pad", lib=_library)
def _shard_pad(x: Tensor, dim: int, blocks: list[int], axis: str, size: int) -> Tensor:
    return _resized(x, dim, x.shape[dim] * size)
