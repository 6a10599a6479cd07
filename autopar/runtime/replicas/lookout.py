"""Heartbeats of replicas: every rank shows that it is alive, and watches the same rank of the other replicas.

Once a second a thread writes a count to the store, and reads those of the others. A replica one of whose ranks has been
silent for `SILENT` seconds is marked as lost, with all of its ranks. Whenever a member is lost, or the record has
changed, whatever this rank waits for over replicas is ended: see `ReplicaGroup.end`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.distributed as dist

from autopar.runtime.fault.heartbeat import BEAT, SILENT
from autopar.runtime.fault.store_client import StoreClient, StoreError, look
from autopar.runtime.replicas.membership import Record


@dataclass
class _Sign:
    """What was seen of a start of a replica: its last heartbeat, how often it changed, and for how many beats not."""

    text: str = ""
    changes: int = 0
    still: int = 0


class Lookout:
    """The heartbeat of this rank, as ``rank`` of its replica, and what it sees of others.

    where: the store, as the subject of a sentence. name: of this start of the replica. trouble: called with the epoch
    of the record that `watch` was given, after each beat on which a member is lost, the epoch is over, or the store has
    not answered for `SILENT` seconds.
    """

    def __init__(self, store: dist.Store, where: str, name: str, rank: int, trouble: Callable[[int], None]) -> None:
        self.lost: dict[str, str] = {}  # name -> why
        self.cut_off = ""  # why the store cannot be reached
        self._name, self._rank, self._trouble = name, rank, trouble
        self._watched: tuple[Record | None, tuple[str, ...]] = (None, ())
        self._signs: dict[str, _Sign] = {}
        self._count = 0
        self._line = StoreClient(store, host=where)
        self._line.ask(self._show)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autopar-replicas", daemon=True)
        self._thread.start()

    def watch(self, record: Record | None, names: Iterable[str]) -> None:
        """From now on, see whether the starts of replicas ``names`` are alive, and whether the record stays."""
        self._watched = record, tuple(name for name in dict.fromkeys(names) if name != self._name)

    def is_alive(self, name: str) -> bool:
        """Whether the heartbeat of a start was seen to change, since it was watched, and has not stopped."""
        return name not in self.lost and (name == self._name or self._signs.get(name, _Sign()).changes > 0)

    def close(self, why: str) -> None:
        """Stop, and say why this start has ended."""
        self._stop.set()
        self._thread.join(2 * BEAT)
        try:
            self._line.ask(lambda store: store.compare_set(f"lost/{self._name}", "", why))
        except StoreError:
            return

    def _show(self, store: dist.Store) -> None:
        self._count += 1
        store.set(f"beat/{self._name}/{self._rank}", str(self._count))

    def _run(self) -> None:
        reached = time.monotonic()
        while not self._stop.wait(BEAT):
            record, names = self._watched
            over = functools.partial(self._is_over, record=record, names=names)
            try:
                ended = self._line.ask(over, max(SILENT, self._line.patience))
                reached = time.monotonic()
            except StoreError as error:
                if time.monotonic() - reached < SILENT:
                    continue
                self.cut_off, ended = str(error), True
            if ended and record is not None and not self._stop.is_set():
                self._trouble(record.epoch)
            if self.cut_off:
                return

    def _is_over(self, store: dist.Store, record: Record | None, names: tuple[str, ...]) -> bool:
        """One beat. Whether what this rank waits for among the members may never come."""
        self._show(store)
        for name in names:
            sign, text = self._signs.setdefault(name, _Sign()), look(store, f"beat/{name}/{self._rank}")
            sign.changes += bool(sign.text) and text != sign.text
            sign.still = 0 if text != sign.text else sign.still + 1
            sign.text = text
            why = f"its rank {self._rank} did not respond: no sign of life for {SILENT:.0f} s"
            is_silent = sign.still * BEAT >= SILENT
            if found := store.compare_set(f"lost/{name}", "", why if is_silent else "").decode():
                self.lost[name] = found
        self._signs = {name: sign for name, sign in self._signs.items() if name in names}
        if record is None:
            return False
        now = Record.of(look(store, "record"))
        return now is None or now.epoch != record.epoch or any(n in self.lost for n in record.members.values())
