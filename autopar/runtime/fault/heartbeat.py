"""Heartbeats: every rank shows that it is alive and watches the next one, so that waits for a dead rank are aborted.

Once a second a thread writes under ``alive/<rank>`` a count, the call of autopar that this rank is in (so that others
wait for a slow compile) and the number of this call. It reads the same of the next rank, and looks for a verdict: the
reason why the job cannot continue. A heartbeat that does not change for `SILENT` seconds leads to a verdict: the rank
is dead or stopped, and no wait for it can end. So do a next rank that has finished before a call that this rank is in,
a store that does not answer, and a report of the launcher, which sees its processes die. On a verdict the connections
of this rank's process groups are broken, so every wait raises an error. A callback after each beat aborts waits that do
not raise.

Each rank makes four requests per beat. The store answers some 30,000 per second, so with thousands of ranks beats are
slower. A rank that holds the interpreter's lock for as long, without a bytecode in between, is taken for dead;
$AUTOPAR_HEARTBEAT_TIMEOUT sets the seconds.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist

from autopar.adapters.distributed import root_store
from autopar.runtime.fault import aborts
from autopar.runtime.fault.call_sequence import Place, Places, places_in
from autopar.runtime.fault.store_client import StoreClient, StoreError, look

BEAT = 1.0  # seconds between two heartbeats
MANY = 4096  # up to so many ranks
SILENT = float(os.environ.get("AUTOPAR_HEARTBEAT_TIMEOUT", "8"))  # seconds without one until a rank is taken for dead
TOLD = ("error", "heard", "left")  # what a rank publishes before it ends
LAUNCHER = "autopar/launcher"  # key of the launcher's report, outside of all prefixes


def beat_of(world: int) -> float:
    """Seconds between two heartbeats in a world of so many ranks."""
    return BEAT * max(1.0, world / MANY)


class Heartbeat:
    """The heartbeat of one rank. ``verdict``: why the job cannot continue, or empty. ``doing``: returns what this rank
    does. ``calls``: the places of its calls. ``after``: called with the verdict after each beat. ``named``: ranks in
    words."""

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
        named: Callable[[Sequence[int]], str],
    ) -> None:
        self.verdict = ""
        self.cut_off = False  # the store no longer answers: that is the verdict
        self.beat = beat_of(world)
        self.next: tuple[int, dict[str, Place]] = (-1, {})  # the next rank, and where it was at the last beat
        self._keys, self._doing, self._calls, self._after = keys, doing, calls, after
        self._rank, self._world, self._named = rank, world, named
        self._watched = (rank + 1) % world
        self.tasks: list[weakref.WeakMethod[Callable[[dist.Store], None]]] = []  # run after each beat
        self._count = self._still = 0
        self._seen = ""
        root = root_store(store)
        self._port = root.port if isinstance(root, dist.TCPStore) else -1
        self._line = StoreClient(store, timeout)  # its own client: other requests do not delay the beat
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
                # A host that has finished ends the store, while others are still in their last collectives.
                found = str(error) if time.monotonic() - reached >= SILENT else ""
                self.cut_off = bool(found)
            if found and not self._stop.is_set():
                self.verdict = self._as_seen_here(found)
                aborts.break_all(self._port)
            self._after(self.verdict)
            if self.verdict:
                return

    def _show(self, store: dist.Store) -> None:
        self._count += 1
        store.set(f"{self._keys}/alive/{self._rank}", f"{self._count}\n{self._doing()}\n{self._calls}")

    def look(self, store: dist.Store) -> str:
        self._show(store)
        self.tasks = [task for task in self.tasks if task() is not None]
        for task in self.tasks:
            if (run := task()) is not None:
                run(store)
        if found := look(store, f"{self._keys}/verdict") or said_by_launcher(store):
            return found
        if self._watched == self._rank:
            return ""
        sign = look(store, f"{self._keys}/alive/{self._watched}")
        self._still = self._still + 1 if sign == self._seen else 0
        self._seen = sign
        self.next = (self._watched, places_in(shown_in(sign)[1]))
        # Counted in this rank's beats: a suspended job does not make ranks silent.
        if not sign or self._still * self.beat < max(SILENT, 3 * self.beat):
            return ""
        return self._given_up(store, self._watched)

    def _as_seen_here(self, verdict: str) -> str:
        """A verdict, in other words where it is on this rank, which is alive: it was stopped or cut off for a while."""
        me = self._named([self._rank])
        missed = verdict.removeprefix(f"{me} did not respond: ")
        return verdict if missed == verdict else f"{me} was stopped, or cut off from the others, who saw {missed}"

    def _given_up(self, store: dist.Store, rank: int) -> str:
        """The verdict on a rank whose heartbeat has stopped: its own error if it has published one; none if it has
        finished, unless that was before a call that this rank is in."""
        words = {k: text for k in TOLD if (text := look(store, f"{self._keys}/{k}/{rank}"))}
        if words.get("left"):
            if self._calls.beyond(self.next[1]):
                text = f"{self._named([rank])} finished: its main returned"
                return store.compare_set(f"{self._keys}/verdict", "", text).decode()
            self._watched, self._still, self._seen = (rank + 1) % self._world, 0, ""
            return ""
        own = f"{self._named([rank])} failed: {words['error']}" if words.get("error") else words.get("heard")
        text = own or f"{self._named([rank])} did not respond: no sign of life for {max(SILENT, 3 * self.beat):.0f} s"
        return store.compare_set(f"{self._keys}/verdict", "", text).decode()


def said_by_launcher(store: dist.Store) -> str:
    """The launcher's report, or ""."""
    root = root_store(store)
    return root.get(LAUNCHER).decode() if root.check([LAUNCHER]) else ""


def shown_in(sign: str) -> tuple[str, str]:
    """(the call of autopar that a rank works in, "" if it waits for others; its places), from its heartbeat."""
    _, doing, places = (sign.split("\n") + ["", "", ""])[:3]
    return doing, places
