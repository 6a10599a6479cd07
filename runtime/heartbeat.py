"""Every rank shows that it lives, and watches the next one: what a dead or stopped rank leaves hanging is ended.

Once a second a thread counts up ``alive/<rank>``, reads the count of the next rank, and looks whether somebody has
given a verdict. A count that stands still for `SILENT` seconds is one: the rank is dead or stopped, and nothing that
waits for it can end. So is a store that does not answer, and the word of the launcher, which sees its processes die. On
a verdict the connections of this rank's process groups are broken: every wait becomes an error, wherever it is; waits
that raise nothing are ended by what is called after each beat.

With the beat a rank shows which call of autopar it is in (``doing/<rank>``), so that a slow compile is waited for.

Three questions a second and rank, whatever the number of ranks. A rank that held the interpreter's lock for so long,
without a bytecode in between, would be taken for dead; $AUTOPAR_SILENCE sets the seconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from autopar.adapters.distributed import root_store
from autopar.runtime import connections
from autopar.runtime.store_line import Line, StoreError

BEAT = 1.0  # seconds between two signs of life
SILENT = float(os.environ.get("AUTOPAR_SILENCE", "8"))  # seconds without one until a rank is given up
TOLD = ("error", "heard", "left")  # what a rank says before it goes
LAUNCHER = "autopar/launcher"  # what the launcher saw, beside all prefixes


class Heartbeat:
    """The beat of one rank. ``verdict``: why nothing can go on, or empty. ``doing``: what this rank is at. ``after``:
    is called with the verdict after each beat."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        keys: str,
        doing: Callable[[], str],
        after: Callable[[str], None],
        timeout: float,
    ) -> None:
        self.verdict = self._shown = ""
        self._keys, self._doing, self._after = keys, doing, after
        self._rank, self._world = rank, world
        self._watched = (rank + 1) % world
        self._count = self._still = 0
        root = root_store(store)
        self._port = root.port if isinstance(root, dist.TCPStore) else -1
        self._line = Line(store, timeout)  # its own: a question of somebody else does not stop the beat
        self._line.ask(lambda s: s.add(f"{self._keys}/alive/{rank}", 1))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autopar-alive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop beating."""
        self._stop.set()
        self._thread.join(2 * BEAT)

    def _run(self) -> None:
        reached = time.monotonic()
        while not self._stop.wait(BEAT):
            try:
                found = self._line.ask(self._look, max(SILENT, self._line.patience))
                reached = time.monotonic()
            except StoreError as error:
                # A host that has finished takes the store with it, while others are still at their last collectives.
                found = str(error) if time.monotonic() - reached >= SILENT else ""
            if found and not self._stop.is_set():
                self.verdict = found
                connections.break_all(self._port)
            self._after(self.verdict)
            if self.verdict:
                return

    def _look(self, store: dist.Store) -> str:
        store.add(f"{self._keys}/alive/{self._rank}", 1)
        if (doing := self._doing()) != self._shown:
            store.set(f"{self._keys}/doing/{self._rank}", doing)
            self._shown = doing
        for where, key in ((store, f"{self._keys}/verdict"), (root_store(store), LAUNCHER)):
            if where.check([key]):
                return where.get(key).decode()
        if self._watched == self._rank:
            return ""
        count = store.add(f"{self._keys}/alive/{self._watched}", 0)
        self._still = self._still + 1 if count == self._count else 0
        self._count = count
        if count == 0 or self._still * BEAT < SILENT:  # in beats of ours: no time passes for a job that is suspended
            return ""
        return self._given_up(store, self._watched)

    def _given_up(self, store: dist.Store, rank: int) -> str:
        """The verdict on a rank that does not beat any more: its own words if it left some; none if it has finished."""
        words = {
            k: store.get(f"{self._keys}/{k}/{rank}").decode() for k in TOLD if store.check([f"{self._keys}/{k}/{rank}"])
        }
        if words.get("left"):
            self._watched, self._still = (rank + 1) % self._world, 0
            return ""
        own = f"rank {rank} failed: {words['error']}" if words.get("error") else words.get("heard")
        text = own or f"rank {rank} did not respond: no sign of life for {SILENT:.0f} s"
        return store.compare_set(f"{self._keys}/verdict", "", text).decode()
