"""DTensor's private constructor and spec, and how torch parametrizes and stages DTensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as LayoutRecord
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn.utils import parametrize
from torch.utils._mode_utils import no_dispatch

__all__ = [
    "LayoutRecord",
    "as_plain",
    "have_gradients",
    "layout_record",
    "local_of",
    "made_as",
    "no_torch_function",
    "parametrize_by_data",
    "put_local",
    "record_of",
    "reform",
    "stage_shards",
    "storage_of",
]

no_torch_function = torch._C._disabled_torch_function_impl  # for a subclass whose results are plain tensors
as_plain = torch._C.DisableTorchFunctionSubclass  # halves the time to read an attribute of a subclass


def layout_record(
    mesh: DeviceMesh, dims: tuple[int | None, ...], shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype
) -> LayoutRecord:
    """The spec of a tensor with a global shape. ``dims``: the dim that each mesh axis shards, or None. ``strides``: of
    the local shard; global strides get the same order of dims."""
    placements = tuple(Replicate() if d is None else Shard(d) for d in dims)
    if any(d is not None for d in dims):
        step, found = 1, [0] * len(shape)
        for dim in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
            found[dim] = step
            step *= max(shape[dim], 1)
        strides = tuple(found)
    return LayoutRecord(mesh, placements, tensor_meta=TensorMeta(shape, strides, dtype))


# mesh, placements, shape and strides of a DTensor
record_of: Callable[[DTensor], LayoutRecord] = operator.attrgetter("_spec")

# the local tensor, without a view and without autograd
local_of: Callable[[DTensor], Tensor] = operator.attrgetter("_local_tensor")

# a DTensor subclass from a local tensor and a spec, without checks
made_as: Callable[[Any, Tensor, LayoutRecord], Any] = functools.partial(DTensor.__new__, requires_grad=False)


def have_gradients(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether ``.grad`` of each tensor is set."""
    of: Any = Tensor.grad  # the descriptor
    with as_plain():
        return [x is not None for x in map(of.__get__, tensors)]


def put_local(x: DTensor, local: Tensor) -> None:
    """Replace the local tensor of a DTensor by one of the same shape and dtype."""
    x._local_tensor = local


def reform(x: DTensor, func: Any, how: Sequence[Any], view: DTensor) -> None:
    """Apply an in-place shape operator such as ``squeeze_`` to a DTensor: it gets the shape and local tensor of
    ``view``."""
    with no_dispatch():
        func(x, *how)
    x._local_tensor, x._spec = view._local_tensor, view._spec


def parametrize_by_data(kind: type[DTensor]) -> None:
    """Make `torch.nn.utils.parametrize` set ``.data`` of parameters of this class on assignment. By default it swaps
    tensors, which needs two of the same class."""
    put: Any = parametrize._maybe_set

    def put_data(dest: Tensor, src: Tensor) -> None:
        if isinstance(dest, kind):
            dest.data = src
        else:
            put(dest, src)

    setattr(parametrize, put.__name__, put_data)


def stage_shards(kind: type[DTensor], staged: Callable[[Any, Tensor], Tensor]) -> None:
    """Make torch's `async_save` copy the local tensor of DTensors of this class, and write ``staged(x, copy)`` in the
    place of x. By itself it rebuilds such a tensor over its storage as if that held the global one, pickles the mesh
    for a process that writes, and takes tensors without dims as they are: what is written may be a later value."""
    offload: Any = StateDictStager._offload_tensor
    stage: Any = BlockingAsyncStager.stage

    def offload_shard(self: Any, x: Tensor, memo: dict[int, Any], non_blocking: bool = False) -> Tensor:
        if isinstance(x, kind):
            return staged(x, offload(self, x._local_tensor, memo, non_blocking))
        out: Tensor = offload(self, x, memo, non_blocking)
        return out

    def stage_at_once(self: Any, state: dict[str, Any]) -> Any:
        return _with_copied_scalars(stage(self, state), kind)

    setattr(StateDictStager, offload.__name__, offload_shard)
    setattr(BlockingAsyncStager, stage.__name__, stage_at_once)


def _with_copied_scalars(state: Any, kind: type[DTensor]) -> Any:
    if isinstance(state, kind):
        return state if state.dim() else state.detach().clone()
    if isinstance(state, dict):
        return {name: _with_copied_scalars(x, kind) for name, x in state.items()}
    if isinstance(state, (list, tuple)):
        found = [_with_copied_scalars(x, kind) for x in state]
        return found if isinstance(state, list) else tuple(found)
    return state


def storage_of(x: Tensor) -> int:
    """An id of a tensor's storage; that of a DTensor is not that of its local tensor."""
    number: int = torch._C._storage_id(x)  # type: ignore[attr-defined]
    return number
