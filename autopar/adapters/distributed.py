"""What torch.distributed keeps private and the runtime needs: the store behind the default group."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers their autograd; without it gradients are dropped silently
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh


def default_store() -> dist.Store:
    """The key-value store with which the default process group was made."""
    return distributed_c10d._get_default_store()


def own_client(store: dist.Store) -> dist.Store:
    """A second connection to the same store: a blocking wait on one does not stop the other."""
    client: dist.Store = store.clone()  # type: ignore[attr-defined]
    return client


def group_name(group: dist.ProcessGroup) -> str:
    """Name by which the functional collectives find a group."""
    return str(group.group_name)


def rank_table(mesh: DeviceMesh) -> torch.Tensor:
    """Global ranks in mesh layout."""
    return mesh.mesh
