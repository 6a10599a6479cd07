"""A DTensor for the shards that torch's own cannot say: blocked ones, and several axes on one dim.

torch's DTensor cuts the outer mesh dim first, ours the inner one (tp before dp), and its `_StridedShard` knows equal
blocks only (with unequal ones `full_tensor` is silently wrong, and distributed checkpoint refuses both).

A ShardedTensor is what a parameter, its gradient and its optimizer state need to be:
  - elementwise and foreach operators run on the local pieces, where all operands are cut the same way;
  - sums, norms and extrema over the whole tensor reduce over the axes that cut it;
  - `full_tensor` gathers; distributed checkpoint writes and reads each run of rows as a chunk of its own;
  - everything else is refused: silently wrong numbers are the alternative.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard

from autopar.adapters.dtensor import layout_record, local_of
from autopar.adapters.foreach import take_part
from autopar.ir.mesh import AXES
from autopar.ir.placement import Placement, Shard, piece, place_in_block
from autopar.runtime.failures import explained
from autopar.runtime.layout import from_rows

Cuts = tuple[tuple[str, Shard], ...]  # the axes that cut the tensor, in cut order


def cuts_of(placements: Mapping[str, Placement], sizes: Mapping[str, int]) -> Cuts:
    """The shards of a parameter on axes of more than one rank, in cut order (inner axes first)."""
    found = {a: p for a, p in placements.items() if isinstance(p, Shard) and sizes.get(a, 1) > 1}
    return tuple((a, found[a]) for a in reversed(AXES) if a in found)


@dataclass(frozen=True)
class Box:
    """Consecutive positions in every dim: where they start in the whole and in the local tensor, and how many."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    local: tuple[int, ...]

    def of_local(self, local: Tensor) -> Tensor:
        """The box as a view of the local tensor."""
        for dim, (at, length) in enumerate(zip(self.local, self.size)):
            local = local.narrow(dim, at, length)
        return local


def boxes(shape: Sequence[int], cuts: Cuts, sizes: Mapping[str, int], coordinate: Mapping[str, int]) -> list[Box]:
    """What the rank at a coordinate holds of a tensor of this (whole) shape."""
    runs = [_runs(size, dim, cuts, sizes, coordinate) for dim, size in enumerate(shape)]
    found = itertools.product(*runs)
    return [Box(*(tuple(r[i] for r in box) for i in range(3))) for box in found]


class ShardedTensor(DTensor):
    """``ShardedTensor.make(local, mesh, cuts, shape)``; see the module's docstring. ``cuts`` says which axes cut which
    dims in which blocks; on every other axis of the mesh the tensor is the same.

    run_operator: runs an operator of which an operand is a ShardedTensor; `autopar.runtime.sharded_ops` provides it.
    """

    cuts: Cuts
    run_operator: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]

    @staticmethod
    def make(local: Tensor, mesh: DeviceMesh, cuts: Cuts, shape: torch.Size) -> ShardedTensor:
        """From this rank's piece. Not collective. No gradient flows through it."""
        by_axis = dict(cuts)
        placements = tuple(
            TorchShard(by_axis[axis].dim) if axis in by_axis else TorchReplicate() for axis in mesh.mesh_dim_names or ()
        )
        record = layout_record(mesh, placements, shape, local.dtype)
        out = DTensor.__new__(ShardedTensor, local, record, requires_grad=False)
        assert isinstance(out, ShardedTensor)
        out.cuts = cuts
        return out

    def like(self, local: Tensor) -> ShardedTensor:
        """Another tensor of this layout."""
        return ShardedTensor.make(local, self.device_mesh, self.cuts, self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shown = ", ".join(f"{axis}: {shard}" for axis, shard in self.cuts)
        return f"ShardedTensor(shape={tuple(self.shape)}, {shown or 'whole'}, local={local_of(self)})"

    # --- the whole tensor and the piece ---------------------------------------------------------------

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor on every rank. Collective over the axes that cut it. Its gradient is taken to be the same on
        all ranks, as torch takes it of its DTensors."""
        if torch.is_grad_enabled() and self.requires_grad:
            out: Tensor = _FullTensor.apply(self)
            return out
        return self._whole()

    def _whole(self) -> Tensor:
        value = local_of(self).detach()
        for axis, shard in reversed(self.cuts):
            value = gather(value, self.device_mesh.get_group(axis), shard)
        return value

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's piece; gradients flow back to the ShardedTensor."""
        if torch.is_grad_enabled() and self.requires_grad:
            out: Tensor = _ToLocal.apply(self)
            return out
        return local_of(self)

    def redistribute(self, *_: Any, **__: Any) -> DTensor:
        raise ValueError(f"{_name(self)}: cannot be redistributed; take full_tensor() and distribute that")

    # --- distributed checkpoint: one chunk per run of consecutive positions ----------------------------

    def chunks(self) -> list[Box]:
        """What this rank holds, as boxes of the whole tensor."""
        coordinate = dict(zip(self.device_mesh.mesh_dim_names or (), self.device_mesh.get_coordinate() or ()))
        sizes = {axis: self.device_mesh.get_group(axis).size() for axis, _ in self.cuts}
        return boxes(self.shape, self.cuts, sizes, coordinate)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        local = local_of(self)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.start)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)),
                    properties=TensorProperties.create_from_tensor(local),
                    size=self.shape,
                ),
            )
            for box in self.chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)) for box in self.chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box in self.chunks():
            if torch.Size(box.start) == index.offset:
                return box.of_local(local_of(self).detach())
        raise ValueError(f"{_name(self)}: no chunk at {index.offset} of {index.fqn}")

    # --- operators ------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.run_operator(func, args, kwargs or {})


take_part(ShardedTensor)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh, cuts: Cuts, shape: torch.Size) -> ShardedTensor:
        return ShardedTensor.make(local, mesh, cuts, shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        assert isinstance(grad, DTensor)
        return local_of(grad), None, None, None


def from_local(local: Tensor, mesh: DeviceMesh, cuts: Cuts, shape: torch.Size) -> ShardedTensor:
    """`ShardedTensor.make`, through which gradients flow back to the piece."""
    out: ShardedTensor = _FromLocal.apply(local, mesh, cuts, shape)
    return out


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardedTensor) -> Tensor:
        ctx.layout = (x.device_mesh, x.cuts, x.shape)
        local = local_of(x)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> ShardedTensor:
        return ShardedTensor.make(grad, *ctx.layout)


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardedTensor) -> Tensor:
        ctx.layout = (x.device_mesh, x.cuts, x.shape)
        whole = x._whole()
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> ShardedTensor:
        mesh, cuts, _ = ctx.layout
        for axis, shard in cuts:
            grad = piece(grad, shard, mesh[axis].size(), mesh.get_local_rank(axis))
        return ShardedTensor.make(grad.contiguous(), *ctx.layout)


def gather(value: Tensor, group: dist.ProcessGroup, shard: Shard) -> Tensor:
    """The pieces of a group, joined."""
    rows = value.new_empty((group.size(), *value.shape))
    with explained("gathering a parameter", dist.get_process_group_ranks(group)):
        dist.all_gather_single(rows.view(-1), value.contiguous().view(-1), group=group)
    return from_rows(rows, shard.dim, shard.blocks)


def _runs(
    size: int, dim: int, cuts: Cuts, sizes: Mapping[str, int], coordinate: Mapping[str, int]
) -> list[tuple[int, int, int]]:
    """(global start, length, local start) of each run of consecutive positions of a dim that this rank holds."""
    held = [range(size)]
    for axis, shard in cuts:
        if shard.dim == dim:
            held = _piece_of(held, shard, sizes[axis], coordinate[axis])
    out: list[tuple[int, int, int]] = []
    at = 0
    for run in held:
        if out and out[-1][0] + out[-1][1] == run.start:
            out[-1] = (out[-1][0], out[-1][1] + len(run), out[-1][2])
        else:
            out.append((run.start, len(run), at))
        at += len(run)
    return out


def _piece_of(held: list[range], shard: Shard, ranks: int, rank: int) -> list[range]:
    """What a rank holds of positions that are cut once more."""
    out: list[range] = []
    start = 0
    for block in shard.blocks or (sum(map(len, held)),):
        rows = abs(block) // ranks
        out += _between(held, start + place_in_block(block, ranks, rank) * rows, rows)
        start += abs(block)
    return out


def _between(held: list[range], start: int, rows: int) -> Iterator[range]:
    """Those of the positions that stand in start .. start + rows."""
    for run in held:
        if part := run[max(start, 0) : max(start + rows, 0)]:
            yield part
        start -= len(run)


def _name(x: ShardedTensor) -> str:
    shown = ", ".join(f"{axis}: {shard}" for axis, shard in x.cuts)
    return f"a ShardedTensor of shape {tuple(x.shape)} cut by {shown or 'nothing'}"


def shards_of(x: DTensor) -> Cuts:
    """The shards of a DTensor, in cut order (inner axes first)."""
    if isinstance(x, ShardedTensor):
        return x.cuts
    named = zip(x.device_mesh.mesh_dim_names or (), x.placements, strict=True)
    cut = {axis: Shard(p.dim) for axis, p in named if isinstance(p, TorchShard)}
    return cuts_of(cut, {axis: x.device_mesh.get_group(axis).size() for axis in cut})


def reduction_groups(x: DTensor) -> Sequence[dist.ProcessGroup]:
    """The groups over which the pieces of a DTensor differ."""
    if isinstance(x, ShardedTensor):
        return [x.device_mesh.get_group(axis) for axis, _ in x.cuts]
    return [x.device_mesh.get_group(i) for i, p in enumerate(x.placements) if p.is_shard()]
