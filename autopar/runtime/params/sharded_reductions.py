"""Sums, means, norms and extrema of ShardedTensors: first of the shards, then over the axes that shard a reduced dim.

    w [8, 6] sharded on tp in dim 0     w.sum()             of the shard, then over tp: replicated
                                        w.norm(dim=1)       of the shard: sharded on tp in dim 0
                                        w.amax(0)           of the shard, then over tp: replicated

So a scalar result is that of the global tensor, and reading it needs no communication. Scalars of a tensor that only
some pipeline stages hold are broadcast from there at once, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.adapters.dtensor import local_of, no_torch_function
from autopar.adapters.foreach import norms
from autopar.adapters.operators import OpOverload, argument_defaults
from autopar.runtime.fault.errors import explained
from autopar.runtime.params.sharded_tensor import ShardedTensor
from autopar.runtime.params.shards import STAGES, Cuts, from_holder, gathered_rows, is_padded, nothing_of


class ScalarTensor(Tensor):
    """A plain tensor with the methods of DTensor that code for DTensors calls. Results computed from it are plain."""

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    def full_tensor(self) -> Tensor:
        return self.as_subclass(Tensor)

    to_local = full_tensor

    def __repr__(self, **how: Any) -> str:  # type: ignore[override]
        return self.as_subclass(Tensor).__repr__(**how)

    def __format__(self, spec: str) -> str:
        return self.as_subclass(Tensor).__format__(spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


aten = torch.ops.aten


class _Of:
    """One call: the tensor, the reduced dims, and the sharding and shape of the result."""

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.given = dict(zip(argument_defaults(func), args)) | kwargs
        self.x: ShardedTensor = self.given.pop("self")
        dims, rank = self.given.get("dim"), self.x.dim()
        dims = [dims] if isinstance(dims, int) else dims
        self.dims = {d % rank for d in dims} if dims else {*range(rank)}
        self.keeps = bool(self.given.get("keepdim"))

    def along(self) -> list[dist.ProcessGroup]:
        return [self.x.device_mesh.get_group(axis) for axis, shard in self.x.cuts if shard.dim in self.dims]

    def local(self, **other: Any) -> Tensor:
        return self.func(local_of(self.x), **{**self.given, **other})

    def made(self, local: Tensor) -> Tensor:
        if local.dim() == 0:
            return local.as_subclass(ScalarTensor)
        cuts: Cuts = tuple((axis, shard) for axis, shard in self.x.cuts if shard.dim not in self.dims)
        shape = [1 if d in self.dims else n for d, n in enumerate(self.x.shape)]
        if not self.keeps:
            shape = [n for d, n in enumerate(shape) if d not in self.dims]
            cuts = tuple((a, replace(s, dim=s.dim - sum(d < s.dim for d in self.dims))) for a, s in cuts)
        return ShardedTensor.make(local, self.x.device_mesh, cuts, torch.Size(shape), self.x.holders)

    def nothing(self) -> Tensor:
        """A placeholder with the result's dtype and shape, on a stage that does not hold the tensor."""
        outline = self.func(torch.empty(self.x.shape, dtype=self.x.dtype, device="meta"), **self.given)
        local = local_of(self.x)
        if outline.dim():
            return self.made(nothing_of(local, outline.dtype))
        return local.new_empty((), dtype=outline.dtype)

    def over_stages(self, result: Tensor) -> Tensor:
        """Broadcast a scalar from the stage that holds the tensor; other results stay there."""
        if self.x.holders is None or isinstance(result, ShardedTensor):
            return result
        plain = result.as_subclass(Tensor)
        return from_holder(plain, self.x.device_mesh, self.x.holders, ()).as_subclass(ScalarTensor)


def _sum(call: _Of) -> Tensor:
    wide = _wide(call.x.dtype)
    if "dtype" not in argument_defaults(call.func) or call.given.get("dtype") is not None or wide == call.x.dtype:
        return call.made(_summed(call.local(), call.along()))
    return call.made(_summed(call.local(dtype=wide), call.along()).to(call.x.dtype))


def _mean(call: _Of) -> Tensor:
    """From the sums of the shards, which may have no elements."""
    dtype, dims = call.given.get("dtype") or call.x.dtype, sorted(call.dims)
    if not dtype.is_floating_point and not dtype.is_complex:
        return call.made(call.local())  # which torch refuses
    total = _summed(local_of(call.x).sum(dims, call.keeps, dtype=_wide(dtype)), call.along())
    return call.made((total / math.prod(call.x.shape[d] for d in dims)).to(dtype))


def _extreme(of_rows: Callable[[Tensor, int], Tensor]) -> Callable[[_Of], Tensor]:
    def extreme(call: _Of) -> Tensor:
        local = local_of(call.x)
        if is_padded(call.x.cuts) and not all(local.shape[d] for d in call.dims):  # this rank has no rows
            shape = [1 if d in call.dims else n for d, n in enumerate(local.shape)]
            found = call.func(local.new_full(shape, _least(of_rows, local.dtype)), **call.given)
        else:
            found = call.local()
        return call.made(_chosen(found, call.along(), of_rows))

    return extreme


def _least(of_rows: Callable[[Tensor, int], Tensor], dtype: torch.dtype) -> float | bool:
    """What changes no maximum (or minimum, or whether any or all are true)."""
    if of_rows in (torch.any, torch.all) or dtype == torch.bool:
        return of_rows in (torch.all, torch.amin)
    if dtype.is_floating_point:
        return -math.inf if of_rows is torch.amax else math.inf
    return torch.iinfo(dtype).min if of_rows is torch.amax else torch.iinfo(dtype).max


def _norm(call: _Of) -> Tensor:
    p = float(call.given.get("ord", 2))
    if call.given.get("dtype") is not None or math.isinf(p):
        return call.made(_norm_over(call.local(), p, call.along()))
    local = call.local(dtype=_wide(call.x.dtype))
    real = call.x.dtype.to_real() if call.x.dtype.is_complex else call.x.dtype
    return call.made(_norm_over(local, p, call.along()).to(real))


_KINDS: dict[Any, Callable[[_Of], Tensor]] = {
    aten.sum: _sum,
    aten.nansum: _sum,
    aten.count_nonzero: _sum,
    aten.mean: _mean,
    aten.amax: _extreme(torch.amax),
    aten.amin: _extreme(torch.amin),
    aten.max: _extreme(torch.amax),
    aten.min: _extreme(torch.amin),
    aten.any: _extreme(torch.any),
    aten.all: _extreme(torch.all),
    aten.linalg_vector_norm: _norm,
}
_PLACES = {aten.max.dim, aten.min.dim}  # return indices, too


def reduced(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """A known reduction of a sharded tensor, else None. Collective over the axes that shard a reduced dim."""
    kind = _KINDS.get(func.overloadpacket)
    if kind is None or func in _PLACES or "out" in kwargs or not args[0].is_apart:
        return None
    call = _Of(func, args, kwargs)
    return call.over_stages(kind(call) if args[0].is_here else call.nothing())


# --- over ranks -----------------------------------------------------------------------------------------


def reduce_over(value: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """In place."""
    with explained("reducing over the shards of a parameter", dist.get_process_group_ranks(group)):
        dist.all_reduce(value, op=op, group=group)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which addends of a dtype are summed."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point or dtype.is_complex else dtype


def _summed(value: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    value = value.contiguous()
    for group in groups:
        reduce_over(value, dist.ReduceOp.SUM, group)
    return value


def _chosen(value: Tensor, groups: Sequence[dist.ProcessGroup], of_rows: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The maximum or minimum over all ranks: by torch's own function, which propagates NaN."""
    for group in groups:
        rows = gathered_rows(value.to(torch.uint8) if value.dtype == torch.bool else value, group)
        value = of_rows(rows, 0).to(value.dtype)
    return value


def _norm_over(norm: Tensor, p: float, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The p-norm of the global tensor from those of the shards."""
    if not groups:
        return norm
    if math.isinf(p):
        return _chosen(norm, groups, torch.amax if p > 0 else torch.amin)
    if p == 0:
        return _summed(norm, groups)
    return _summed(norm**p, groups) ** (1.0 / p)


def foreach_norm(tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Norm of each tensor, with one all-reduce per set of axes that shard them."""
    p = float(ord)
    kinds = [dtype or x.dtype for x in tensors]
    wide = functools.reduce(torch.promote_types, map(_wide, {*kinds}))
    pieces = [x.fresh() if isinstance(x, ShardedTensor) else x for x in tensors]
    parts = norms(pieces, p, dtype=wide)
    by_axes: dict[tuple[str, ...], list[int]] = {}
    for i, x in enumerate(tensors):
        if isinstance(x, ShardedTensor) and x.cuts:
            by_axes.setdefault(tuple(g.group_name for g in _groups_that_cut(x)), []).append(i)
    for members in by_axes.values():
        groups = _groups_that_cut(tensors[members[0]])
        together = _norm_over(torch.stack([parts[i] for i in members]), p, groups)
        for i, value in zip(members, together.unbind(), strict=True):
            parts[i] = value
    _take_from_holders(tensors, parts)
    return [part.to(kind).as_subclass(ScalarTensor) for part, kind in zip(parts, kinds, strict=True)]


def _groups_that_cut(x: Any) -> list[dist.ProcessGroup]:
    return [x.device_mesh.get_group(axis) for axis, _ in x.cuts]


def _take_from_holders(tensors: Sequence[Tensor], numbers: list[Tensor]) -> None:
    """Replace the scalar of each tensor that only some stages hold by that of the first of them, with one exchange for
    all."""
    by_group: dict[dist.ProcessGroup, list[int]] = {}
    for i, x in enumerate(tensors):
        if isinstance(x, ShardedTensor) and x.holders is not None:
            by_group.setdefault(x.device_mesh.get_group(STAGES), []).append(i)
    for group, members in by_group.items():
        first = [tensors[i].holders.stages[0] == group.rank() for i in members]  # type: ignore[attr-defined]
        own = [numbers[i] if mine else torch.zeros_like(numbers[i]) for i, mine in zip(members, first, strict=True)]
        for i, value in zip(members, _summed(torch.stack(own), [group]).unbind(), strict=True):
            numbers[i] = value
