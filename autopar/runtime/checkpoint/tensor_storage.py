"""The tensors of a checkpoint: which rank writes which pieces, the layout of its file, and reading pieces back.

Each file is a safetensors file: a head in JSON, then plain bytes. Ranks that replicate a piece share the writing, by
bytes. The manifest of the checkpoint lists where the pieces of each tensor are, so a rank of any mesh reads only the
parts that it needs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.adapters.autograd import version_of
from autopar.runtime.checkpoint.storage_layout import (
    SAFETENSORS,
    SavedPiece,
    SavedTensor,
    check_blocks,
    check_head,
    opened_inside,
    piece_name,
)
from autopar.runtime.fault.error_propagation import CheckpointError
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.params.dtensor_layout import as_local
from autopar.runtime.params.sharded_tensor import ShardedTensor
from autopar.runtime.params.shards import ShardRange


@dataclass(frozen=True)
class TensorToSave:
    """A tensor to save. ``cut``: the axes that it is sharded on. ``stage``: the pp coordinate of the ranks that write
    it; None: only this rank does."""

    key: str
    tensor: Tensor
    cut: frozenset[str] = frozenset()
    stage: int | None = 0


@dataclass(frozen=True)
class Piece:
    """A box of a tensor of global shape ``shape`` that begins at ``start``. ``values`` is a view of ``source``, this
    rank's tensor, which had this version when the save began."""

    key: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    values: Tensor
    source: Tensor
    version: int

    def changed(self) -> bool:
        return version_of(self.source) != self.version


def written_here(entries: Iterable[TensorToSave], groups: Groups) -> list[TensorToSave]:
    """The entries that this rank writes. Ranks with the same pieces compute the same division without communication:
    from the largest to the smallest, each goes to the replica with the fewest bytes so far."""
    stage = groups.coordinate.get("pp", 0)
    shared = [e for e in entries if e.stage == stage]
    axes = [axis for axis in groups.mesh.sizes if axis != "pp"]
    load = torch.zeros([groups.mesh.size(axis) for axis in axes], dtype=torch.int64)
    here = [groups.coordinate[axis] for axis in axes]
    mine = [e for e in entries if e.stage is None]
    for entry in sorted(shared, key=lambda e: (-as_local(e.tensor).nbytes, e.key)):
        cut = [i for i, axis in enumerate(axes) if axis in entry.cut]
        per_replica = load.sum(cut) if cut else load
        chosen = iter(torch.unravel_index(per_replica.argmin(), per_replica.shape))
        place = [slice(None) if i in cut else int(next(chosen)) for i in range(len(axes))]
        load[tuple(place)] += as_local(entry.tensor).nbytes
        if all(at == slice(None) or at == mine_at for at, mine_at in zip(place, here, strict=True)):
            mine.append(entry)
    return mine


def pieces_of(entries: Sequence[TensorToSave]) -> list[Piece]:
    """Pieces in the order of the file: wide dtypes first, so that each is aligned to its width."""
    found = []
    for entry in entries:
        whole = entry.tensor.detach()
        source = as_local(whole)
        found += [
            Piece(entry.key, tuple(whole.shape), box.start, box.of_local(source), source, version_of(source))
            for box in _boxes_of(whole)
        ]
    return sorted(found, key=lambda p: (-p.values.itemsize, p.key, p.start))


def _boxes_of(x: Tensor) -> list[ShardRange]:
    """This rank's shard of a tensor, as boxes of the global tensor."""
    if isinstance(x, ShardedTensor):
        return x.chunks()
    assert not isinstance(x, DTensor), "a tensor on a mesh is a ShardedTensor"
    return [ShardRange((0,) * x.dim(), tuple(x.shape), (0,) * x.dim())]


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def file_layout(pieces: Sequence[Piece], file: str) -> tuple[bytes, dict[str, Any]]:
    """(the head of a file with these pieces, its entries in the manifest)."""
    entries: dict[str, Any] = {}
    ends, at = [], 0
    for piece in pieces:
        dtype, shape = SAFETENSORS.get(piece.values.dtype, "U8"), list(piece.values.shape)
        if piece.values.dtype not in SAFETENSORS:  # safetensors has no complex dtypes
            shape = [piece.values.nbytes]
        name = piece_name(piece.key, piece.values.shape == piece.shape, piece.start)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at := at + piece.values.nbytes]}
        ends.append(at)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    tensors: dict[str, Any] = {}
    for piece, end in zip(pieces, ends, strict=True):
        dtype = str(piece.values.dtype).removeprefix("torch.")
        told = tensors.setdefault(piece.key, {"dtype": dtype, "shape": list(piece.shape), "pieces": []})
        start = len(head) + end - piece.values.nbytes
        told["pieces"].append([file, start, list(piece.start), list(piece.values.shape)])
    return head, {"files": {file: len(head) + at}, "tensors": tensors}


def whole_index(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries of all files in the manifest. Raises CheckpointError if pieces do not cover a tensor."""
    files: dict[str, int] = {}
    tensors: dict[str, Any] = {}
    for part in parts:
        files |= part["files"]
        for key, told in part["tensors"].items():
            known = tensors.setdefault(key, {**told, "pieces": []})
            known["pieces"] += told["pieces"]
            if (known["dtype"], known["shape"]) != (told["dtype"], told["shape"]):
                raise CheckpointError(f"save: ranks hold {key} in other dtypes or shapes: {known}, {told}"[:500])
    for key, told in tensors.items():
        held = sum(math.prod(sizes) for _, _, _, sizes in told["pieces"])
        if held != math.prod(told["shape"]):
            raise CheckpointError(f"save: {key} has {math.prod(told['shape'])} elements, {held} of them were written")
    return {"files": files, "tensors": tensors}


# --- reading ------------------------------------------------------------------------------------------------


class SavedTensors:
    """The tensors of a checkpoint that a rank needs, by key. Raises ValueError for an invalid manifest; the entry of a
    tensor is checked before any of its data is read."""

    def __init__(self, checkpoint: Path, manifest: Mapping[str, Any]) -> None:
        self.folder, self._right = checkpoint, dict[str, set[int]]()
        self._pieces: dict[str, list[SavedPiece]] = {}  # of checked tensors
        self._files: dict[str, tuple[int, ...]] = {}  # checked files
        try:
            self.files = {name: _number(size) for name, size in manifest["files"].items()}
            self._told = {key: SavedTensor.of(key, told) for key, told in manifest["tensors"].items()}
            sums: Mapping[str, Sequence[int]] = manifest.get("sums", {})  # older checkpoints have none
            self._sums = {str(name): list(map(_number, found)) for name, found in sums.items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"load: the manifest of {checkpoint} is damaged: it has no entries of tensors; load an older one"
            ) from error
        self.dtypes = {key: told.dtype for key, told in self._told.items()}
        self.shapes = {key: told.shape for key, told in self._told.items()}

    def __contains__(self, key: str) -> bool:
        return key in self._told

    def under(self, *prefixes: str) -> list[str]:
        return [key for key in self._told if key.startswith(prefixes)]

    def check(self, keys: Iterable[str]) -> None:
        """Raises ValueError if the pieces of these tensors do not cover them, or files are missing or have another
        length; CheckpointError if the head of a file differs from the manifest."""
        by_file: dict[str, list[tuple[SavedTensor, SavedPiece]]] = {}
        for key in dict.fromkeys(keys):
            if key not in self._pieces:
                told = self._told[key]
                try:
                    self._pieces[key] = told.pieces()
                except ValueError as error:
                    raise ValueError(
                        f"load: the manifest of {self.folder} is damaged: {error}; load an older one"
                    ) from error
                for piece in self._pieces[key]:
                    by_file.setdefault(piece.file, []).append((told, piece))
        for name, pieces in sorted(by_file.items()):
            self._check_file(name, pieces)

    def _check_file(self, name: str, pieces: list[tuple[SavedTensor, SavedPiece]]) -> None:
        if Path(name).name != name or name not in self.files:
            raise ValueError(f"load: the manifest of {self.folder} names {name!r}, which is not one of its files")
        path, needed = self.folder / name, self.files[name]
        try:
            with opened_inside(self.folder, name) as file:
                facts = os.fstat(file.fileno())
                self._files.setdefault(name, _identity(facts))
                what = f"has {facts.st_size} bytes, needs {needed}" if facts.st_size != needed else ""
                wrong = "" if what else check_head(file, needed, pieces)
        except OSError as error:
            what = "is missing" if isinstance(error, FileNotFoundError) else "is not a regular file, or cannot be read"
        if what:
            raise ValueError(f"load: {path} {what}: the checkpoint is damaged; load an older one")
        if wrong:
            raise CheckpointError(f"load: {path} has other bytes than were saved: {wrong}; load an older one")

    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fill tensors, including DTensors, with this rank's shards; floats are cast. Not collective."""
        for target, place, stored, data in self._parts(targets):
            self._check(place, data, stored)
            target.copy_(stored)
            del stored

    def check_data(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Raises CheckpointError if the data that `read` would read differs from what was written. Fills nothing."""
        for _, place, stored, data in self._parts(targets):
            self._check(place, data, stored)
            del stored

    def tensor(self, key: str, device: torch.device | str = "cpu") -> Tensor:
        self.check([key])
        found = torch.empty(self.shapes[key], dtype=self.dtypes[key], device=device)
        self.read([(key, found)])
        return found

    def _parts(self, targets: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Tensor, SavedPiece, Tensor, mmap.mmap]]:
        """For each overlap of a target with a piece: the view of the target, the piece, the values in the file."""
        by_file: dict[str, list[tuple[Tensor, str, SavedPiece, ShardRange]]] = {}
        for key, x in targets:
            self.check([key])
            if tuple(x.shape) != self.shapes[key]:
                raise ValueError(f"{key} has shape {self.shapes[key]}, needs {tuple(x.shape)}")
            local = as_local(x).detach()
            for box, piece in itertools.product(_boxes_of(x), self._pieces[key]):
                if (part := _common(box, piece)) is not None:
                    target = replace(part, local=_shifted(part.start, box.start, box.local)).of_local(local)
                    by_file.setdefault(piece.file, []).append((target, key, piece, part))
        for name, parts in by_file.items():
            with self._mapped(name) as data:
                for target, key, piece, part in parts:
                    stored = part.of_local(self._view(data, piece, self.dtypes[key]))
                    yield target, piece, stored, data
                    del stored

    def _view(self, data: mmap.mmap, place: SavedPiece, dtype: torch.dtype) -> Tensor:
        count = math.prod(place.sizes) * dtype.itemsize
        if count == 0:
            return torch.empty(place.sizes, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8, count=count, offset=place.at).view(dtype).view(place.sizes)

    def _check(self, place: SavedPiece, data: mmap.mmap, part: Tensor) -> None:
        """Raises CheckpointError if the data read from a file differs from what was written."""
        if place.file not in self._sums or part.numel() == 0:
            return
        start, stop = extent_of(place, part)
        with memoryview(data) as whole:
            known = self._right.setdefault(place.file, set())
            wrong = check_blocks(whole, start, stop, self._sums[place.file], known)
        if wrong is not None:
            raise CheckpointError(
                f"load: {self.folder / place.file} has other bytes than were saved, after byte {wrong}: a disk or a "
                "copy has changed them; load an older one"
            )

    @contextlib.contextmanager
    def _mapped(self, name: str) -> Iterator[mmap.mmap]:
        """Context manager: a memory-mapped file. Views of it must be gone on exit."""
        with opened_inside(self.folder, name) as file:
            if self._files[name] != _identity(os.fstat(file.fileno())):
                raise CheckpointError(f"load: {self.folder / name} was changed while it was read; load it again")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            try:
                yield data
            finally:
                with contextlib.suppress(BufferError):  # an error may hold a view, which goes with it
                    data.close()


def extent_of(place: SavedPiece, part: Tensor) -> tuple[int, int]:
    """From which byte of the file to which the elements of a view of a piece are; it has some."""
    start = place.at + int(part.storage_offset()) * part.itemsize
    return start, start + int(1 + sum((n - 1) * step for n, step in zip(part.shape, part.stride()))) * part.itemsize


def _common(box: ShardRange, piece: SavedPiece) -> ShardRange | None:
    """The intersection of a box and a piece, with offsets in the piece."""
    start = tuple(map(max, box.start, piece.start))
    ends = (min(a + n, b + m) for a, n, b, m in zip(box.start, box.size, piece.start, piece.sizes, strict=True))
    size = tuple(end - at for end, at in zip(ends, start, strict=True))
    return ShardRange(start, size, _shifted(start, piece.start)) if all(n > 0 for n in size) else None


def _shifted(place: Sequence[int], start: Sequence[int], to: Sequence[int] = ()) -> tuple[int, ...]:
    """A global position, in a tensor that begins at ``start``. ``to``: where this tensor begins in another one."""
    return tuple(at - begin + there for at, begin, there in zip(place, start, to or [0] * len(start), strict=True))


def _identity(facts: os.stat_result) -> tuple[int, ...]:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def _number(found: Any) -> int:
    if type(found) is not int or found < 0:
        raise ValueError(f"needs an integer of at least 0, found {found!r:.40}")
    return found
