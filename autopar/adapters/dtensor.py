"""DTensor's constructor and its layout record, which torch keeps private."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils._mode_utils import no_dispatch

D = TypeVar("D", bound=DTensor)


def layout_record(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, local: Tensor) -> DTensorSpec:
    """A record of mesh, placements and the whole tensor's shape, with the dims in the order that the piece has them in
    its memory."""
    if not any(p.is_shard() for p in placements):
        return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, local.stride(), local.dtype))
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (local.stride(d), -d)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(stride), local.dtype))


def record_of(x: DTensor) -> DTensorSpec:
    """Mesh, placements, shape and strides of a DTensor."""
    return x._spec


def local_of(x: DTensor) -> Tensor:
    """The local tensor itself, without a view and without autograd."""
    return x._local_tensor


def made_as(kind: type[D], local: Tensor, record: DTensorSpec) -> D:
    """A DTensor of a subclass over ``local``, without a check."""
    out = DTensor.__new__(kind, local, record, requires_grad=False)
    return cast(D, out)


def put_local(x: DTensor, local: Tensor) -> None:
    """Let a DTensor lie over another local tensor, of the same shape and dtype."""
    x._local_tensor = local


def reform(x: DTensor, func: Any, how: Sequence[Any], view: DTensor) -> None:
    """Give a DTensor in place the shape that an operator such as ``squeeze_`` gives it: that of ``view``, over whose
    local tensor it lies from now on."""
    with no_dispatch():
        func(x, *how)
    x._local_tensor, x._spec = view._local_tensor, view._spec


def storage_of(x: Tensor) -> int:
    """A number for the storage that torch's core holds of a tensor; that of a DTensor is none of its piece's."""
    number: int = torch._C._storage_id(x)  # type: ignore[attr-defined]
    return number
