"""The examples of a data set that each rank reads, their order, and the position at which a resumed run continues.

    data = autopar.sampler(dataset, mesh, batch_size=32)            32 examples per global batch, over all dp ranks
    loader = data.loader(collate_fn=..., num_workers=4)             a DataLoader of this rank's shard of each batch
    for batch in loader: ...                                        one epoch
    autopar.save(folder, model, optimizer, extra={"data": data})    load(...) continues with the next batch

    batch 0    rows 5 3 | 8 1 | 0 7 | 2 6        shard 0 | shard 1 | shard 2 | shard 3

The concatenated shards are the batch that one process reads: the order does not depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset

from autopar.runtime.mesh.process_groups import dp_rank_and_size
from autopar.values import whole_number, yes_or_no

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


class ShardSampler:
    """A batch sampler for `torch.utils.data.DataLoader`: yields lists of indices, this rank's shard of each batch.

    An iteration is an epoch, or the rest of one. epoch, batch: the position of the next batch. The `loader` counts the
    batches that the loop has received, no matter how many its workers have prefetched.
    """

    def __init__(
        self, dataset: Any, part: tuple[int, int], batch_size: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self._dataset, self._rows = dataset, len(dataset)
        self._part, self._parts = part
        self._size, self._shuffle, self._seed, self._drop = batch_size, shuffle, seed, drop_last
        self.epoch = self.batch = 0

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return self._rows // self._size if self._drop else -(-self._rows // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of the epoch. Does not move on by itself: `loader` does, as batches are handed out."""
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._rows, generator=generator).tolist()
        else:
            order = list(range(self._rows))
        for batch in range(self.batch, len(self)):
            whole = order[batch * self._size : (batch + 1) * self._size]
            share = len(whole) // self._parts
            yield whole[self._part * share : (self._part + 1) * share]

    def loader(self, **how: Any) -> Loader:
        """A DataLoader over this rank's shards; ``how``: its other arguments (collate_fn, num_workers, ...)."""
        if taken := [name for name in _OURS if name in how]:
            raise ValueError(
                f"loader: {taken[0]} is set by the sampler, found {how[taken[0]]!r}; pass batch_size (of the global "
                "batch), shuffle and drop_last to autopar.sampler"
            )
        return Loader(self, DataLoader(self._dataset, batch_sampler=self, **how))

    def resume(self, batches: int) -> None:
        """Continue after ``batches`` batches of a run, counted over all its epochs."""
        self.epoch, self.batch = divmod(whole_number("batches", batches), len(self))

    def state_dict(self) -> dict[str, int]:
        """The current position. The same on every rank and for every mesh."""
        known = {"rows": self._rows, "batch_size": self._size, "seed": self._seed, "shuffle": int(self._shuffle)}
        return {"epoch": self.epoch, "batch": self.batch, **known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position. Raises ValueError for the state of another order."""
        for name, mine in self.state_dict().items():
            if name not in ("epoch", "batch") and int(state[name]) != mine:
                raise ValueError(
                    f"sampler: needs the state of the same order, found {name}={int(state[name])} where this one has "
                    f"{mine}; create it with the same data set, batch_size, shuffle and seed"
                )
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])

    def handed_out(self) -> None:
        """Count a batch that the loop has received."""
        self.batch += 1
        if self.batch >= len(self):
            self.epoch, self.batch = self.epoch + 1, 0


class Loader:
    """Epochs of a DataLoader; its sampler counts the batches that the loop has received."""

    def __init__(self, sampler: ShardSampler, loader: DataLoader[Any]) -> None:
        self.sampler, self.dataloader = sampler, loader

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.dataloader:
            self.sampler.handed_out()
            yield batch


def sampler(
    dataset: Any, mesh: DeviceMesh, *, batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = True
) -> ShardSampler:
    """Create a batch sampler for a data set with a length, of torch or of Hugging Face's datasets.

    Args:
        mesh: ranks that differ only in tp, cp or pp read the same examples; see `autopar.dp_rank_and_size`.
        batch_size: examples of a global batch, over all data-parallel ranks.
        shuffle: a new order in every epoch, from ``seed``; the same on all ranks and meshes.
        drop_last: leave out the examples that do not fill a batch; otherwise the last batch is smaller.

    Raises ValueError for data sets without a length, and for sizes that do not divide by the number of data-parallel
    ranks.
    """
    part, parts = dp_rank_and_size(mesh)
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"sampler: needs a data set with a length and indices, found a {type(dataset).__name__}; of a stream take "
            f"this rank's shard: itertools.islice(stream, {part}, None, {parts}), or split_dataset_by_node(stream, "
            f"rank={part}, world_size={parts}) of datasets"
        )
    size, rows = whole_number("batch_size", batch_size, 1), len(dataset)
    if size % parts:
        raise ValueError(
            f"sampler: batch_size {size} does not divide by {parts} data-parallel ranks; use "
            f"{size // parts * parts or parts} or {(size // parts + 1) * parts}"
        )
    if not yes_or_no("drop_last", drop_last) and rows % size % parts:
        raise ValueError(
            f"sampler: the last batch has {rows % size} rows, which do not divide by {parts} data-parallel ranks; "
            "leave it out with drop_last=True, or pad the data set"
        )
    if rows < (size if drop_last else 1):
        raise ValueError(f"sampler: the data set has {rows} rows, fewer than batch_size {size}; choose a smaller one")
    return ShardSampler(
        dataset, (part, parts), size, yes_or_no("shuffle", shuffle), whole_number("seed", seed), drop_last
    )
