"""What `torch.distributed.checkpoint` writes and reads of a tensor: each run of consecutive positions is one chunk."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from autopar.adapters.dtensor import no_torch_function
from autopar.runtime.params.shards import ShardRange


class InChunks:
    """A tensor that answers torch's planners by its `chunks`."""

    @abstractmethod
    def chunks(self) -> Sequence[ShardRange]:
        """What this rank holds, as boxes of the global tensor."""

    @abstractmethod
    def held(self) -> Tensor:
        """This rank's shard."""

    @abstractmethod
    def global_shape(self) -> torch.Size:
        """Of the tensor on all ranks."""

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties, shape = TensorProperties.create_from_tensor(self.held()), self.global_shape()
        return [
            WriteItem(MetadataIndex(fqn, c.offsets), WriteItemType.SHARD, None, TensorWriteData(c, properties, shape))
            for c in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)) for box in self.chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box in self.chunks():
            if torch.Size(box.start) == index.offset:
                return box.of_local(self.held())
        shape = tuple(self.global_shape())
        raise ValueError(f"a tensor of shape {shape}: no chunk at {index.offset} of {index.fqn} on this rank")


class StagedShard(InChunks, Tensor):
    """A copy of a shard, which is written while the training goes on; made by torch's `async_save`. It can be pickled
    without its mesh, for a process that writes."""

    boxes: Sequence[ShardRange]
    shape_of_all: torch.Size
    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def make(x: InChunks, local: Tensor) -> StagedShard:
        """``local``: a copy of what ``x`` holds."""
        out = local.as_subclass(StagedShard)
        out.boxes, out.shape_of_all = x.chunks(), x.global_shape()
        return out

    def chunks(self) -> Sequence[ShardRange]:
        return self.boxes

    def held(self) -> Tensor:
        return self.as_subclass(Tensor)

    def global_shape(self) -> torch.Size:
        return self.shape_of_all
