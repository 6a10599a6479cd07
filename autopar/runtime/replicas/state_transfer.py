"""The state of a run from one replica to another: each rank gives what it holds to the same rank of the other.

    head       JSON: what `autopar.save` writes into a manifest, and shape and dtype of each tensor
    tensors    the rank's shards, one after another

All of it arrives in host memory before anything is put in place, so a giver that is lost meanwhile leaves no trace.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.runtime.checkpoint.json_tree import dtype_called
from autopar.runtime.mesh.host_copies import host_copies_arrived
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.params.dtensor_layout import as_local
from autopar.runtime.replicas.replica_group import ReplicaGroup
from autopar.runtime.training.async_save import joined
from autopar.runtime.training.load import Loading, put_in_place
from autopar.runtime.training.save import parts_of_run


class ReceivedTensors:
    """This rank's shards of the tensors of another replica, by key: what `Loading` needs of a checkpoint's tensors."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], local: Mapping[str, Tensor], name: str) -> None:
        self.folder = name
        self.shapes = {key: tuple(shape) for key, shape in shapes.items()}
        self.dtypes = {key: x.dtype for key, x in local.items()}
        self._local = local

    def __contains__(self, key: str) -> bool:
        return key in self._local

    def under(self, *prefixes: str) -> list[str]:
        return [key for key in self._local if key.startswith(prefixes)]

    def check(self, keys: Iterable[str]) -> None:
        """They are all here."""

    def check_data(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """They have not been on a disk."""

    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        for key, x in targets:
            as_local(x).detach().copy_(self._local[key])

    def tensor(self, key: str) -> Tensor:
        return self._local[key].clone()


@torch.no_grad()
def give_state(
    group: ReplicaGroup,
    to: Sequence[int],
    model: ParallelModule,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    extra: Mapping[str, Any],
) -> None:
    """Send this rank's state to the same rank of the replicas ``to``. Raises MemberLost."""
    host_copies_arrived()
    held = model.held()
    found = parts_of_run(held, optimizers, schedulers, held.training_steps, extra)
    found.add_extra(None, writes=False)
    told = {"of_stage": found.of_stage, "extra": {"part": None, "tree": found.extra}}
    local = {entry.key: as_local(entry.tensor).detach() for entry in found.entries}
    tensors = [
        [entry.key, str(entry.tensor.dtype).removeprefix("torch."), list(entry.tensor.shape), list(x.shape)]
        for entry, x in zip(found.entries, local.values(), strict=True)
    ]
    manifest = {**joined([told], found.common), "run": held.line.name}
    text = json.dumps({"manifest": manifest, "tensors": tensors}).encode()
    for index in to:
        group.send(torch.tensor([len(text)]), index)
        group.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), index)
        for x in local.values():
            group.send(_bytes(x.cpu().contiguous()), index)


def receive_state(group: ReplicaGroup, giver: int) -> tuple[dict[str, Any], ReceivedTensors]:
    """(the manifest, the tensors) of the same rank of another replica. Raises MemberLost."""
    size = torch.zeros(1, dtype=torch.int64)
    group.receive(size, giver)
    head = torch.empty(int(size), dtype=torch.uint8)
    group.receive(head, giver)
    told, local, shapes = json.loads(head.numpy().tobytes()), {}, {}
    for key, dtype, shape, sizes in told["tensors"]:
        local[key] = x = torch.empty(sizes, dtype=dtype_called(dtype))
        shapes[key] = shape
        group.receive(_bytes(x), giver)
    return told["manifest"], ReceivedTensors(shapes, local, f"the state of replica {giver}")


def take_state(
    received: tuple[dict[str, Any], ReceivedTensors],
    model: ParallelModule,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    extra: Mapping[str, Any],
) -> None:
    """Put a received state in place. Collective within the replica."""
    manifest, tensors = received
    with torch.inference_mode(False), torch.no_grad():
        make = lambda: Loading(tensors.folder, manifest, tensors, model.held(), optimizers, schedulers, extra)  # noqa: E731
        model.held().line.name = put_in_place(model, optimizers, make).run


def _bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return x.view(-1).view(torch.uint8) if math.prod(x.shape) else x.new_empty(0, dtype=torch.uint8)
