"""Who failed? Ranks tell each other through the store, so that an error names a rank and not a socket.

A collective that loses a peer fails on the survivors as "Connection closed by peer" or as a timeout. Both say
nothing about the cause. So every rank
  - beats: a thread counts up ``alive/<rank>`` about once a second,
  - reports its own error (``error/<rank>``), be it caught by `reporting` or uncaught,
  - reports a collective that failed (``waiting/<rank>``).
A survivor reads these keys of its group and says which ranks failed and with what, which are gone without a word
(their count stands still), and which are alive but did not join.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch.distributed as dist

from autopar.adapters.distributed import default_store, own_client

BEAT = 1.0  # seconds between two signs of life
SILENCE = 2.5 * BEAT  # a count that stands still this long belongs to a dead rank


class CollectiveError(RuntimeError):
    """A collective failed because of other ranks. The message names the axis, the node and the ranks."""


class FailureBoard:
    """What the ranks of one world know of each other's failures. One per process and default group."""

    def __init__(self, store: dist.Store, rank: int):
        self.store = dist.PrefixStore("autopar/failures", store)
        self.rank = rank
        self._told: set[str] = set()  # the keys of ours that say something
        self._stop = threading.Event()
        # A client of its own: a blocking wait on a shared one would stop the beat.
        self._beats = dist.PrefixStore("autopar/failures", own_client(store))
        self._beats.add(f"alive/{rank}", 1)
        self._thread = threading.Thread(target=self._beat, name="autopar-alive", daemon=True)
        if dist.get_world_size() > 1:
            self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            try:
                self._beats.add(f"alive/{self.rank}", 1)
            except (RuntimeError, OSError):  # the store went away with its host: nobody can read us any more
                return

    def close(self) -> None:
        """Stop beating."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * BEAT)

    def report(self, error: BaseException) -> None:
        """Publish this rank's own error. A CollectiveError is not one: its cause is elsewhere."""
        if isinstance(error, CollectiveError):
            return
        first = (str(error).splitlines() or [""])[0]
        self._tell("error", f"{type(error).__name__}: {first}"[:500])

    def clear(self) -> None:
        """Take back what this rank told: its error was handled, and it waits no longer."""
        for kind in list(self._told):
            self._tell(kind, "")

    def explain(self, ranks: Sequence[int], what: str) -> str:
        """Why a collective among ``ranks`` failed here, in words; asks for at most about SILENCE seconds."""
        self._tell("waiting", what)
        others = [r for r in ranks if r != self.rank]
        try:
            return self._ask(others)
        except (RuntimeError, OSError):
            return "the store cannot be reached; rank 0 or the launcher that hosts it is gone"

    def errors(self, ranks: Sequence[int]) -> dict[int, str]:
        """What the others have reported so far."""
        return self._texts("error", [r for r in ranks if r != self.rank])

    def _ask(self, others: Sequence[int]) -> str:
        # Everybody, not only the group: the cause may be a rank that a silent member of the group waits for.
        everybody = [r for r in range(dist.get_world_size()) if r != self.rank]
        before = self._counts(everybody)
        deadline = time.monotonic() + SILENCE
        while time.monotonic() < deadline:
            errors = self._texts("error", everybody)
            if errors:
                return "; ".join(f"rank {r} failed: {text}" for r, text in errors.items())
            time.sleep(0.05)
        after = self._counts(everybody)
        dead = [r for r in everybody if after[r] == before[r]]
        if dead:
            return f"{_ranks(dead)} did not respond: no sign of life for {SILENCE:.1f} s"
        waiting = self._texts("waiting", others)
        absent = [r for r in others if r not in waiting]
        if absent:
            return f"{_ranks(absent)} did not respond: alive, but never joined this collective"
        stories = ", ".join(f"rank {r} in {text}" for r, text in waiting.items())
        return f"every rank waited for another one: {stories}"

    def _counts(self, ranks: Sequence[int]) -> dict[int, int]:
        return {r: self.store.add(f"alive/{r}", 0) for r in ranks}

    def _texts(self, kind: str, ranks: Sequence[int]) -> dict[int, str]:
        there = [r for r in ranks if self.store.check([f"{kind}/{r}"])]
        texts = {r: self.store.get(f"{kind}/{r}").decode() for r in there}
        return {r: text for r, text in texts.items() if text}

    def _tell(self, kind: str, text: str) -> None:
        (self._told.add if text else self._told.discard)(kind)
        try:
            self.store.set(f"{kind}/{self.rank}", text)
        except (RuntimeError, OSError):  # the store is gone: its own error tells more than this one
            return


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


_boards: dict[int, FailureBoard] = {}


def board() -> FailureBoard:
    """The board of the default process group, made at the first call. Not collective."""
    store = default_store()
    key = id(store)
    if key not in _boards:
        for old in _boards.values():
            old.close()
        _boards.clear()
        _boards[key] = FailureBoard(store, dist.get_rank())
        _install_hook()
    return _boards[key]


def clear() -> None:
    """Take back what this process told, if anything."""
    for mine in _boards.values():
        mine.clear()


def close() -> None:
    """Stop the board's thread (at exit, or before the process group is destroyed)."""
    for old in _boards.values():
        old.close()
    _boards.clear()


@contextmanager
def reporting() -> Iterator[None]:
    """Errors that leave this block are published, so that the other ranks' errors can name this rank."""
    mine = board()
    mine.clear()
    try:
        yield
    except BaseException as error:
        mine.report(error)
        raise


_previous_hook = sys.excepthook


def _install_hook() -> None:
    if sys.excepthook is not _report_uncaught:
        global _previous_hook
        _previous_hook = sys.excepthook
        sys.excepthook = _report_uncaught
        atexit.register(close)


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for mine in _boards.values():
        mine.report(error)
    _previous_hook(kind, error, trace)
