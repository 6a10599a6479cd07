"""Several tp ranks in one process: each runs `choose` on its columns, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.serving.choice import choose
from autopar.serving.step import Chosen, RowChoice


@dataclass
class Meeting:
    """What ranks bring to a collective."""

    size: int
    tensors: dict[int, Tensor] = field(default_factory=dict)
    calls: int = 0
    numbers: int = 0  # exchanged by each rank

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)


@dataclass
class OneOfSeveral:
    rank: int
    vocab: int
    meeting: Meeting

    @property
    def size(self) -> int:
        return self.meeting.size

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.meeting.tensors[self.rank] = tensor
        self.meeting.barrier.wait()
        found = [self.meeting.tensors[rank] for rank in range(self.size)]
        assert len({part.shape for part in found}) == 1, "collectives take equal shapes"
        if self.rank == 0:
            self.meeting.calls += 1
            self.meeting.numbers += tensor.numel()
        self.meeting.barrier.wait()
        return found


def columns_of(logits: Tensor, size: int, padded: bool) -> list[Tensor]:
    """Equal shards of the padded vocabulary (padding is large, to be noticed), or those of `torch.chunk`."""
    vocab = logits.shape[1]
    width = -(-vocab // size)
    if padded:
        logits = torch.nn.functional.pad(logits, (0, width * size - vocab), value=1e9)
    return [logits[:, rank * width : (rank + 1) * width] for rank in range(size)]


def choose_sharded(
    logits: Tensor, choices: Sequence[RowChoice], size: int, padded: bool = True
) -> tuple[list[list[Chosen]], Meeting]:
    """What each rank chose."""
    meeting = Meeting(size)
    shards = columns_of(logits, size, padded)
    with ThreadPoolExecutor(size) as pool:
        ranks = [
            pool.submit(choose, shard, choices, OneOfSeveral(rank, logits.shape[1], meeting))
            for rank, shard in enumerate(shards)
        ]
        return [rank.result() for rank in ranks], meeting
