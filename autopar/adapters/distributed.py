"""Private parts of torch.distributed: the store of the default group, errors of backends, groups with asynchronous
errors."""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers their autograd; without it gradients are dropped silently
from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh


def _either(name: str, before: str) -> str:
    """The name of a collective: 2.13 renamed those of one tensor and warns about the old names."""
    return name if hasattr(dist, name) else before


ALL_GATHER = _either("all_gather_single", "all_gather_into_tensor")
REDUCE_SCATTER = _either("reduce_scatter_single", "reduce_scatter_tensor")


def all_gather_single(out: torch.Tensor, x: torch.Tensor, **how: Any) -> Any:
    """Gather ``x`` [n] of all ranks into ``out`` [ranks * n]."""
    return getattr(dist, ALL_GATHER)(out, x, **how)


def reduce_scatter_single(out: torch.Tensor, x: torch.Tensor, **how: Any) -> Any:
    """Sum ``x`` [ranks * n] over ranks and write this rank's shard to ``out`` [n]."""
    return getattr(dist, REDUCE_SCATTER)(out, x, **how)


def default_store() -> dist.Store:
    """The key-value store of the default process group."""
    return distributed_c10d._get_default_store()


def own_client(store: dist.Store) -> dist.Store:
    """A second connection to the same store: a blocking wait on one does not stop the other."""
    client: dist.Store = store.clone()  # type: ignore[attr-defined]
    return client


def root_store(store: dist.Store) -> dist.Store:
    """The store without its prefixes."""
    if isinstance(store, dist.PrefixStore):
        root: dist.Store = store._underlying_non_prefix_store  # type: ignore[attr-defined]
        return root
    return store


def store_host() -> str:
    """The host of the default group's store, as the subject of a sentence."""
    return "the launcher, which hosts the store," if hosted_by_launcher() else "rank 0, which hosts the store,"


def hosted_by_launcher() -> bool:
    """Whether torchrun or `autopar.launch` hosts the store; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_backend_error(error: BaseException) -> bool:
    """Whether a backend or the store failed because of other ranks. gloo has no error class for that."""
    words = r"gloo|nccl|Operation timed out|Connection (closed|reset) by peer|Socket Timeout"
    plain = type(error) is RuntimeError and re.search(words, str(error), re.IGNORECASE) is not None
    return isinstance(error, dist.DistError) or plain


def group_name(group: dist.ProcessGroup) -> str:
    """Name by which the functional collectives find a group."""
    return str(group.group_name)


def make_default_group(backend: str, store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> None:
    """Create the default process group; returns when all of its ranks are connected."""
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    _all_connected(distributed_c10d._get_default_group(), timeout)


def group_of_members(
    ranks: list[int],
    name: str,
    timeout: timedelta,
    description: str,
    kind: str | None = None,
    store: dist.Store | None = None,
) -> dist.ProcessGroup:
    """Create a process group by its members ``ranks`` alone, this process among them, with a unique name. ``kind``: its
    backend, such as "gloo"; None: that of the default group. ``store``: that of all members, if some are outside of the
    default group: they have numbers beyond its size, and the ranks of the group are in the order given.

    torch's `new_group` must be called by all ranks for every group, or, with only the members, derives the name from
    the number of groups that a rank has created. The group always gets a new communicator, even if the default group is
    bound to a device: splitting that would need all ranks, too.
    """
    world, default = distributed_c10d._world, distributed_c10d._get_default_group()
    ranks, device = sorted(ranks) if store is None else ranks, default.bound_device_id
    backend, own = world.pg_map[default]
    default.bound_device_id = None  # else torch splits the default group
    try:
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(default.rank()),
            ranks,
            distributed_c10d.Backend(kind or backend),
            own if store is None else store,
            distributed_c10d.GroupName(name),
            timeout=timeout,
            device_id=None if kind else device,
            group_desc=description,
        )
    finally:
        default.bound_device_id = device
    world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    made: dist.ProcessGroup = group
    _all_connected(made, timeout)
    return made


def gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo group beside the default one, of processes that share a store alone; returns when all are connected."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _all_connected(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Wait for all members of a new group, if they have connected: one that ends before breaks those still at it."""
    backend, store = distributed_c10d._world.pg_map[group]
    if "gloo" in backend:  # NCCL connects at the first collective
        distributed_c10d._store_based_barrier(group.rank(), store, group.group_name, group.size(), timeout)


def takes_host_tensors(group: dist.ProcessGroup) -> bool:
    """Whether a group has a backend for CPU tensors; Python backends do not say, and are assumed to."""
    return not group._device_types or torch.device("cpu") in group._device_types


def rank_table(mesh: DeviceMesh) -> torch.Tensor:
    """Global ranks in mesh layout."""
    return mesh.mesh


RAISING = ("gloo", "fake")  # backends that raise in wait, or never block


@dataclass(frozen=True)
class AsyncErrorGroup:
    """A process group whose ``wait`` does not raise when another rank fails, such as one of NCCL.

    ranks: its global ranks. backend: its backend.
    """

    ranks: list[int]
    backend: Any

    def broken(self) -> bool:
        """Whether its watchdog has seen an error: a lost peer, or a collective that timed out."""
        try:
            found = self.backend.get_error()
        except (AttributeError, RuntimeError):  # no watchdog, or a debug wrapper
            return False
        return bool(found != ErrorType.SUCCESS)

    def abort(self) -> None:
        """Abort: blocked collectives return with garbage, later ones raise."""
        self.backend.abort()


def quiet_groups() -> list[AsyncErrorGroup]:
    """All groups of this process with asynchronous errors. Another thread may destroy groups meanwhile."""
    world, found = distributed_c10d._world, []
    for group, config in list(world.pg_backend_config.items()):
        ranks = sorted(world.pg_group_ranks.get(group, ()))
        for device, name in (pair.split(":") for pair in str(config).split(",")):
            if name not in RAISING and ranks:
                with suppress(RuntimeError):
                    own = group._get_backend(torch.device(device)) if group._device_types else group  # a Python backend
                    found.append(AsyncErrorGroup(ranks, own))
    return found


def raise_in_thread(thread: int, kind: type[BaseException]) -> bool:
    """Raise ``kind()`` in a thread as soon as it runs Python again; False if there is no such thread."""
    return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind)))
