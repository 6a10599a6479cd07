"""DTensor's constructor and its layout record, which torch keeps private."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
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
    "storage_of",
]

no_torch_function = torch._C._disabled_torch_function_impl  # of a subclass whose results are plain tensors
as_plain = torch._C.DisableTorchFunctionSubclass  # within: reading an attribute of a subclass takes half as long


def layout_record(
    mesh: DeviceMesh, dims: tuple[int | None, ...], shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype
) -> LayoutRecord:
    """A record of a tensor of a (whole) shape, of which each axis of the mesh cuts a dim or none. ``strides``: of the
    piece; those of the whole tensor have its dims in the same order."""
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

# the local tensor itself, without a view and without autograd
local_of: Callable[[DTensor], Tensor] = operator.attrgetter("_local_tensor")

# a DTensor of a subclass over a local tensor, of a record, without a check
made_as: Callable[[Any, Tensor, LayoutRecord], Any] = functools.partial(DTensor.__new__, requires_grad=False)


def have_gradients(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether ``.grad`` of each is set, however that lies."""
    of: Any = Tensor.grad  # the descriptor
    with as_plain():
        return [x is not None for x in map(of.__get__, tensors)]


def put_local(x: DTensor, local: Tensor) -> None:
    """Let a DTensor lie over another local tensor, of the same shape and dtype."""
    x._local_tensor = local


def reform(x: DTensor, func: Any, how: Sequence[Any], view: DTensor) -> None:
    """Give a DTensor in place the shape that an operator such as ``squeeze_`` gives it: that of ``view``, over whose
    local tensor it lies from now on."""
    with no_dispatch():
        func(x, *how)
    x._local_tensor, x._spec = view._local_tensor, view._spec


def parametrize_by_data(kind: type[DTensor]) -> None:
    """From now on `torch.nn.utils.parametrize` sets ``.data`` of parameters of this class where somebody assigns to
    what is parametrized. It would swap them with another tensor, which has to be of the same class."""
    put: Any = parametrize._maybe_set

    def put_data(dest: Tensor, src: Tensor) -> None:
        if isinstance(dest, kind):
            dest.data = src
        else:
            put(dest, src)

    setattr(parametrize, put.__name__, put_data)


def storage_of(x: Tensor) -> int:
    """A number for the storage that torch's core holds of a tensor; that of a DTensor is none of its piece's."""
    number: int = torch._C._storage_id(x)  # type: ignore[attr-defined]
    return number
