"""What torch.distributed keeps private and the runtime needs: the default group's store, the errors of backends."""

from __future__ import annotations

import os
import re

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


def root_store(store: dist.Store) -> dist.Store:
    """The store itself, behind all prefixes."""
    if isinstance(store, dist.PrefixStore):
        root: dist.Store = store._underlying_non_prefix_store  # type: ignore[attr-defined]
        return root
    return store


def store_host() -> str:
    """Who hosts the store of the default group, as the subject of a sentence."""
    return "the launcher, which hosts the store," if hosted_by_launcher() else "rank 0, which hosts the store,"


def hosted_by_launcher() -> bool:
    """Whether torchrun or `autopar.launch` hosts the store; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_backend_error(error: BaseException) -> bool:
    """Whether a backend, or the store, gave up on other ranks. gloo has no class of its own for that."""
    words = r"gloo|nccl|Operation timed out|Connection (closed|reset) by peer|Socket Timeout"
    plain = type(error) is RuntimeError and re.search(words, str(error), re.IGNORECASE) is not None
    return isinstance(error, dist.DistError) or plain


def group_name(group: dist.ProcessGroup) -> str:
    """Name by which the functional collectives find a group."""
    return str(group.group_name)


def rank_table(mesh: DeviceMesh) -> torch.Tensor:
    """Global ranks in mesh layout."""
    return mesh.mesh
