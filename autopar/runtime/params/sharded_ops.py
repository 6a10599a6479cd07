"""Operators on ShardedTensors: each computes with global values, whatever the layout of its operands.

    elementwise, foreach         on the shards; operands of another layout are sharded, or gathered and sharded, to fit
    transposes, rows, slices     views of the shards, if they do not change the sharded dims
    sums, norms, extrema         `autopar.runtime.params.sharded_reductions`
    everything else              on gathered tensors, the same on every rank; writes go back into the shards

A plain tensor is a replicated operand: it has the global shape and the same values on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.adapters.dtensor import local_of, reform
from autopar.adapters.operators import OpOverload, changes_form, writes_to
from autopar.ops.traits import PERMUTED, is_elementwise, is_random, is_view
from autopar.runtime.fault.errors import explained
from autopar.runtime.params.dtensor_layout import as_local, reduction_groups
from autopar.runtime.params.sharded_reductions import ScalarTensor, foreach_norm, reduce_over, reduced
from autopar.runtime.params.sharded_tensor import ShardedTensor, ViewSource, whole_tensor, written
from autopar.runtime.params.shards import Cuts, piece_of

# --- on full tensors -------------------------------------------------------------------------------------------


def leaves(value: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dicts, in order."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return [value]
    found: list[Any] = []
    for item in value:
        if isinstance(item, (list, tuple, dict)):
            found += leaves(item)
        else:
            found.append(item)
    return found


def mapped(value: Any, fn: Callable[[Any], Any]) -> Any:
    """The same nested lists, tuples and dicts with mapped leaves."""
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(item, fn) for item in value])
    if isinstance(value, dict):
        return {key: mapped(item, fn) for key, item in value.items()}
    return fn(value)


def on_whole(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on full tensors. If the result is a view of an operand, writes to it go to the operand."""
    operands = {id(x): x for x in leaves((args, kwargs)) if isinstance(x, Tensor)}
    ours = {i: x for i, x in operands.items() if isinstance(x, ShardedTensor)}
    mesh = next(iter(ours.values())).device_mesh
    sources = {i: source for i, x in ours.items() if (source := _source(x)) is not None}
    whole = {i: _whole(x, sources.get(i)) for i, x in operands.items()}
    out = func(*mapped(args, lambda x: whole.get(id(x), x)), **mapped(kwargs, lambda x: whole.get(id(x), x)))
    written = {id(x) for x in leaves(writes_to(func, args, kwargs)) if isinstance(x, Tensor)}
    if is_random(func):
        for x in [*(whole[i] for i in written), *(x for x in leaves(out) if isinstance(x, Tensor))]:
            _of_first(x, mesh)
    for i in written & sources.keys():
        sources[i].write()
    returned = {id(whole[i]): operands[i] for i in written}
    places = {_place(whole[i]): source for i, source in sources.items()}

    def is_number(x: Tensor) -> bool:
        """Whether a scalar was computed from tensors with dims."""
        own = torch.Tag.reduction not in func.tags and not all(o.dim() for o in ours.values())
        return x.dim() == 0 and not is_view(func) and not own

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in returned:
            return returned[id(x)]
        if is_number(x):
            return x.as_subclass(ScalarTensor)
        made = ShardedTensor.make(x, mesh, (), x.shape)
        if places:
            made.source = places.get(_place(x))
        return made

    return mapped(out, wrapped)


def _source(x: ShardedTensor) -> ViewSource | None:
    """The source to which writes to a view of it, or of its full tensor, go back."""
    return ViewSource.gathered(x) if x.is_apart else x.source


def _whole(x: Tensor, source: ViewSource | None) -> Tensor:
    if isinstance(x, ShardedTensor):
        return source.whole if source is not None and x.is_apart else x.fresh()
    return whole_tensor(x) if isinstance(x, DTensor) else x


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout == torch.strided else 0


def _of_first(x: Tensor, mesh: DeviceMesh) -> None:
    """Broadcast the values of the mesh's first rank to all ranks."""
    for axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(axis)
        if group.size() > 1:
            drawn = x.contiguous()  # a copy where it is a view
            with explained("sending numbers that were drawn", dist.get_process_group_ranks(group)):
                dist.broadcast(drawn.reshape(-1).view(torch.uint8), group=group, group_src=0)
            if drawn is not x:
                x.copy_(drawn)


aten = torch.ops.aten

FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
FORMS = {  # in place -> the view
    aten.t_.default: aten.t.default, aten.transpose_.default: aten.transpose.int,
    aten.squeeze_.default: aten.squeeze.default, aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims, aten.unsqueeze_.default: aten.unsqueeze.default,
}  # fmt: skip
NEW = {aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones, aten.new_full}
UNTAGGED = {aten.masked_fill_}  # elementwise, but without torch's tag
ON_PIECE = {aten.record_stream, aten.is_pinned}
BY_LISTS = {aten._foreach_max, aten._foreach_powsum}  # foreach, but not elementwise


def dispatch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator with a ShardedTensor among its operands."""
    if torch.is_inference_mode_enabled() and not any(isinstance(x, Tensor) and x.is_inference() for x in args):
        with torch.inference_mode(False):  # torch gives views of ordinary tensors versions
            return dispatch(func, args, kwargs)
    packet = func.overloadpacket
    name = packet.__name__
    if packet is aten._local_scalar_dense:
        return _number(args[0])
    if packet is aten.detach_:
        return args[0]
    if packet in (aten.detach, aten.alias) and args[0].source is None:
        return args[0].same()
    if changes_form(func):
        return _reformed(func, *args)
    if packet is aten._foreach_norm:
        return foreach_norm(*args, **kwargs)
    if packet is aten._amp_foreach_non_finite_check_and_unscale_:
        return _unscale(func, *args, **kwargs)
    if packet is aten.equal:
        return _equal(*args)
    if packet is aten.is_same_size:
        return args[0].shape == args[1].shape
    if packet in ON_PIECE:
        return func(*mapped(args, as_local), **mapped(kwargs, as_local))
    if packet in NEW:
        return _new(func, *args, **kwargs)
    if (
        is_random(func)
        or (is_view(func) and getattr(args[0], "source", None) is not None)
        or _leaves_mesh(func, args, kwargs)
    ):
        return on_whole(func, args, kwargs)
    if isinstance(args[0], ShardedTensor):
        if (found := reduced(func, args, kwargs)) is not None:
            return found
        if (view := _view_of_piece(func, args, kwargs)) is not None:
            return view
    if (name.startswith("_foreach_") and packet not in BY_LISTS) or name in FUSED:
        return _foreach(func, args, kwargs)
    if is_elementwise(func) or packet in UNTAGGED:
        return _elementwise(func, args, kwargs)
    return on_whole(func, args, kwargs)


def _reformed(func: OpOverload, x: ShardedTensor, *how: Any) -> ShardedTensor:
    view = dispatch(FORMS[func], (x, *how), {}) if func in FORMS and not isinstance(x, nn.Parameter) else None
    if view is None or (x.source is None and view.source is not None):
        raise ValueError(
            f"parameter: {func} would change the shape or the storage of a tensor on a mesh in place, found one of "
            f"shape {tuple(x.shape)}; create a new tensor from it, or copy into it: x.copy_(y)"
        )
    reform(x, func, how, view)
    x.cuts = view.cuts
    return x


def _number(x: ShardedTensor) -> Any:
    if x.cuts:
        raise RuntimeError(f"a Tensor with {x.numel()} elements cannot be converted to Scalar")
    return x.whole().item()


def _new(func: OpOverload, x: ShardedTensor, shape: Sequence[int], *rest: Any, **kwargs: Any) -> ShardedTensor:
    """A new tensor; it has the layout of ``x`` if it has the same shape."""
    local = local_of(x)
    if tuple(shape) != tuple(x.shape):
        made = func(local, shape, *rest, **kwargs)
        return ShardedTensor.make(made, x.device_mesh, (), made.shape)
    if func.overloadpacket is aten.new_empty_strided:
        return x.like(torch.empty_like(local, **kwargs))
    return x.like(func(local, local.shape, *rest, **kwargs))


# --- views of shards ------------------------------------------------------------------------------------


def _leaves_mesh(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a copy goes to another device type, on which the ranks of the mesh do not communicate."""
    device = kwargs.get("device") if func.overloadpacket is aten._to_copy else None
    return device is not None and torch.device(device).type != args[0].device_mesh.device_type


def _view_of_piece(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a view that does not change the sharded dims."""
    x: ShardedTensor = args[0]
    if not x.is_apart or not is_view(func):
        return None
    if not x.cuts:
        return _view_on_stage(func, x, args[1:], kwargs)
    places: list[int]  # positions of the dims of x in the view
    if func in PERMUTED:
        order = _order(func, x.dim(), *args[1:])
        places = [order.index(d) for d in range(x.dim())]
    elif func in (aten.select.int, aten.slice.Tensor, aten.unsqueeze.default):
        dim = (args[1] if len(args) > 1 else 0) % (x.dim() + (func is aten.unsqueeze.default))
        shift = {aten.select.int: -1, aten.slice.Tensor: 0, aten.unsqueeze.default: 1}[func]
        places = [d + shift * (d > dim or (d == dim and shift == 1)) for d in range(x.dim())]
        if shift < 1 and any(shard.dim == dim for _, shard in x.cuts):
            return None
    elif func is aten.view.default:
        return _viewed(x, args[1])
    else:
        return None
    shape = func(torch.empty(x.shape, device="meta"), *args[1:]).shape
    cuts = tuple((axis, replace(shard, dim=places[shard.dim])) for axis, shard in x.cuts)
    return _over_piece(x, func(local_of(x), *args[1:]) if x.is_here else local_of(x).view(0), cuts, shape)


def _view_on_stage(func: OpOverload, x: ShardedTensor, how: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Any view of a tensor that only some stages hold, unsharded there."""
    outlines = func(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), *how, **kwargs)
    found = func(local_of(x), *how, **kwargs) if x.is_here else mapped(outlines, lambda o: local_of(x).view(o.dtype))
    views = [_over_piece(x, local, (), o.shape) for local, o in zip(leaves(found), leaves(outlines), strict=True)]
    made = iter(views)
    return mapped(outlines, lambda _: next(made))


def _over_piece(x: ShardedTensor, local: Tensor, cuts: Cuts, shape: torch.Size) -> ShardedTensor:
    out = ShardedTensor.make(local, x.device_mesh, cuts, shape, x.holders)
    out.piece = local_of(x) if x.piece is None else x.piece
    return out


def _order(func: OpOverload, rank: int, *dims: Any) -> list[int]:
    """For each dim of the permuted tensor, the dim of the operand."""
    order = list(range(rank))
    if func is aten.permute.default:
        return [d % rank for d in dims[0]]
    if rank > 1:
        a, b = dims if dims else (0, 1)
        order[a], order[b] = order[b], order[a]
    return order


def _viewed(x: ShardedTensor, shape: Sequence[int]) -> ShardedTensor | None:
    """A reshape of the dims after the last sharded dim; None if others change."""
    kept = max(shard.dim for _, shard in x.cuts) + 1
    whole = torch.empty(x.shape, device="meta").view(shape).shape
    local = local_of(x)
    if x.holders is not None:
        return None  # other stages do not know the strides of the shard
    if whole[:kept] != x.shape[:kept] or not local.is_contiguous():
        return None
    return _over_piece(x, local.view([*local.shape[:kept], *whole[kept:]]), x.cuts, whole)


# --- elementwise ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Target:
    """The layout that operands of an elementwise operator must have: sharded like ``model``, broadcast to ``shape``."""

    func: OpOverload
    model: ShardedTensor
    cuts: Cuts
    shape: torch.Size

    @classmethod
    def of(cls, func: OpOverload, tensors: Sequence[Tensor], written: Tensor | None) -> _Target | None:
        """None if full operands are needed: to write to a plain tensor, or to let torch refuse their shapes."""
        if written is not None:
            return cls(func, written, written.cuts, written.shape) if isinstance(written, ShardedTensor) else None
        ours = [x for x in tensors if isinstance(x, ShardedTensor)]
        model = max(ours, key=lambda x: (x.is_apart, x.dim(), x.numel()))
        shape = _broadcast([x.shape for x in tensors])
        if shape is None:
            if not model.cuts:
                return None  # torch raises its own error
            raise _unlike(func, model.shape, next(x for x in tensors if x.shape != model.shape))
        ahead = len(shape) - model.dim()
        return cls(func, model, tuple((a, replace(s, dim=s.dim + ahead)) for a, s in model.cuts), shape)

    def fit(self, x: Any) -> Any:
        """The local operand for the operator on shards. Collective for an operand with another layout."""
        if not isinstance(x, Tensor):
            return x
        ahead, cuts = len(self.shape) - x.dim(), []
        for axis, shard in self.cuts:
            size = x.shape[shard.dim - ahead] if shard.dim >= ahead else 1
            if size == self.shape[shard.dim]:
                cuts.append((axis, replace(shard, dim=shard.dim - ahead)))
            elif size != 1 or (shard.dim >= ahead and not isinstance(x, DTensor) and self._is_row(shard.dim, x, ahead)):
                raise _unlike(self.func, self.shape, x)
        if isinstance(x, ShardedTensor) and self._has_pieces(x, tuple(cuts)):
            piece = x.fresh()
            return piece if x.is_here or x.dim() or not self.shape else piece.new_zeros(())  # for type promotion
        x = whole_tensor(x) if isinstance(x, DTensor) else x
        if self.shape and not x.dim():
            return x
        return piece_of(x, self.model.device_mesh, tuple(cuts), self.model.holders)

    def _has_pieces(self, x: ShardedTensor, cuts: Cuts) -> bool:
        """Whether the shards of an operand fit this layout already."""
        model = self.model
        return x.cuts == cuts and x.holders == model.holders and (not cuts or x.device_mesh == model.device_mesh)

    def _is_row(self, dim: int, x: Tensor, ahead: int) -> bool:
        """Whether a plain tensor of size 1 in a dim may be this rank's shard: if shards have size 1 there."""
        row = local_of(self.model).shape[dim - len(self.shape) + self.model.dim()] == 1
        return row and not (ahead and x.numel() == 1)

    def made(self, local: Any) -> Any:
        if not isinstance(local, Tensor):
            return local
        if self.cuts == self.model.cuts and self.shape == self.model.shape:
            return self.model.like(local)
        return ShardedTensor.make(local, self.model.device_mesh, self.cuts, self.shape, self.model.holders)


def _broadcast(shapes: Sequence[torch.Size]) -> torch.Size | None:
    """The shape to which these shapes broadcast; None if they do not."""
    columns = [{*sizes} - {1} for sizes in itertools.zip_longest(*map(reversed, shapes), fillvalue=1)]
    return None if any(len(c) > 1 for c in columns) else torch.Size(next(iter(c), 1) for c in reversed(columns))


def _unlike(func: OpOverload, shape: Sequence[int], x: Tensor) -> ValueError:
    """The error for a plain tensor of one row, which may be meant for all rows, or be this rank's shard."""
    return ValueError(
        f"parameter: {func} of a tensor of global shape {tuple(shape)} needs operands of this shape, found "
        f"{tuple(x.shape)}; pass the global tensor (the same on every rank), expanded if it has one row for all "
        "(x.expand), or compute with the shards: to_local()"
    )


def _elementwise(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
    targets = writes_to(func, args, kwargs)
    target = _Target.of(func, tensors, targets[0] if targets else None)
    if target is None or len(targets) > 1:
        return on_whole(func, args, kwargs)
    out = func(*mapped(args, target.fit), **mapped(kwargs, target.fit))
    if targets:
        written(targets[0])
        return targets[0]
    return mapped(out, target.made)


def _foreach(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operands at position i of all lists belong together; an operand that is not a list goes with every position."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
    changed = [list(leaves(a)) for a in writes_to(func, args, kwargs)]
    targets, fitted = _targets(func, lists, changed[0] if changed else None)
    for a in changed[1:]:
        _check_in_place(func, a, targets)
    out = func(
        *(fitted.get(id(a), _plain(a)) for a in args), **{k: fitted.get(id(a), _plain(a)) for k, a in kwargs.items()}
    )
    if changed:
        for x in leaves(changed):
            written(x)
        return None
    return [t.made(o) if isinstance(t, _Target) else t.like(o) if t is not None else o for o, t in zip(out, targets)]


def _targets(func: OpOverload, lists: Sequence[Any], written: Sequence[Any] | None) -> tuple[list[Any], dict[int, Any]]:
    """(the target layout of each position; list by list, the local operands for the operator on shards)"""
    if all(map(_are_alike, zip(*lists))):
        return list(lists[0]), {id(a): list(map(local_of, a)) for a in lists}
    targets: list[_Target | None] = []
    fitted: dict[int, list[Any]] = {id(a): [] for a in lists}
    for i, position in enumerate(zip(*lists)):
        ours = any(isinstance(x, ShardedTensor) for x in position)
        target = _Target.of(func, position, written[i] if written is not None else None) if ours else None
        targets.append(target)
        for a, x in zip(lists, position):
            fitted[id(a)].append(target.fit(x) if target is not None else _plain(x))
    return targets, fitted


def _are_alike(position: Sequence[Any]) -> bool:
    """Whether all have the same layout, and none is a view of a gathered tensor."""
    first, *others = position
    if type(first) is not ShardedTensor or first.source is not None:
        return False
    return not others or all(first.lies_as(x) and x.source is None for x in others)


def _plain(x: Any) -> Any:
    return whole_tensor(x) if isinstance(x, DTensor) else x


def _check_in_place(func: OpOverload, written: Sequence[Any], targets: Sequence[Any]) -> None:
    """States that a fused optimizer writes must have the layout of their parameters, except for step counts: a copy
    would not be written back."""
    for x, target in zip(written, targets):
        if target is None or not x.dim():
            continue
        alike = isinstance(x, ShardedTensor) and (x.cuts, x.holders) == (target.cuts, target.model.holders)
        if not alike:
            raise ValueError(
                f"optimizer: {func} needs states that are sharded like their parameters, found one of shape "
                f"{tuple(x.shape)} that is not; create it with zeros_like or full_like of the parameter"
            )


def _equal(a: Any, b: Any) -> bool:
    if a.shape != b.shape:
        return False
    target = _Target.of(aten.equal.default, [a, b], None)
    assert target is not None
    same = torch.tensor(int(torch.equal(target.fit(a), target.fit(b))), device=local_of(target.model).device)
    for group in reduction_groups(target.model):
        reduce_over(same, dist.ReduceOp.MIN, group)
    return bool(same.item())


def _unscale(func: OpOverload, tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """GradScaler's check: an infinity in any rank's shard counts on all ranks."""
    found = as_local(found_inf)
    func([as_local(t) for t in tensors], found, as_local(inv_scale))
    seen: set[str] = set()
    for x in tensors:
        written(x)
        for group in reduction_groups(x) if isinstance(x, ShardedTensor) else ():
            if group.group_name not in seen:
                seen.add(group.group_name)
                reduce_over(found, dist.ReduceOp.MAX, group)


ShardedTensor.run_operator = staticmethod(dispatch)
