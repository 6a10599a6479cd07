"""The operators that a ShardedTensor knows: elementwise, foreach, reductions to a scalar. The rest is refused.

Operands may be mixed: ShardedTensors and plain DTensors stand next to each other in one foreach list, since an
optimizer holds both. Position by position they must be cut alike; a plain tensor must be a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.adapters.dtensor import local_of, record_of
from autopar.adapters.foreach import norms
from autopar.adapters.operators import name_of
from autopar.ops.traits import is_elementwise
from autopar.runtime.failures import explained
from autopar.runtime.sharded_tensor import ShardedTensor, reduction_groups

aten = torch.ops.aten

SCALAR_RESULT = {
    aten.sum: ("sum", dist.ReduceOp.SUM),
    aten.amax: ("max", dist.ReduceOp.MAX),
    aten.amin: ("min", dist.ReduceOp.MIN),
    aten.max: ("max", dist.ReduceOp.MAX),
    aten.min: ("min", dist.ReduceOp.MIN),
    aten.any: ("max", dist.ReduceOp.MAX),
    aten.all: ("min", dist.ReduceOp.MIN),
}
FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator of which an operand is a ShardedTensor."""
    packet = func.overloadpacket
    name = packet.__name__
    if packet is aten._foreach_norm:
        return _foreach_norm(*args, **kwargs)
    if packet is aten._amp_foreach_non_finite_check_and_unscale_:
        return _unscale(func, *args, **kwargs)
    if packet is aten.linalg_vector_norm:
        return _vector_norm(func, *args, **kwargs)
    if packet is aten.equal:
        return _equal(*args)
    if packet is aten.is_same_size:
        return args[0].shape == args[1].shape
    if packet is aten._local_scalar_dense:
        return local_of(_whole(args[0], func)).item()
    if packet is aten.stack or packet is aten.cat:
        return _stack(func, *args, **kwargs)
    if packet in SCALAR_RESULT or packet is aten.mean:
        return _reduce(func, *args, **kwargs)
    if (name.startswith("_foreach_") and name not in ("_foreach_max", "_foreach_powsum")) or name in FUSED:
        return _foreach(func, args, kwargs)
    if packet is aten.new_empty_strided and tuple(args[1]) == args[0].shape:  # a gradient that somebody else holds, too
        return args[0].like(torch.empty_like(local_of(args[0]), **kwargs))
    if packet is aten.view and list(args[1]) == list(args[0].shape):
        return args[0].like(local_of(args[0]).view_as(local_of(args[0])))
    if is_elementwise(func):
        return _elementwise(func, args, kwargs)
    raise refused(func, next(a for a in _flat((args, kwargs)) if isinstance(a, ShardedTensor)))


def refused(func: Any, x: ShardedTensor) -> ValueError:
    """The error for an operator that would be wrong or is unknown on pieces."""
    cuts = ", ".join(f"{axis}: {shard}" for axis, shard in x.cuts)
    return ValueError(
        f"parameter: {func} is not defined on a tensor of shape {tuple(x.shape)} that is cut by {cuts or 'nothing'}; "
        "elementwise operators, sums and norms are; for anything else take full_tensor() or to_local()"
    )


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _flat(item)]
    return [value]


def _map(value: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, fn) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, fn) for key, item in value.items()}
    return fn(value)


def _layout(x: DTensor) -> Any:
    return x.cuts if isinstance(x, ShardedTensor) else tuple(x.placements)


def _is_whole(x: DTensor) -> bool:
    return not (x.cuts if isinstance(x, ShardedTensor) else any(not p.is_replicate() for p in x.placements))


def _whole(x: Any, func: Any) -> Any:
    if isinstance(x, ShardedTensor) and x.cuts:
        raise refused(func, x)
    return x


def _check_alike(func: Any, operands: Sequence[Any]) -> DTensor | None:
    """The operand whose layout the result has; raises unless all are cut alike or are scalars."""
    tensors = [x for x in operands if isinstance(x, Tensor)]
    model = next((x for x in tensors if isinstance(x, DTensor) and not (x.dim() == 0 and _is_whole(x))), None)
    model = model if model is not None else next((x for x in tensors if isinstance(x, DTensor)), None)
    if model is None:
        return None
    for x in tensors:
        if isinstance(x, DTensor):
            alike = (_layout(x) == _layout(model) and x.shape == model.shape) or (x.dim() == 0 and _is_whole(x))
        else:
            alike = x.numel() == 1 or (_is_whole(model) and x.shape == model.shape)
        if not alike:
            sharded = next((t for t in (model, x) if isinstance(t, ShardedTensor)), None)
            other = f"{_layout(x)}" if isinstance(x, DTensor) else "a plain tensor"
            raise ValueError(
                f"parameter: {func} needs operands that are cut alike, found "
                f"{tuple(model.shape)} cut by {_layout(model)} and "
                f"{tuple(x.shape)} as {other}; make the second with zeros_like or full_like of the first"
            ) from (refused(func, sharded) if sharded is not None else None)
    return model


def _local(x: Any) -> Any:
    return local_of(x) if isinstance(x, DTensor) else x


def _wrap(local: Any, model: DTensor) -> Any:
    if not isinstance(local, Tensor):
        return local
    if isinstance(model, ShardedTensor):
        return model.like(local)
    record = record_of(model)
    return DTensor.from_local(local, record.mesh, record.placements, shape=model.shape, stride=model.stride())


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    model = _check_alike(func, _flat((args, kwargs)))
    assert model is not None
    out = func(*_map(args, _local), **_map(kwargs, _local))
    if name_of(func).endswith("_"):
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    return tuple(_wrap(o, model) for o in out) if isinstance(out, tuple) else _wrap(out, model)


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Position i of all lists goes together; what is no list goes with every position."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
    rest = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    for position in zip(*lists):
        # The step counters of fused optimizers are plain scalars of their own.
        _check_alike(func, [*position, *rest])
    out = func(*_map(args, _local), **_map(kwargs, _local))
    if out is None or name_of(func).endswith("_"):
        return None
    return [_wrap(o, model) for o, model in zip(out, args[0])]


# --- reductions to a scalar ---------------------------------------------------------------------------


def _scalar(value: Tensor, model: DTensor) -> ShardedTensor:
    """A 0-dim result, the same on all ranks."""
    return ShardedTensor.make(value, model.device_mesh, (), torch.Size(()))


def _all_reduce(value: Tensor, x: DTensor, op: Any) -> Tensor:
    for group in reduction_groups(x):
        _reduce_over(value, op, group)
    return value


def _reduce_over(value: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    with explained("reducing over the pieces of a parameter", dist.get_process_group_ranks(group)):
        dist.all_reduce(value, op=op, group=group)


def _power_sum(norm: Tensor, p: float) -> tuple[Tensor, Any]:
    """What ranks exchange for a p-norm, of that of a piece: the largest magnitude, or the sum of p-th powers."""
    if p == float("inf"):
        return norm, dist.ReduceOp.MAX
    if p == float("-inf"):
        return norm, dist.ReduceOp.MIN
    return (norm if p == 0 else norm**p), dist.ReduceOp.SUM


def _root(value: Tensor, p: float) -> Tensor:
    return value if p in (0, float("inf"), float("-inf")) else value ** (1.0 / p)


def _foreach_norm(tensors: Sequence[DTensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[ShardedTensor]:
    """Norm of each tensor, with one all-reduce per set of axes that cut them."""
    by_axes: dict[tuple[str, ...], list[int]] = {}
    parts, op = [], dist.ReduceOp.SUM
    for i, (x, norm) in enumerate(zip(tensors, norms([local_of(x) for x in tensors], float(ord), dtype), strict=True)):
        part, op = _power_sum(norm, float(ord))
        parts.append(part)
        by_axes.setdefault(tuple(g.group_name for g in reduction_groups(x)), []).append(i)
    for members in by_axes.values():
        together = torch.stack([parts[i] for i in members])
        _all_reduce(together, tensors[members[0]], op)
        for i, value in zip(members, together.unbind()):
            parts[i] = value
    return [_scalar(_root(part, float(ord)), x) for part, x in zip(parts, tensors)]


def _vector_norm(
    func: Any, x: DTensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> ShardedTensor:
    if isinstance(x, ShardedTensor) and not x.cuts:
        return (
            x.like(torch.linalg.vector_norm(local_of(x), ord, dim, keepdim, dtype=dtype))
            if keepdim
            else _scalar(torch.linalg.vector_norm(local_of(x), ord, dim, dtype=dtype), x)
        )
    assert isinstance(x, ShardedTensor)
    if keepdim or (dim and len(dim) != x.dim()):
        raise refused(func, x)
    (norm,) = norms([local_of(x)], float(ord), dtype)
    part, op = _power_sum(norm, float(ord))
    return _scalar(_root(_all_reduce(part, x, op), float(ord)), x)


def _reduce(func: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    packet = func.overloadpacket
    if not x.cuts and x.dim() <= 1:
        return _scalar(func(local_of(x), *args, **kwargs), x)
    dims = args[0] if args else kwargs.get("dim")
    keeps = (len(args) > 1 and args[1]) or kwargs.get("keepdim")
    every = dims is None or (isinstance(dims, (list, tuple)) and len(dims) in (0, x.dim()))
    if keeps or not every or not isinstance(dims, (list, tuple, type(None))):
        raise refused(func, x)
    local = local_of(x)
    if packet is aten.mean:
        total = _all_reduce(local.sum(dtype=kwargs.get("dtype")), x, dist.ReduceOp.SUM)
        return _scalar(total / x.numel(), x)
    out = func(local, *args, **kwargs)
    carrier = out.to(torch.uint8) if out.dtype == torch.bool else out  # gloo has no MAX for bool
    return _scalar(_all_reduce(carrier, x, SCALAR_RESULT[packet][1]).to(out.dtype), x)


def _equal(a: Any, b: Any) -> bool:
    model = _check_alike(aten.equal.default, [a, b])
    assert model is not None
    same = torch.tensor(int(torch.equal(_local(a), _local(b))), device=local_of(model).device)
    return bool(_all_reduce(same, model, dist.ReduceOp.MIN).item())


def _stack(func: Any, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> ShardedTensor:
    """Scalars, such as the norms of all parameters, side by side."""
    values = []
    for x in tensors:
        if isinstance(x, ShardedTensor) and x.cuts:
            raise refused(func, x)
        values.append(x.full_tensor() if isinstance(x, DTensor) else x)
    model = next(x for x in tensors if isinstance(x, ShardedTensor))
    out = func(values, *args, **kwargs)
    return ShardedTensor.make(out, model.device_mesh, (), out.shape)


def _unscale(func: Any, tensors: Sequence[DTensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """GradScaler's check: a piece with an infinity anywhere is one everywhere."""
    found, scale = _local(found_inf), _local(inv_scale)
    func([local_of(t) for t in tensors], found, scale)
    seen: set[str] = set()
    for x in tensors:
        for group in reduction_groups(x):
            if group.group_name not in seen:
                seen.add(group.group_name)
                _reduce_over(found, dist.ReduceOp.MAX, group)


ShardedTensor.run_operator = staticmethod(dispatch)
