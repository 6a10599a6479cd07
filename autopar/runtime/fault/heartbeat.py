"""Every rank shows that it lives, and watches the next one: what a dead or stopped rank leaves hanging is ended.

Once a second a thread writes under ``alive/<rank>`` that it does, in which call of autopar this rank is (so that a slow
compile is waited for) and which one of all calls that is; reads the same of the next rank, and looks whether somebody
has given a verdict. A text that stands still for `SILENT` seconds is one: the rank is dead or stopped, and nothing that
waits for it can end. So are a next rank that has finished before a call which this one is in, a store that does not
answer, and the word of the launcher, which sees its processes die. On a verdict the connections of this rank's process
groups are broken: every wait becomes an error, wherever it is; waits that raise nothing are ended by what is called
after each beat.

Four questions a beat and rank, whatever the number of ranks; the store answers some 30,000 in a second, so thousands of
ranks beat more slowly. A rank that held the interpreter's lock for so long, without a bytecode in between, would be
taken for dead; $AUTOPAR_HEARTBEAT_TIMEOUT sets the seconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from autopar.adapters.distributed import root_store
from autopar.runtime.fault import aborts
from autopar.runtime.fault.call_sequence import Place, Places, places_in
from autopar.runtime.fault.store_client import StoreClient, StoreError, look

BEAT = 1.0  # seconds between two signs of life
MANY = 4096  # ranks up to which it is that
SILENT = float(os.environ.get("AUTOPAR_HEARTBEAT_TIMEOUT", "8"))  # seconds without one until a rank is given up
TOLD = ("error", "heard", "left")  # what a rank says before it goes
LAUNCHER = "autopar/launcher"  # what the launcher saw, beside all prefixes


def beat_of(world: int) -> float:
    """Seconds between two signs of life in a world of so many ranks."""
    return BEAT * max(1.0, world / MANY)


class Heartbeat:
    """The beat of one rank. ``verdict``: why nothing can go on, or empty. ``doing``: what this rank is at. ``calls``:
    those that it has made. ``after``: is called with the verdict after each beat."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        keys: str,
        doing: Callable[[], str],
        calls: Places,
        after: Callable[[str], None],
        timeout: float,
    ) -> None:
        self.verdict = ""
        self.cut_off = False  # the store does not answer any more: that is the verdict
        self.beat = beat_of(world)
        self.next: tuple[int, dict[str, Place]] = (-1, {})  # the next rank, and where it was at the last beat
        self._keys, self._doing, self._calls, self._after = keys, doing, calls, after
        self._rank, self._world = rank, world
        self._watched = (rank + 1) % world
        self._count = self._still = 0
        self._seen = ""
        root = root_store(store)
        self._port = root.port if isinstance(root, dist.TCPStore) else -1
        self._line = StoreClient(store, timeout)  # its own: a question of somebody else does not stop the beat
        self._line.ask(self._show)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autopar-alive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop beating."""
        self._stop.set()
        self._thread.join(2 * BEAT)

    def _run(self) -> None:
        reached = time.monotonic()
        while not self._stop.wait(self.beat):
            try:
                found = self._line.ask(self.look, max(SILENT, self._line.patience))
                reached = time.monotonic()
            except StoreError as error:
                # A host that has finished takes the store with it, while others are still at their last collectives.
                found = str(error) if time.monotonic() - reached >= SILENT else ""
                self.cut_off = bool(found)
            if found and not self._stop.is_set():
                self.verdict = found
                aborts.break_all(self._port)
            self._after(self.verdict)
            if self.verdict:
                return

    def _show(self, store: dist.Store) -> None:
        self._count += 1
        store.set(f"{self._keys}/alive/{self._rank}", f"{self._count}\n{self._doing()}\n{self._calls}")

    def look(self, store: dist.Store) -> str:
        self._show(store)
        if found := look(store, f"{self._keys}/verdict") or said_by_launcher(store):
            return found
        if self._watched == self._rank:
            return ""
        sign = look(store, f"{self._keys}/alive/{self._watched}")
        self._still = self._still + 1 if sign == self._seen else 0
        self._seen = sign
        self.next = (self._watched, places_in(shown_in(sign)[1]))
        # In beats of ours: nobody is silent because the job was suspended.
        if not sign or self._still * self.beat < max(SILENT, 3 * self.beat):
            return ""
        return self._given_up(store, self._watched)

    def _given_up(self, store: dist.Store, rank: int) -> str:
        """The verdict on a rank that does not beat any more: its own words if it left some; none if it has finished,
        unless that was before a call that this rank is in."""
        words = {k: text for k in TOLD if (text := look(store, f"{self._keys}/{k}/{rank}"))}
        if words.get("left"):
            if self._calls.beyond(self.next[1]):
                text = f"rank {rank} finished: its main returned"
                return store.compare_set(f"{self._keys}/verdict", "", text).decode()
            self._watched, self._still, self._seen = (rank + 1) % self._world, 0, ""
            return ""
        own = f"rank {rank} failed: {words['error']}" if words.get("error") else words.get("heard")
        text = own or f"rank {rank} did not respond: no sign of life for {max(SILENT, 3 * self.beat):.0f} s"
        return store.compare_set(f"{self._keys}/verdict", "", text).decode()


def said_by_launcher(store: dist.Store) -> str:
    """What the launcher saw, or nothing."""
    root = root_store(store)
    return root.get(LAUNCHER).decode() if root.check([LAUNCHER]) else ""


def shown_in(sign: str) -> tuple[str, str]:
    """The call of autopar that a rank is in, if it does not wait for others there, and its places, of what it shows."""
    _, doing, places = (sign.split("\n") + ["", "", ""])[:3]
    return doing, places
