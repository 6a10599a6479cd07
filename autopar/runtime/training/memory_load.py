"""A load from host memory: which generation is complete, and its blocks from whatever node has them.

    every rank   tells which parts of which generations are on its node
    rank 0       takes the newest generation of which all parts are somewhere, unless the disk has a newer checkpoint
    holders      send the manifests of their parts to all, and then answer questions for blocks
    every rank   reads the blocks that it needs: on its own node, else from a holder; a block whose checksum differs
                 is read from the next holder

So the new world may have another mesh, other nodes, and fewer or more ranks.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.checkpoint.memory_folder import MemoryFolder, Part, read_part
from autopar.runtime.checkpoint.storage_layout import BLOCK, SavedPiece, SavedTensor, check_head, checksum
from autopar.runtime.checkpoint.tensor_storage import SavedTensors, extent_of, file_of
from autopar.runtime.consistency.rank_checks import answer_of_first
from autopar.runtime.fault.error_propagation import CheckpointError, CollectiveError
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.training.async_save import manifest_of
from autopar.runtime.training.peer_nodes import (
    ask_for,
    asked,
    end_questions,
    nodes_of,
    reply,
)


@dataclass(frozen=True)
class Found:
    """What is in the memory of all nodes. generation: the newest complete one that the disk has no newer checkpoint
    than, or "". holders: for each of its parts, the ranks on whose nodes it is. apart: a newer one, and what it lacks.
    order: the highest number of any."""

    generation: str
    holders: Sequence[Sequence[int]]
    apart: str
    order: int


def found_in_memory(groups: Groups, token: str, disk_order: int) -> Found:
    """What the nodes of all ranks have of a run. ``disk_order``: the newest checkpoint on disk. Collective."""
    nodes = nodes_of(groups)
    parts = MemoryFolder(token).parts() if nodes.is_first(groups.rank) else []
    told = json.dumps({"parts": parts, "disk": disk_order})
    if groups.mesh.world_size == 1:
        return Found(**json.loads(_choice([told])))
    return Found(**json.loads(answer_of_first(groups, "load: checkpoints in memory", told, _choice)))


def _choice(texts: Sequence[str]) -> str:
    """The reply of rank 0, as JSON of `Found`."""
    told = [json.loads(text) for text in texts]
    disk = told[0]["disk"]
    by_generation: dict[tuple[int, str], dict[int, list[int]]] = {}
    facts: dict[tuple[int, str], tuple[int, int]] = {}  # (number of parts, newest on disk then: as far as we know)
    for holder, rank in enumerate(told):
        for part in (Part(*fields) for fields in rank["parts"]):
            key = part.order, part.generation
            by_generation.setdefault(key, {}).setdefault(part.rank, []).append(holder)
            of_first = part.after if part.rank == 0 else facts.get(key, (0, disk))[1]
            facts[key] = part.ranks, of_first
    apart, chosen, holders = "", "", list[list[int]]()
    for key in sorted(by_generation, reverse=True):
        (ranks, after), have = facts[key], by_generation[key]
        missing = [rank for rank in range(ranks) if rank not in have]
        if after < disk:
            break
        if not missing:
            chosen, holders = key[1], [have[rank] for rank in range(ranks)]
            break
        apart = apart or f"{len(missing)} of the {ranks} parts of {key[1]}, such as that of rank {missing[0]}"
    order = max((order for order, _ in by_generation), default=0)
    found = {"generation": chosen, "holders": holders, "apart": apart, "order": order}
    return json.dumps(found)


class MemoryReads:
    """A generation while it is loaded. Within: holders answer the questions of other nodes' ranks."""

    def __init__(self, groups: Groups, token: str, found: Found) -> None:
        self._groups, self._found, self._nodes = groups, found, nodes_of(groups)
        self.memory = MemoryFolder(token)
        holders = sorted({rank for ranks in found.holders for rank in ranks})
        self._holders = holders if self._nodes.count > 1 else []
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._answers = False  # holders do, on all ranks alike

    def __enter__(self) -> MemoryReads:
        if self._holders:
            self._group = self._groups.control(self._groups.timeout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Every rank comes here with the same error, or without one; unless a rank has died, and its group with it."""
        if kind is not None and issubclass(kind, CollectiveError):
            return
        if self._group is not None and self._answers:
            for holder in self._holders:
                if self._groups.rank == (holder + 1) % self._groups.mesh.world_size:
                    end_questions(self._group, holder)
        if self._thread is not None:
            self._thread.join()

    # --- manifests --------------------------------------------------------------------------------------------

    def manifest(self) -> dict[str, Any]:
        """The manifest of the checkpoint, from those of all parts. Collective. Raises as `joined_parts` does."""
        generation, parts = self._found.generation, range(len(self._found.holders))
        written = [b""] * len(parts)
        for rank in parts:
            holder = self._found.holders[rank][0]
            if self._group is None or holder == self._groups.rank:
                with contextlib.suppress(OSError):  # gone meanwhile: the manifest is damaged
                    written[rank] = self.memory.manifest_bytes(generation, rank)
        if self._group is not None:
            self._exchange(written)
        return joined_parts(written, generation)

    def _exchange(self, written: list[bytes]) -> None:
        """Each manifest from its first holder to all."""
        sizes = torch.tensor([len(text) for text in written])
        dist.all_reduce(sizes, dist.ReduceOp.MAX, group=self._group)
        for rank, size in enumerate(sizes.tolist()):
            text = torch.frombuffer(bytearray(written[rank] or bytes(size)), dtype=torch.uint8)
            if size:
                dist.broadcast(text, self._found.holders[rank][0], group=self._group)
            written[rank] = text.numpy().tobytes()

    def answer(self) -> None:
        """Answer questions from now on, if this rank holds parts."""
        self._answers = True
        if self._group is not None and self._groups.rank in self._holders:
            self._thread = threading.Thread(
                target=self._answer, args=(self._group,), name="autopar-blocks", daemon=True
            )
            self._thread.start()

    def _answer(self, group: dist.ProcessGroup) -> None:
        with contextlib.suppress(RuntimeError):  # a rank has died: the thread of the loop says so
            while (question := asked(group)) is not None:
                who, rank, start, size = question
                reply(group, who, self._own(rank, start, size))

    # --- blocks -----------------------------------------------------------------------------------------------

    def copies(self, file: str, start: int, size: int) -> Iterator[Tensor]:
        """The same bytes of a file from each place that has them, nearest first: uint8 [size]."""
        rank, nodes, here = _rank_of(file), self._nodes.of, self._groups.rank
        for holder in sorted(
            self._found.holders[rank], key=lambda r: (nodes[r] != nodes[here], (r - here) % len(nodes))
        ):
            if nodes[holder] == nodes[here] or self._group is None:
                yield self._own(rank, start, size)
            else:
                data = torch.empty(size, dtype=torch.uint8)
                ask_for(self._group, holder, rank, start, data)
                yield data

    def _own(self, rank: int, start: int, size: int) -> Tensor:
        """Bytes on this node; zeros where there are none, whose checksum is wrong."""
        data = b""
        with contextlib.suppress(OSError), self.memory.opened(self._found.generation, rank) as file:
            data = os.pread(file.fileno(), size, start)
        return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


def joined_parts(written: Sequence[bytes], generation: str) -> dict[str, Any]:
    """The manifest of a checkpoint, from those of its parts in the order of ranks. Raises ValueError if one is damaged,
    CheckpointError if they do not cover a tensor."""
    rank = 0
    try:
        told = []
        for rank, text in enumerate(written):
            told.append(read_part(text, generation, rank))
            index = told[-1]["told"]["index"]
            if index["files"] != {file_of(rank): told[-1]["size"]}:
                raise ValueError("it has other files than were saved")
            for key, entry in index["tensors"].items():
                SavedTensor.of(key, entry).listed()
        return manifest_of([part["told"] for part in told], told[0]["common"])
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        what = str(error) if isinstance(error, ValueError) else "an entry is missing or has the wrong type"
        raise ValueError(
            f"load: part {rank} of {generation} in memory is damaged: {what}; load a checkpoint of the disk"
        ) from error


def _rank_of(file: str) -> int:
    """The rank of `file_of`."""
    return int(file.removeprefix("rank-").partition(".")[0])


class MemoryTensors(SavedTensors):
    """The tensors of a generation: each file is an empty map that is filled block by block, as tensors are read."""

    def __init__(self, reads: MemoryReads, name: str, manifest: Mapping[str, Any]) -> None:
        super().__init__(reads.memory.folder / name, manifest)
        self._reads, self._maps = reads, dict[str, mmap.mmap]()

    def _check_file(self, name: str, pieces: list[tuple[SavedTensor, SavedPiece]]) -> None:
        if name not in self.files:
            raise ValueError(f"load: the manifest of {self.folder} names {name!r}, which is not one of its files")
        size = self.files[name]
        with self._mapped(name) as data:
            self._fill(name, data, 0, min(8, size))
            length = min(int.from_bytes(data[:8], "little"), size)
            self._fill(name, data, 0, min(8 + length, size))
            wrong = check_head(io.BytesIO(data[: 8 + length]), size, pieces)
        if wrong:
            raise CheckpointError(f"load: {self.folder / name} has other bytes than were saved: {wrong}")

    @contextlib.contextmanager
    def _mapped(self, name: str) -> Iterator[mmap.mmap]:
        """Context manager: the file as far as it has been read; kept for what is read twice."""
        if name not in self._maps:
            self._maps[name] = mmap.mmap(-1, self.files[name])
        yield self._maps[name]

    def _check(self, place: SavedPiece, data: mmap.mmap, part: Tensor) -> None:
        """Read the blocks of a piece."""
        if part.numel():
            self._fill(place.file, data, *extent_of(place, part))

    def _fill(self, name: str, data: mmap.mmap, start: int, stop: int) -> None:
        """Raises CheckpointError for a block that no node has as it was written."""
        known, sums, size = self._right.setdefault(name, set()), self._sums[name], self.files[name]
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            if block not in known:
                at = block * BLOCK
                self._read_block(name, data, at, min(BLOCK, size - at), sums[block] if block < len(sums) else -1)
                known.add(block)

    def _read_block(self, name: str, data: mmap.mmap, at: int, size: int, right: int) -> None:
        into = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=at)
        for copy in self._reads.copies(name, at, size):
            if checksum(copy) == right:
                into.copy_(copy)
                return
        raise CheckpointError(f"load: no node has {self.folder / name} as it was saved, after byte {at}")
