"""DTensor's constructor and its layout record, which torch keeps private."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement


def layout_record(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """A record of mesh, placements and the whole tensor's shape (contiguous strides)."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(reversed(stride)), dtype))


def record_of(x: DTensor) -> DTensorSpec:
    """Mesh, placements, shape and strides of a DTensor."""
    return x._spec


def local_of(x: DTensor) -> Tensor:
    """The local tensor itself, without a view and without autograd."""
    return x._local_tensor


def alike(local: Tensor, x: DTensor) -> DTensor:
    """A DTensor over ``local`` with the very layout record of ``x``: of a gradient, made at every step."""
    out: DTensor = DTensor.__new__(DTensor, local, x._spec, requires_grad=False)
    return out


def over(local: Tensor, x: DTensor) -> DTensor:
    """A DTensor over ``local``, on whatever device that lies, laid out as ``x``."""
    record = layout_record(x.device_mesh, tuple(x.placements), x.shape, local.dtype)
    out: DTensor = DTensor.__new__(DTensor, local, record, requires_grad=False)
    return out


def has_record_of(x: Tensor, other: Tensor) -> bool:
    """Whether two DTensors have the very same layout record. False says nothing."""
    return isinstance(x, DTensor) and isinstance(other, DTensor) and x._spec is other._spec


def storage_of(x: Tensor) -> int:
    """A number for the storage that torch's core holds of a tensor; that of a DTensor is none of its piece's."""
    number: int = torch._C._storage_id(x)  # type: ignore[attr-defined]
    return number
