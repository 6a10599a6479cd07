"""Whole tensors on one rank each: which rank owns which parameter, and the exchange of shards for whole tensors.

Ranks that share a sharded parameter are its group. Each of them owns some of the group's parameters: in turns, largest
first, so that all have about the same work. Shards travel to owners, and back, in one all-to-all per axis and dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.placement import piece
from autopar.ir.signature import in_buckets
from autopar.runtime.comm.collectives import joined
from autopar.runtime.fault.errors import explained
from autopar.runtime.params.sharded_tensor import ShardedTensor
from autopar.runtime.params.shards import cropped_piece, padded_piece, shape_of_piece

ROUND_BYTES = 64 * 2**20  # of whole parameters that one rank owns at a time


@dataclass(eq=False)
class Owned:
    """A parameter of a group of ranks, and who owns it: a coordinate for each axis that shards it."""

    p: ShardedTensor
    group: int  # of the optimizer
    owner: tuple[int, ...] = ()
    state: Any = field(default_factory=dict)

    @property
    def is_mine(self) -> bool:
        mesh = self.p.device_mesh
        return all(mesh.get_local_rank(axis) == at for (axis, _), at in zip(self.p.cuts, self.owner, strict=True))


def in_rounds(members: Sequence[Owned], limit: int = ROUND_BYTES) -> Iterator[list[Owned]]:
    """The parameters to exchange together: each rank owns about ``limit`` bytes of them. The same on all ranks of a
    group; those that are not sharded are in the first round."""
    by_axes: dict[tuple[str, ...], list[Owned]] = {}
    for member in members:
        by_axes.setdefault(tuple(axis for axis, _ in member.p.cuts), []).append(member)
    for axes, group in by_axes.items():
        sizes = [group[0].p.device_mesh.get_group(axis).size() for axis in axes]
        ranks = int(torch.Size(sizes).numel())
        group.sort(key=lambda member: -_cost(member.p.shape))  # stable
        load = [0.0] * ranks
        for member in group:
            least = load.index(min(load))
            load[least] += _cost(member.p.shape)
            member.owner = _coordinates(least, sizes)
        if not axes:
            yield group
            continue
        bytes_of = [member.p.numel() * member.p.itemsize for member in group]
        yield from ([group[i] for i in bucket] for bucket in in_buckets(bytes_of, limit * ranks))


def _cost(shape: Sequence[int]) -> float:
    """Work of a step: products of a matrix with itself, or one pass over a vector."""
    size = float(torch.Size(shape).numel())
    return size * min(shape) if len(shape) > 1 else size


def _coordinates(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(sizes):
        rank, at = divmod(rank, size)
        found.append(at)
    return tuple(reversed(found))


def to_owners(members: Sequence[Owned], shards: Sequence[Sequence[Tensor]]) -> list[list[Tensor] | None]:
    """The whole tensors of each member, None where another rank owns it. ``shards``: this rank's, of each member, all
    laid out like the member's parameter. Collective within their group, as is `from_owners`."""
    held: list[list[Tensor] | None] = [
        [padded_piece(x, m.p.shape, m.p.device_mesh, m.p.cuts) for x in found]
        for m, found in zip(members, shards, strict=True)
    ]
    if not members:
        return held
    for i in reversed(range(len(members[0].p.cuts))):
        mesh, axis = members[0].p.device_mesh, members[0].p.cuts[i][0]
        group, me = mesh.get_group(axis), mesh.get_local_rank(axis)
        live = [k for k, found in enumerate(held) if found is not None]
        mine = [k for k in live if members[k].owner[i] == me]
        leaving = [[x for k in live if members[k].owner[i] == r for x in held[k] or ()] for r in range(group.size())]
        like = [x for k in mine for x in held[k] or ()]
        arriving = _exchanged(leaving, [like] * group.size(), group, members[0].p.device)
        rows = map(torch.stack, zip(*arriving))
        for k in live:
            shard, count = members[k].p.cuts[i][1], len(held[k] or ())
            held[k] = (
                [joined(next(rows), shard.dim, shard.blocks, shard.units) for _ in range(count)] if k in mine else None
            )
    return held


def from_owners(
    members: Sequence[Owned], whole: Sequence[Sequence[Tensor] | None], dtypes: Sequence[Sequence[torch.dtype]]
) -> list[list[Tensor]]:
    """This rank's shards of tensors that owners hold; ``dtypes``: of each tensor of each member."""
    held: list[list[Tensor] | None] = [None if found is None else list(found) for found in whole]
    for i in range(len(members[0].p.cuts) if members else 0):
        mesh, axis = members[0].p.device_mesh, members[0].p.cuts[i][0]
        group, me = mesh.get_group(axis), mesh.get_local_rank(axis)
        leaving: list[list[Tensor]] = [[] for _ in range(group.size())]
        arriving: list[list[Tensor]] = [[] for _ in range(group.size())]
        live = [k for k, m in enumerate(members) if _is_held_at(m, i + 1)]
        for k in live:
            p, shard = members[k].p, members[k].p.cuts[i][1]
            if members[k].owner[i] == me:
                for x in held[k] or ():
                    for r in range(group.size()):
                        leaving[r].append(piece(x, shard, group.size(), r))
            shape = shape_of_piece(p.shape, mesh, p.cuts[: i + 1], padded=True)
            arriving[members[k].owner[i]] += [torch.empty(shape, dtype=d, device="meta") for d in dtypes[k]]
        found = [iter(tensors) for tensors in _exchanged(leaving, arriving, group, members[0].p.device)]
        for k in live:
            held[k] = [next(found[members[k].owner[i]]) for _ in dtypes[k]]
    return [
        [cropped_piece(x, m.p.shape, m.p.device_mesh, m.p.cuts) for x in found or ()]
        for m, found in zip(members, held, strict=True)
    ]


def _is_held_at(member: Owned, i: int) -> bool:
    """Whether this rank has the owner's coordinate on all axes from the i-th on."""
    mesh = member.p.device_mesh
    rest = zip(member.p.cuts[i:], member.owner[i:], strict=True)
    return all(mesh.get_local_rank(axis) == at for (axis, _), at in rest)


def _exchanged(
    leaving: Sequence[Sequence[Tensor]],
    like: Sequence[Sequence[Tensor]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[list[Tensor]]:
    """The tensors that each rank sends here. ``leaving``: those for each rank; ``like``: shapes and dtypes of those
    that come from each."""
    kinds = {x.dtype for tensors in (*leaving, *like) for x in tensors}
    out: list[list[Any]] = [[None] * len(tensors) for tensors in like]
    for dtype in sorted(kinds, key=str):
        sent = [[x for x in tensors if x.dtype == dtype] for tensors in leaving]
        places = [[j for j, x in enumerate(tensors) if x.dtype == dtype] for tensors in like]
        counts = [sum(like[r][j].numel() for j in of) for r, of in enumerate(places)]
        flat = [x.reshape(-1) for tensors in sent for x in tensors]
        source = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        target = source.new_empty(sum(counts))
        with explained("exchanging parameters with their owners", dist.get_process_group_ranks(group)):
            _all_to_all(target, source, counts, [sum(x.numel() for x in tensors) for tensors in sent], group)
        start = 0
        for r, of in enumerate(places):
            for j in of:
                size = like[r][j].numel()
                out[r][j] = target[start : start + size].view(like[r][j].shape)
                start += size
    return out


def _all_to_all(target: Tensor, source: Tensor, got: list[int], sent: list[int], group: dist.ProcessGroup) -> None:
    """As bytes, since backends support few dtypes."""
    size = source.itemsize
    dist.all_to_all_single(
        target.view(torch.uint8),
        source.view(torch.uint8),
        [n * size for n in got],
        [n * size for n in sent],
        group=group,
    )


def of_all(found: dict[Any, Any], members: Sequence[Owned]) -> dict[Any, Any]:
    """The entries of all ranks of a group, by objects that can be pickled. Collective."""
    for axis, _ in members[0].p.cuts if members else ():
        group = members[0].p.device_mesh.get_group(axis)
        everybody: list[Any] = [None] * group.size()
        with explained("exchanging states of an optimizer", dist.get_process_group_ranks(group)):
            dist.all_gather_object(everybody, found, group=group)
        found = {key: value for one in everybody for key, value in one.items()}
    return found
