"""Operators of whole tensors: operands are gathered, every rank computes the same, and writes go back into the pieces.

    x[3].mul_(2)          x is cut along dim 0: x is gathered, the row is a view of that, and after the product this
                          rank's piece of the whole is written into its piece of x
    w @ w.t()             the product of the gathered matrices, whole on every rank
    nn.init.normal_(w)    every rank draws for the whole tensor, and keeps what the first one drew

Collective, where an operand is cut or numbers are drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.adapters.operators import OpOverload, writes_to
from autopar.ops.traits import is_random, is_view
from autopar.runtime.fault.errors import explained
from autopar.runtime.params.scalar_tensor import ScalarTensor
from autopar.runtime.params.shard_views import ViewSource
from autopar.runtime.params.sharded_tensor import ShardedTensor, whole_tensor


def leaves(value: Any) -> list[Any]:
    """What is no list, tuple or dict, in order."""
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
    """The same lists, tuples and dicts of other leaves."""
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(item, fn) for item in value])
    if isinstance(value, dict):
        return {key: mapped(item, fn) for key, item in value.items()}
    return fn(value)


def on_whole(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of whole tensors. What it returns is whole; a view of an operand is one, and writes to it go to
    the operand."""
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
        """One that has come of tensors that are no numbers."""
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
    """What a view of it, or of its whole, is written back to."""
    return ViewSource.gathered(x) if x.is_apart else x.source


def _whole(x: Tensor, source: ViewSource | None) -> Tensor:
    if isinstance(x, ShardedTensor):
        return source.whole if source is not None and x.is_apart else x.fresh()
    return whole_tensor(x) if isinstance(x, DTensor) else x


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout == torch.strided else 0


def _of_first(x: Tensor, mesh: DeviceMesh) -> None:
    """What the first rank of the mesh holds, on all of them."""
    for axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(axis)
        if group.size() > 1:
            drawn = x.contiguous()  # a copy where it is a view
            with explained("sending numbers that were drawn", dist.get_process_group_ranks(group)):
                dist.broadcast(drawn.reshape(-1).view(torch.uint8), group=group, group_src=0)
            if drawn is not x:
                x.copy_(drawn)
