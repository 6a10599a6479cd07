"""Who failed? Ranks tell each other through the store, so that an error names a rank and not a socket.

A collective that loses a peer fails on the survivors as "Connection closed by peer" or as a timeout. Both say
nothing about the cause. So every rank
  - beats (`autopar.runtime.heartbeat`),
  - reports its own error (``error/<rank>``), be it caught by `reporting` or uncaught,
  - reports a collective that failed (``waiting/<rank>``), and that it has finished (``left/<rank>``).
A survivor reads these keys and says which ranks failed and with what, which are gone without a word (their count stands
still), which have finished, and which are alive but did not join.
"""

from __future__ import annotations

import atexit
import itertools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.adapters.distributed import default_store, hosted_by_launcher, is_backend_error, root_store
from autopar.runtime import quiet_groups
from autopar.runtime.heartbeat import BEAT, LAUNCHER, TOLD, Heartbeat
from autopar.runtime.store_line import Answer, Line, StoreError

SILENCE = 2.5 * BEAT  # once something has failed: a count that stands still this long belongs to a dead rank
LINGER = 4.0  # seconds that the store of a rank outlives its work, for the others' last questions

T = TypeVar("T")


class CollectiveError(RuntimeError):
    """A collective failed because of other ranks. The message says what failed, on which rank, and names the others."""

    why = ""  # the part that names them


class FailureBoard:
    """What the ranks of one world know of each other's failures. One per process and default group."""

    def __init__(self, store: dist.Store, rank: int, world: int, keys: str, timeout: float) -> None:
        self.rank, self._keys = rank, keys
        self._everybody = [r for r in range(world) if r != rank]
        self._told: dict[str, str] = {}  # what we say, by kind
        self.doing = ""  # the call of autopar that this rank is in, unless it waits for others there
        self._line = Line(store, timeout)
        if self._everybody:
            self._line.ask(lambda store: store.check([keys]))  # connects now, and not when something has failed
        self.thread = threading.get_ident()  # of the training loop: where calls of autopar come from
        self._noticed, self._ends = threading.Event(), False
        doing = lambda: self.doing  # noqa: E731
        after = self._look_after
        self._heartbeat = Heartbeat(store, rank, world, keys, doing, after, timeout) if self._everybody else None

    def close(self) -> None:
        """This rank ends: because it has finished, or with the error that it told, which is a verdict for all. A rank
        that hosts the store stays until the others have read it, `LINGER` seconds at most."""
        self._noticed.set()
        if self._heartbeat is None:
            return
        words = {"heard": self._told.get("heard"), "error": self._told.get("error")}
        why = f"rank {self.rank} failed: {words['error']}" if words["error"] else words["heard"]
        try:
            if why is None:
                self._tell("left", "finished")
            else:
                verdict: str = why
                self._line.ask(lambda store: store.compare_set(f"{self._keys}/verdict", "", verdict))
            end = time.monotonic() + (LINGER if self.rank == 0 and not hosted_by_launcher() else 0.0)
            while time.monotonic() < end and self._line.ask(self._unheard):
                time.sleep(0.05)
        except StoreError:  # it is gone, and who waits for it knows
            pass
        self._heartbeat.close()

    def _unheard(self, store: dist.Store) -> bool:
        """Whether some rank has said nothing yet of how it ends."""
        ended = [self._texts(store, kind, self._everybody) for kind in TOLD]
        return any(all(r not in texts for texts in ended) for r in self._everybody)

    def first_to_say(self, key: str, text: str) -> str | None:
        """What the first rank has said under a key: this text, if it is this one. None if this rank has told an error,
        or if the store is gone."""
        if not self._told.keys().isdisjoint(("heard", "error")):
            return None
        try:
            return self._line.ask(lambda store: store.compare_set(f"{self._keys}/{key}", "", text)).decode()
        except StoreError:
            return None

    # --- what this rank tells -------------------------------------------------------------------------

    def report(self, error: BaseException) -> None:
        """Publish this rank's own error. A CollectiveError is not one: its cause is elsewhere, and is passed on."""
        if isinstance(error, CollectiveError):
            self._tell("heard", error.why)
        else:
            first = (str(error).splitlines() or [""])[0]
            self._tell("error", f"{type(error).__name__}: {first}"[:500])

    def clear(self) -> None:
        """Take back what this rank told: its error was handled, and it waits no longer."""
        self._noticed.clear()
        for kind in list(self._told):
            self._tell(kind, "")

    def _tell(self, kind: str, text: str) -> None:
        self._told.pop(kind, None)
        if text:
            self._told[kind] = text
        if self._everybody:
            try:
                self._line.ask(lambda store: store.set(f"{self._keys}/{kind}/{self.rank}", text))
            except StoreError:  # its own error tells more than this one
                return

    @contextmanager
    def at(self, doing: str) -> Iterator[None]:
        """What this rank does in the block, for those that wait for it; empty: it waits for others."""
        before, self.doing = self.doing, doing
        try:
            yield
        finally:
            self.doing = before

    # --- what it hears --------------------------------------------------------------------------------

    def ask(self, question: Callable[[dist.Store], T], limit: float = 0.0) -> T:
        """A question to the store that may take ``limit`` seconds. Raises StoreError."""
        return self._line.ask(question, limit + self._line.patience)

    def failed(self, what: str, ranks: Sequence[int], error: BaseException | None = None) -> CollectiveError:
        """The error of something that needed ``ranks`` and failed, with the backend's words if there are any."""
        self._noticed.set()
        why = self.explain(ranks, what)
        raw = (
            (str(error).splitlines() or [""])[0][:160]
            if error is not None and not isinstance(error, StoreError)
            else ""
        )
        return self._error(what, why, f" [{raw}]" if raw else "")

    def _error(self, what: str, why: str, raw: str = "") -> CollectiveError:
        out = CollectiveError(f"comm: {what} failed on rank {self.rank}: {why}{raw}")
        out.why = why
        return out

    def _look_after(self, verdict: str) -> None:
        """After a beat: if waits that raise nothing are in vain, they are ended; on a thread, since that takes time."""
        ranks = [] if verdict else quiet_groups.broken_group()
        if not self._ends and (verdict or ranks) and quiet_groups.there_are_some():
            self._ends = True
            threading.Thread(target=self._end_waits, args=(verdict, ranks), name="autopar-end", daemon=True).start()

    def _end_waits(self, verdict: str, ranks: Sequence[int]) -> None:
        what = quiet_groups.last_started() or self.doing or "a collective"
        error = self._error(what, verdict or self.explain(ranks, what))
        quiet_groups.end_waits(self.thread, error, self._noticed)

    def translated(self, error: BaseException, action: str) -> BaseException:
        """A backend's error in words that name ranks; any other error itself."""
        if isinstance(error, CollectiveError) or not (isinstance(error, StoreError) or is_backend_error(error)):
            return error
        return self.failed(action, [self.rank, *self._everybody], error)

    def explain(self, ranks: Sequence[int], what: str) -> str:
        """Why something among ``ranks`` failed here, in words; asks for at most about SILENCE seconds."""
        self._tell("waiting", what)
        try:
            return self._ask([r for r in ranks if r != self.rank])
        except StoreError as error:
            return self._verdict() or str(error)

    def trouble(self, ranks: Sequence[int]) -> str:
        """Why waiting for ``ranks`` is in vain, if it is known: a verdict, an error, a rank that has finished."""
        others = [r for r in ranks if r != self.rank]
        try:
            return self._line.ask(lambda store: self._known(store, others, others))
        except StoreError as error:
            return self._verdict() or str(error)

    def at_work(self, ranks: Sequence[int]) -> dict[int, str]:
        """Which of ``ranks`` are in a call of autopar and do not wait for others there, and in which call."""
        try:
            return self._line.ask(lambda store: self._texts(store, "doing", ranks))
        except StoreError:
            return {}

    def _verdict(self) -> str:
        return self._heartbeat.verdict if self._heartbeat is not None else ""

    def _known(self, store: dist.Store, failing: Sequence[int], needed: Sequence[int]) -> str:
        errors = self._texts(store, "error", failing)
        if errors:
            return "; ".join(f"rank {r} failed: {text}" for r, text in errors.items())
        root = root_store(store)
        if root.check([LAUNCHER]):
            return root.get(LAUNCHER).decode()
        if verdict := self._verdict():
            return verdict
        # What another rank heard, unless it is about this one: a rank that waits may look as if it were the cause.
        me = re.compile(rf"\branks? ([\d, ]*, )?{self.rank}\b")
        heard = [t for t in self._texts(store, "heard", failing).values() if not me.search(t)]
        left = self._texts(store, "left", needed)
        return heard[0] if heard else f"{_ranks(list(left))} finished: its main returned" if left else ""

    def _ask(self, others: Sequence[int]) -> str:
        # Everybody, not only the group: the cause may be a rank that a silent member of the group waits for.
        before = self._line.ask(self._counts)
        start, silent = time.monotonic(), self._everybody
        while (waited := time.monotonic() - start) < SILENCE and (silent or waited < 1.5 * BEAT):
            known = self._line.ask(lambda store: self._known(store, self._everybody, others))
            if known:
                return known
            time.sleep(0.05)
            after = self._line.ask(self._counts)
            silent = [r for r in self._everybody if after[r] == before[r]]
        left = self._line.ask(lambda store: self._texts(store, "left", silent))
        dead = [r for r in silent if r not in left]
        if dead:
            return f"{_ranks(dead)} did not respond: no sign of life for {SILENCE:.1f} s"
        waiting = self._line.ask(lambda store: self._texts(store, "waiting", others))
        absent = [r for r in others if r not in waiting]
        if absent:
            return f"{_ranks(absent)} did not respond: alive, but never joined this collective"
        stories = ", ".join(f"rank {r} in {text}" for r, text in waiting.items())
        return f"every rank waited for another one: {stories}"

    def _counts(self, store: dist.Store) -> dict[int, int]:
        return {r: store.add(f"{self._keys}/alive/{r}", 0) for r in self._everybody}

    def _texts(self, store: dist.Store, kind: str, ranks: Sequence[int]) -> dict[int, str]:
        there = [r for r in ranks if store.check([f"{self._keys}/{kind}/{r}"])]
        texts = {r: store.get(f"{self._keys}/{kind}/{r}").decode() for r in there}
        return {r: text for r, text in texts.items() if text}


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


# --- the board of this process --------------------------------------------------------------------------

_boards: dict[int, FailureBoard] = {}
_made = itertools.count()  # a store may outlive a default group, and serve the next


def board() -> FailureBoard:
    """The board of the default process group, made at the first call. Not collective."""
    store = default_store()
    if id(store) not in _boards:
        _boards[id(store)] = _new_board(store, dist.get_rank(), dist.get_world_size())
    return _boards[id(store)]


def _new_board(store: dist.Store, rank: int, world: int, timeout: float = inf) -> FailureBoard:
    close()
    try:
        made = FailureBoard(store, rank, world, f"autopar/failures/{next(_made)}", timeout)
    except StoreError as error:
        raise CollectiveError(f"comm: joining the others failed on rank {rank}: {error}") from error
    _install_hook()
    return made


def starting(store: dist.Store, rank: int, world: int, limit: float, call: Callable[[], None]) -> None:
    """A call that makes the default process group over ``store``: ranks see each other live from before it.

    Raises CollectiveError that names the ranks which do not join within ``limit`` seconds.
    """
    mine = _new_board(store, rank, world, limit)
    try:
        _wait_for(mine, limit, call, "starting the ranks", range(world))
    except BaseException as error:
        mine.report(error)
        mine.close()
        raise
    _boards[id(default_store())] = mine


def clear() -> None:
    """Take back what this process told, if anything."""
    for mine in _boards.values():
        mine.clear()


def first_to_say(key: str, text: str) -> str | None:
    """`FailureBoard.first_to_say`, on the board that there is or was: the default group may be gone."""
    return next((mine.first_to_say(key, text) for mine in _boards.values()), None)


def close() -> None:
    """This rank has finished: at exit, or before the process group is destroyed."""
    for old in _boards.values():
        old.close()
    _boards.clear()


# --- errors on their way --------------------------------------------------------------------------------


@contextmanager
def reporting(action: str = "a collective") -> Iterator[None]:
    """Errors that leave this block name ranks, here and elsewhere.

    An error of this rank is published, so that the others' errors can name this rank and its error. An error of a
    backend ("Connection closed by peer") becomes a CollectiveError that names ``action`` and the ranks which failed:

        with autopar.reporting("saving the optimizer"):
            torch.distributed.checkpoint.save(...)
    """
    mine = board()
    mine.clear()
    mine.thread = threading.get_ident()
    try:
        with mine.at(mine.doing or action):
            yield
    except BaseException as error:
        found = mine.translated(error, action)
        mine.report(found)
        if found is error:
            raise
        raise found from error


@contextmanager
def explained(what: str, ranks: Sequence[int]) -> Iterator[None]:
    """RuntimeErrors in this block, which does nothing but communicate with ``ranks``, become CollectiveErrors."""
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise board().failed(what, ranks, error) from error


def within(limit: float, call: Callable[[], T], what: str, ranks: Sequence[int]) -> T:
    """A call that blocks until ``ranks`` join, for at most ``limit`` seconds: torch's own limits do not count while the
    store is silent. Raises CollectiveError as soon as it is known that one of them will not."""
    return _wait_for(board(), limit, call, what, ranks)


def _wait_for(mine: FailureBoard, limit: float, call: Callable[[], T], what: str, ranks: Sequence[int]) -> T:
    answer, start, look = Answer(), time.monotonic(), BEAT
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> T:
        if device is not None:
            torch.cuda.set_device(device)  # each thread has its own
        return call()

    threading.Thread(target=answer.run, args=(run,), name="autopar-join", daemon=True).start()
    with mine.at(""):
        while not answer.wait(0.25):
            waited = time.monotonic() - start
            if waited > limit + BEAT or (waited > look and mine.trouble(ranks)):
                raise mine.failed(what, ranks)
            look += BEAT if waited > look else 0.0
    if answer.error is not None:
        raise mine.translated(answer.error, what)
    found: T = answer.value
    return found


_previous_hook = sys.excepthook


def _install_hook() -> None:
    if sys.excepthook is not _report_uncaught:
        global _previous_hook
        _previous_hook = sys.excepthook
        sys.excepthook = _report_uncaught
        atexit.register(close)


def named(error: BaseException) -> BaseException:
    """An error that ends this rank: published if it is its own, else with the ranks that caused it."""
    for mine in _boards.values():
        found = mine.translated(error, "a collective")
        mine.report(found)
        if found is not error:
            found.__cause__ = error
            return found
    return error


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    found = named(error)
    _previous_hook(type(found), found, trace)
