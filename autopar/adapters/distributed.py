"""What torch.distributed keeps private and the runtime needs: the default group's store, the errors of backends, the
groups that do not raise them."""

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
    """The name that torch.distributed knows a collective by: 2.13 gave those of one tensor new names, of which 2.12
    knows only the old; later ones warn of these."""
    return name if hasattr(dist, name) else before


ALL_GATHER = _either("all_gather_single", "all_gather_into_tensor")
REDUCE_SCATTER = _either("reduce_scatter_single", "reduce_scatter_tensor")


def all_gather_single(out: torch.Tensor, x: torch.Tensor, **how: Any) -> Any:
    """``out`` [ranks * n] of what each rank has as ``x`` [n]."""
    return getattr(dist, ALL_GATHER)(out, x, **how)


def reduce_scatter_single(out: torch.Tensor, x: torch.Tensor, **how: Any) -> Any:
    """``out`` [n], this rank's piece of the sum over the ranks of ``x`` [ranks * n]."""
    return getattr(dist, REDUCE_SCATTER)(out, x, **how)


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


def group_of_members(ranks: list[int], name: str, timeout: timedelta, description: str) -> dist.ProcessGroup:
    """A process group that only ``ranks`` make, this process among them, under a name that nobody else has.

    torch's `new_group` is for all ranks of the world to call, for each group of anybody; its way to let only the
    members call it names a group by how many a rank has made so far. A communicator of its own even where the default
    group is bound to a device: a split of that one would need all ranks, too.
    """
    world, default = distributed_c10d._world, distributed_c10d._get_default_group()
    ranks, device = sorted(ranks), default.bound_device_id
    backend, store = world.pg_map[default]
    default.bound_device_id = None  # else the group is split off
    try:
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(default.rank()),
            ranks,
            distributed_c10d.Backend(backend),
            store,
            distributed_c10d.GroupName(name),
            timeout=timeout,
            device_id=device,
            group_desc=description,
        )
    finally:
        default.bound_device_id = device
    world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    made: dist.ProcessGroup = group
    return made


def takes_host_tensors(group: dist.ProcessGroup) -> bool:
    """Whether a group has a backend for tensors of the host; one that is written in Python says nothing, and has."""
    return not group._device_types or torch.device("cpu") in group._device_types


def rank_table(mesh: DeviceMesh) -> torch.Tensor:
    """Global ranks in mesh layout."""
    return mesh.mesh


RAISING = ("gloo", "fake")  # backends whose waits raise by themselves, or never wait


@dataclass(frozen=True)
class AsyncErrorGroup:
    """A process group whose work does not raise in ``wait`` when another rank is gone, such as one of NCCL.

    ranks: its global ranks. backend: what its work runs on.
    """

    ranks: list[int]
    backend: Any

    def broken(self) -> bool:
        """Whether its watchdog has seen an error: a peer that is gone, or a collective beyond its timeout."""
        try:
            found = self.backend.get_error()
        except (AttributeError, RuntimeError):  # it has no watchdog, or is wrapped for debugging
            return False
        return bool(found != ErrorType.SUCCESS)

    def abort(self) -> None:
        """What waits in it goes on, with values that mean nothing; what is started later raises."""
        self.backend.abort()


def quiet_groups() -> list[AsyncErrorGroup]:
    """Those of this process. Groups may be destroyed meanwhile, in another thread."""
    world, found = distributed_c10d._world, []
    for group, config in list(world.pg_backend_config.items()):
        ranks = sorted(world.pg_group_ranks.get(group, ()))
        for device, name in (pair.split(":") for pair in str(config).split(",")):
            if name not in RAISING and ranks:
                with suppress(RuntimeError):
                    own = group._get_backend(torch.device(device)) if group._device_types else group  # one in Python
                    found.append(AsyncErrorGroup(ranks, own))
    return found


def raise_in_thread(thread: int, kind: type[BaseException]) -> bool:
    """Raise ``kind()`` in a thread as soon as it runs Python again; False if there is no such thread."""
    return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind)))
