"""Which device a rank computes on.

    device=None     that of the default process group, if there is one; else cuda where torch sees a GPU
    "cuda"          the GPU that the group is bound to (device_id=), else the one that the user has set
                    (torch.cuda.set_device), else the rank's own: LOCAL_RANK among the visible ones

A rank that sees one GPU (one per task, a MIG slice) takes it whatever its number. Ranks on the same GPU are an error
before NCCL is asked, which cannot connect them unless NCCL_MULTI_RANK_GPU_ENABLE=1 says that it shall (NCCL 2.32 can).
"""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from autopar.adapters.distributed import default_store
from autopar.runtime.fault.errors import board
from autopar.runtime.fault.store_barrier import Round, Rounds, meet

RANKS_SHARE_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL's own variable

_shared: WeakKeyDictionary[dist.Store, str] = WeakKeyDictionary()  # what is wrong with the GPUs, by store


def choose_device(device: str | torch.device | None) -> torch.device:
    """This rank's device. A GPU becomes torch's current one; an index that is given does first, as if the user had set
    it. Raises ValueError for what is neither cpu nor a cuda that is there and that the default group can use."""
    kind = _kind_of(device)
    if kind == "cpu":
        return torch.device("cpu")
    given = torch.device(device).index if device is not None else None
    if given is not None:
        torch.cuda.set_device(given)
    chosen = _own_gpu()
    torch.cuda.set_device(chosen)
    return torch.device("cuda", chosen)


def _kind_of(device: str | torch.device | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() and _backend("cuda") not in ("gloo", "none") else "cpu"
    if not isinstance(device, (str, torch.device)):
        raise ValueError(
            f'init_mesh: needs the device first and the axes by name, found {device!r}; write init_mesh("cpu", dp=2)'
        )
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        raise ValueError(f"init_mesh: expected the device 'cpu' or 'cuda', found {str(device)!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("init_mesh: the device 'cuda' needs a GPU that torch sees, found none; use 'cpu'")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"init_mesh: {str(device)!r} needs {int(index) + 1} GPUs, torch sees {torch.cuda.device_count()}; "
            "use 'cuda', which takes the rank's own"
        )
    if _backend(kind) == "none" or (kind == "cuda" and _backend(kind) == "gloo"):
        raise ValueError(
            f"init_mesh: the device {kind!r} needs a process group with {'nccl' if kind == 'cuda' else 'gloo'}, found "
            f"{dist.get_backend_config()}; make it with init_process_group('cpu:gloo,cuda:nccl'), or let init_mesh do "
            "so"
        )
    return kind


def _backend(kind: str) -> str:
    """What the default process group uses for tensors on a kind of device; "any" while there is no group."""
    if not dist.is_initialized():
        return "any"
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
    return {device: backend for device, _, backend in pairs}.get(kind, "none")


def _own_gpu() -> int:
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None and bound.type == "cuda" and bound.index is not None:
        return int(bound.index)
    current = torch.cuda.current_device()
    rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK")
    local = os.environ.get("LOCAL_RANK", rank)
    if current or local is None:
        return current
    return int(local) % torch.cuda.device_count()


def check_devices(device: torch.device, limit: float) -> None:
    """Check that every rank has its own GPU, unless NCCL is configured to connect ranks on one GPU. Collective over the
    world, in one exchange.

    Raises ValueError, the same on all ranks, that names ranks on one GPU; CollectiveError for missing ranks.
    """
    world, store = dist.get_world_size(), default_store()
    if device.type != "cuda" or world == 1 or os.environ.get(RANKS_SHARE_GPUS, "0") == "1":
        return
    if store not in _shared:
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        _shared[store] = _find_shared(gpu, torch.cuda.device_count(), dist.get_rank(), world, limit)
    if _shared[store]:
        raise ValueError(_shared[store])


def _find_shared(gpu: str, seen: int, rank: int, world: int, limit: float) -> str:
    """What is wrong if ranks share a GPU, in the same words on all of them. Who comes to a GPU as the second one writes
    that down before all meet; a rank asks as many questions of many ranks as of two."""
    key, shared = f"autopar/devices/{gpu}", "autopar/devices/shared"

    def take(store: dist.Store) -> int:
        before = store.add(key, 1) - 1
        store.set(f"{key}/{before}", str(rank))
        if before:
            store.compare_set(shared, "", f"{gpu}\n{seen}")
        return before

    others = board().line.ask(take)
    digest = "on a GPU with others" if others else "alone"  # of several on one GPU the first is alone
    round_ = Round("autopar/devices", Rounds(), rank, range(world), digest, {})
    if meet(round_, range(world), "the devices", limit, None):
        return ""

    def find(store: dist.Store) -> str:
        gpu, seen = store.get(shared).decode().split("\n")
        key = f"autopar/devices/{gpu}"
        ranks = sorted(int(store.get(f"{key}/{i}")) for i in range(store.add(key, 0)))
        return (
            f"init_mesh: each rank needs a GPU of its own, found ranks {', '.join(map(str, ranks))} on one ({gpu}; "
            f"torch sees {seen}); start as many ranks on a machine as it has GPUs, use the device 'cpu', or, to try "
            f"things out with a NCCL that can connect them, set {RANKS_SHARE_GPUS}=1"
        )

    return board().line.ask(find)
