"""The raw collectives of a graph: one node each, with the name of an axis, never a process group.

They have shapes but no kernel: `autopar.runtime.exec.lowering` lowers them onto the groups of a running mesh.
``blocks`` are those of `autopar.ir.placement.Shard`, for the global dim; only their ratios count, since in graphs of
token slices the dim has many sizes. ``size`` is the number of ranks on the axis. ``units``: of a Shard whose pieces
are padded (`Shard.units`): a whole value has no padding, a piece does. ``rows``: of the result of an exchange of rows,
zeros behind those that come; its operand may have more rows than go, too. 0: as many as come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.ops.padded_pieces import cropped_size, rows_per_rank

_library = torch.library.Library("autopar", "FRAGMENT")


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def _whole(x: Tensor, dim: int, blocks: list[int], axis: str, size: int, units: int = 0) -> Tensor:
    return _resized(x, dim, cropped_size(x.shape[dim] * size, units, size))


def _piece(x: Tensor, dim: int, blocks: list[int], axis: str, size: int, units: int = 0) -> Tensor:
    assert x.shape[dim] % (units or size) == 0, f"dim {dim} of {tuple(x.shape)} does not divide over {units or size}"
    return _resized(x, dim, rows_per_rank(x.shape[dim], units, size))


def _all_to_all(
    x: Tensor, src_dim: int, src_blocks: list[int], dst_dim: int, dst_blocks: list[int], axis: str, size: int,
    src_units: int = 0, dst_units: int = 0,
) -> Tensor:  # fmt: skip
    whole = _whole(x, src_dim, src_blocks, axis, size, src_units)
    return _piece(whole, dst_dim, dst_blocks, axis, size, dst_units)


def _same(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _rows(x: Tensor, splits: Tensor, back: bool, axis: str, size: int, rows: int = 0) -> Tensor:
    return _resized(x, 0, rows or x.shape[0])  # as many are received as sent, if routing is even


_ALONG = "(Tensor x, int dim, int[] blocks, str axis, int size, int units=0) -> Tensor"
_COLLECTIVES: tuple[tuple[str, Callable[..., Tensor]], ...] = (
    ("all_reduce(Tensor x, str axis, str op) -> Tensor", _same),
    (f"all_gather{_ALONG}", _whole),
    (f"reduce_scatter{_ALONG}", _piece),
    (
        "all_to_all(Tensor x, int src_dim, int[] src_blocks, int dst_dim, int[] dst_blocks, str axis, int size, "
        "int src_units=0, int dst_units=0) -> Tensor",
        _all_to_all,
    ),
    ("all_to_all_rows(Tensor x, Tensor splits, bool back, str axis, int size, int rows=0) -> Tensor", _rows),
    (f"shard_slice{_ALONG}", _piece),
    (f"shard_pad{_ALONG}", _whole),
)
for _schema, _fake in _COLLECTIVES:
    torch.library.register_fake(f"autopar::{_library.define(_schema)}", _fake, lib=_library)
