"""A save into host memory: each rank's share goes into a file in /dev/shm of its node, and into one of the next node.

    copy       tensors into the file's memory; then the next optimizer step may change them
    send       the file to the same rank of the next node, while checksums are computed
    receive    that of the previous node's rank into a file here, at the same time, and compare the checksums
    manifests  each written once its file is whole

So a node that is lost takes nothing with it, and a process that dies leaves what it had. How files and generations are
named: `autopar.runtime.checkpoint.memory_folder`. A failure (no room) is no error: the run has older checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.checkpoint.checkpoint_dir import MemoryRun, RunLineage, newest_in
from autopar.runtime.checkpoint.memory_folder import (
    MemoryFolder,
    memory_root,
    part_bytes,
    remove_abandoned,
    token_of,
    write_token,
)
from autopar.runtime.checkpoint.storage_layout import BlockChecksums, host_bytes
from autopar.runtime.checkpoint.tensor_storage import Piece
from autopar.runtime.consistency.exit_checks import CommonEnd, at_end
from autopar.runtime.consistency.rank_checks import on_first_rank
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.training.async_save import wait_for_save
from autopar.runtime.training.peer_nodes import WAVE, peers_of, waves

_NOTHING = -1  # instead of a size: the sender has no share


def memory_run(groups: Groups, line: RunLineage, folder: Path) -> MemoryRun:
    """The memory checkpoints of a run. It gets a new token unless it has loaded them: those of an earlier run in the
    same folder are not its own. Collective at the first call."""
    run = line.memory.get(folder)
    if run is None or not run.attempt:
        known = run.token if run is not None else ""
        told = json.loads(on_first_rank(groups, "save", lambda: _begun(folder, known)))
        if told["old"] not in ("", told["token"]):
            MemoryFolder(told["old"]).remove()
        run = line.memory[folder] = run or MemoryRun(told["token"])
        run.attempt = told["attempt"]
        common = CommonEnd(groups, f"memory/{run.attempt}")
        at_end(functools.partial(_free, run.token, common, peers_of(groups).is_first_of_node))
    return run


def _begun(folder: Path, token: str) -> str:
    old, token = token_of(folder), token or uuid.uuid4().hex
    if old != token:
        write_token(folder, token)
    return json.dumps({"old": old, "token": token, "attempt": uuid.uuid4().hex[:8]})


def _free(token: str, common: CommonEnd, is_first_of_node: bool, is_good: bool) -> None:
    """Once all ranks have ended well, remove the memory checkpoints of a run: while one may fail, the next start may
    need what is on any node."""
    if is_good:
        with contextlib.suppress(RuntimeError):  # the save itself says it
            wait_for_save()  # all ranks have written
    common.say(is_good)
    if is_good and is_first_of_node and common.is_good():
        MemoryFolder(token).remove()


def disk_order(line: RunLineage, folder: Path) -> int:
    """The number of the newest checkpoint in the folder of a run. On rank 0."""
    if folder.resolve() not in line.seen:
        line.seen[folder.resolve()] = newest_in(folder)
    newest = line.seen[folder.resolve()]
    return newest.order if newest is not None else 0


def check_still_ours(line: RunLineage, folder: Path) -> None:
    """Raises ValueError if another run has begun to save into the memory of the same folder. On rank 0, before a
    save."""
    run = line.memory.get(folder)
    if run is not None and run.attempt and token_of(folder) not in ("", run.token):
        raise ValueError(
            f"save: another run saves into the memory of {folder} since this one began; give every job, and every "
            "model of a job, a folder of its own"
        )


class MemorySave:
    """The share of one rank. ``told``: its part of the manifest. On rank 0, ``common``: what is equal on all ranks, and
    ``after``: the number of the newest checkpoint on disk."""

    optional = True

    def __init__(
        self,
        groups: Groups,
        run: MemoryRun,
        head: bytes,
        pieces: Sequence[Piece],
        told: Mapping[str, Any],
        common: Mapping[str, Any],
        after: int,
    ) -> None:
        self._peers, self._run = peers_of(groups), run
        self._memory, self._name, self.staged = MemoryFolder(run.token), run.next(), threading.Event()
        self.folder = memory_root() / run.token / self._name
        self._head, self._pieces, self._ranks = head, pieces, groups.mesh.world_size
        self._told, self._common, self._after = told, common, after
        self._failure: BaseException | None = None
        on_gpu = groups.device if groups.device.type == "cuda" else None
        self._stream = torch.cuda.Stream(on_gpu) if on_gpu is not None else None
        if self._stream is not None:  # after the work queued so far
            self._stream.wait_stream(torch.cuda.current_stream(on_gpu))

    def write(self) -> None:
        """Raises OSError without room, RuntimeError for a tensor that changed before it was copied, or a copy that
        arrived damaged; but only after the other nodes have got, and sent, what they wait for."""
        peers = self._peers
        if peers.is_first_of_node:
            self._memory.remove_strangers((self._run.complete, self._name), peers.kept_on_node)
            remove_abandoned(self._run.token)
        receiving = threading.Thread(target=self._attempt, args=(self._receive_all,), name="autopar-receive")
        receiving.start()
        try:
            self._attempt(self._keep_and_send)
        finally:
            self.staged.set()
            receiving.join()
        if self._failure is not None:
            raise self._failure

    def _attempt(self, part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as error:
            self._failure = self._failure or error

    # --- this rank's own share --------------------------------------------------------------------------------

    def _keep_and_send(self) -> None:
        rank, size = self._peers.rank, len(self._head) + sum(p.values.nbytes for p in self._pieces)
        try:
            file = self._memory.reserve(self._name, rank, size, self._run.complete)
            data = _bytes_of(file)
            self._copy_into(data)
        except BaseException:
            self._send(torch.tensor([_NOTHING]))
            raise
        finally:
            self.staged.set()
            self._pieces = ()
        self._send(torch.tensor([size]))
        sums = BlockChecksums()
        for wave in waves(data):
            sums.add(host_bytes(wave))
            self._send(wave)
        facts = {"ranks": self._ranks, "after": self._after, "size": size, "common": self._common}
        manifest = part_bytes(self._name, rank, {**facts, "told": {**self._told, "sums": sums.found}})
        self._send(torch.tensor([len(manifest)]))
        self._send(torch.frombuffer(bytearray(manifest), dtype=torch.uint8))
        self._memory.finish(self._name, rank, manifest)

    def _copy_into(self, data: Tensor) -> None:
        at = len(self._head)
        data[:at] = torch.frombuffer(bytearray(self._head), dtype=torch.uint8)
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for piece in self._pieces:
                if size := piece.values.nbytes:
                    data[at : at + size].copy_(piece.values.detach().contiguous().reshape(-1).view(torch.uint8))
                    at += size
        changed = next((p.key for p in self._pieces if p.changed()), None)
        if changed is not None:
            raise RuntimeError(f"{changed} was written to while it was being saved; call wait() before that")

    def _send(self, x: Tensor) -> None:
        if self._peers.target is not None:
            self._peers.send(x, self._peers.target)

    # --- shares of another node -------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        for source in self._peers.sources:
            self._receive(source)

    def _receive(self, source: int) -> None:
        """Keep the share of a rank. Without room for it, take it all the same: the sender waits."""
        size = int(self._get(source, torch.zeros(1, dtype=torch.int64)))
        if size == _NOTHING:
            return  # the source says why
        data: Tensor | None = None
        try:
            data = _bytes_of(self._memory.reserve(self._name, source, size, self._run.complete))
        except OSError as error:
            self._failure = self._failure or error
        sums = BlockChecksums()
        for wave in waves(data) if data is not None else _scratch(size):
            self._get(source, wave)
            sums.add(host_bytes(wave))
        length = int(self._get(source, torch.zeros(1, dtype=torch.int64)))
        manifest = self._get(source, torch.empty(length, dtype=torch.uint8)).numpy().tobytes()
        if data is None:
            return
        if json.loads(manifest)["told"]["sums"] != sums.found:
            raise RuntimeError(f"the share of rank {source} arrived with other bytes than were sent")
        self._memory.finish(self._name, source, manifest)

    def _get(self, source: int, into: Tensor) -> Tensor:
        return self._peers.receive(into, source)

    # --- the end ----------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Complete as soon as all ranks have written."""

    def discard(self) -> None:
        """The next save writes into the same memory."""

    def close(self) -> None:
        self.staged.set()

    def completed(self) -> None:
        self._run.complete = self._name


def _bytes_of(file: mmap.mmap) -> Tensor:
    return torch.frombuffer(file, dtype=torch.uint8)


def _scratch(size: int) -> Iterator[Tensor]:
    """Room for one message after another, ``size`` bytes in all."""
    room = torch.empty(min(size, WAVE), dtype=torch.uint8)
    return (room[: min(WAVE, size - at)] for at in range(0, size, WAVE))
