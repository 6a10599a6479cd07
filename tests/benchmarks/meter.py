"""What a step sends and holds, seen by one dispatch mode: the same for every library.

    with Meter() as meter:
        step()
    meter.sent, meter.calls, meter.peak

Bytes are those that one rank sends under ring algorithms, from the tensors given to each collective: all-reduce
2(n-1)/n, all-gather and reduce-scatter (n-1)/n of the whole, all-to-all (n-1)/n of a rank's piece, or what is for
other ranks where it says how much, a send the tensor.
Memory is the storage that tensors of dispatched operators hold; buffers that only C++ sees (those of gloo) are not.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PLAIN = (Tensor, torch.nn.Parameter)


# operator name -> (kind, which argument holds the whole tensors, all-reduces count twice)
COLLECTIVES = {
    "c10d::allreduce_": ("all_reduce", 0, 2),
    "c10d::allreduce_coalesced_": ("all_reduce", 0, 2),
    "c10d::_allgather_base_": ("all_gather", 0, 1),
    "c10d::allgather_": ("all_gather", 0, 1),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0, 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1, 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 1),
    "c10d::alltoall_base_": ("all_to_all", 0, 1),
    "c10d::alltoall_": ("all_to_all", 0, 1),
    "c10d::broadcast_": ("broadcast", 0, 1),
    "_c10d_functional::all_reduce": ("all_reduce", 0, 2),
    "_c10d_functional::all_reduce_": ("all_reduce", 0, 2),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0, 2),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None, 1),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", None, 1),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", None, 1),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0, 1),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0, 1),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0, 1),
}
QUIET = {"barrier", "wait_tensor", "_wrap_tensor_autograd", "monitored_barrier_", "recv_"}  # send nothing


class Meter(TorchDispatchMode):
    """Counts collectives and live storages while it is active. ``alive``: tensors that exist already (parameters).
    ``elsewhere``: says which lie in another memory, and do not count."""

    def __init__(self, alive: Any = (), elsewhere: Callable[[Tensor], bool] = lambda x: False) -> None:
        super().__init__()
        self._elsewhere = elsewhere
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._see(alive)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t not in PLAIN and issubclass(t, Tensor) for t in types):
            return NotImplemented  # a subclass first lowers itself to plain tensors; those come back here
        out = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and name not in QUIET:
            self._count(func._schema.name, args, out)
        self._see((args, kwargs, out))
        self.peak = max(self.peak, self.live())
        return out

    def _count(self, name: str, args: Any, out: Any) -> None:
        if name == "c10d::send":
            self.calls["send"] += 1
            self.sent["send"] += _bytes_in(args[0])
            return
        if (rows := _rows_that_leave(name, args)) is not None:
            self.calls["all_to_all_rows"] += 1
            self.sent["all_to_all_rows"] += rows
            return
        kind, position, times = COLLECTIVES[name]  # an operator that is not here must not pass unseen
        size, ranks = _bytes_in(out if position is None else args[position]), _ranks_of(args)
        self.calls[kind] += 1
        self.sent[kind] += times * size * (ranks - 1) // ranks

    def live(self) -> int:
        """Bytes of the storages seen so far that still exist, at their present sizes (FSDP resizes them)."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def _see(self, values: Any) -> None:
        for tensor in _plain(values):
            storage = tensor.untyped_storage()
            if storage.device.type != "meta" and not self._elsewhere(tensor):
                self._storages[id(storage)] = weakref.ref(storage)


def _rows_that_leave(name: str, args: Any) -> int | None:
    """Bytes of the rows for other ranks, of an exchange (over all ranks) that says how many are for whom; else None."""
    given = {"c10d::alltoall_base_": (1, 4), "_c10d_functional::all_to_all_single": (0, 2)}.get(name)
    if given is None or not args[given[1]]:
        return None
    (x,), splits = _plain(args[given[0]]), args[given[1]]
    return (sum(splits) - splits[dist.get_rank()]) * x[:0].shape[1:].numel() * x.element_size()


def _bytes_in(values: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(values) if isinstance(t, Tensor))


def _plain(values: Any) -> Iterator[Tensor]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor):
            # inside DTensor and AsyncCollectiveTensor
            yield getattr(value, "_local_tensor", getattr(value, "elem", value))


def _ranks_of(args: Any) -> int:
    """How many ranks take part: those of the group among the arguments."""
    for x in args:
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
            return int(dist.ProcessGroup.unbox(x).size())
        if isinstance(x, str) and x in dist.distributed_c10d._world.pg_names.values():
            return int(dist.distributed_c10d._resolve_process_group(x).size())
    return dist.get_world_size()
