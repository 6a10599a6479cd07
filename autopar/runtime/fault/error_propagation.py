"""Who failed? Ranks tell each other through the store, so that an error names a rank and not a socket.

A collective that loses a peer fails on the survivors as "Connection closed by peer" or as a timeout. Both say
nothing about the cause. So every rank
  - beats (`autopar.runtime.fault.heartbeat`),
  - reports its own error (``error/<rank>``), be it caught by `error_context` or uncaught,
  - reports a collective that failed (``waiting/<rank>``), and that it has finished (``left/<rank>``).
A survivor reads these keys and says which ranks failed and with what, which are gone without a word (their sign of life
stands still), which have finished, and which are alive but did not join.

Of a large world each looks at a few ranks, those behind it, and tells all what it finds in one place of the store
(`ErrorLog`): as many questions as there are ranks when all fail together, and not their square.
"""

from __future__ import annotations

import bisect
import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from autopar.adapters.distributed import hosted_by_launcher, is_backend_error
from autopar.runtime.fault import aborts
from autopar.runtime.fault.call_sequence import Places
from autopar.runtime.fault.heartbeat import BEAT, Heartbeat, beat_of, said_by_launcher, shown_in
from autopar.runtime.fault.store_client import StoreClient, StoreError, look

MOST = 8  # notices of a kind
TRIES = 100  # others may write at the same moment; each of them fills a place


class ErrorLog:
    """Those under a key. A notice has a kind, the rank that it is about, and a text."""

    def __init__(self, key: str) -> None:
        self._key = key

    def read(self, store: dist.Store) -> Mapping[str, dict[int, str]]:
        """Kind -> rank -> text, the first one of each rank."""
        found: dict[str, dict[int, str]] = defaultdict(dict)
        for line in look(store, self._key).splitlines():
            kind, rank, text = json.loads(line)
            found[kind].setdefault(rank, text)
        return found

    def tell(self, store: dist.Store, kind: str, rank: int, text: str) -> None:
        """Add a notice, unless there are `MOST` of its kind, or the same one."""
        line, start = json.dumps([kind, rank, text]), json.dumps([kind])[:-1] + ","

        def added(lines: list[str]) -> list[str]:
            full = sum(one.startswith(start) for one in lines) >= MOST
            return lines if full or line in lines else [*lines, line]

        self._change(store, added)

    def take_back(self, store: dist.Store, kind: str, rank: int, text: str) -> None:
        """Remove a notice, if it is there."""
        line = json.dumps([kind, rank, text])
        self._change(store, lambda lines: [one for one in lines if one != line])

    def _change(self, store: dist.Store, change: Callable[[list[str]], list[str]]) -> None:
        seen = look(store, self._key)
        for _ in range(TRIES):
            wanted = "\n".join(change(seen.splitlines()))
            if wanted == seen:
                return
            found = store.compare_set(self._key, seen, wanted).decode()
            if found == wanted:
                return
            seen = found


SILENCE = 2.5 * BEAT  # once something has failed: a count that stands still this long belongs to a dead rank
NEAR = 8  # ranks of a group that one rank looks at
NEXT = 2  # and of the world
EACH = 25e-6  # seconds of the store for a question
LINGER = 4.0  # seconds that the store of a rank outlives its work, for the others' last questions

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or read. The message names the rank."""


class CollectiveError(RuntimeError):
    """A collective failed because of other ranks. The message says what failed, on which rank, and names the others."""

    why = ""  # the part that names them


class ErrorBoard:
    """What the ranks of one world know of each other's failures. One per process and default group. ``line``: to the
    store; ``heartbeat``: of a world of several."""

    def __init__(self, store: dist.Store, rank: int, world: int, keys: str, timeout: float) -> None:
        self.rank, self._keys, self._world = rank, keys, range(world)
        self._told: dict[str, tuple[int, str]] = {}  # what we say, by kind: about which rank, and what
        self._own = ""  # the error of this rank's last call: all ranks may have had it, and some still say so
        self._notices = ErrorLog(f"{keys}/notices")
        self.doing = ""  # the call of autopar that this rank is in, unless it waits for others there
        self.calls = Places()
        self.beat = beat_of(world)
        self.line = StoreClient(store, timeout)
        if world > 1:
            self.line.ask(lambda store: store.check([keys]))  # connects now, and not when something has failed
        self.thread = threading.get_ident()  # of the training loop: where calls of autopar come from
        self._noticed, self._ends = threading.Event(), False
        doing, after = lambda: self.doing, self._look_after
        beats = world > 1
        self.heartbeat = Heartbeat(store, rank, world, keys, doing, self.calls, after, timeout) if beats else None

    def close(self) -> None:
        """This rank ends: because it has finished, or with the error that it told, which is a verdict for all. A rank
        that hosts the store stays until the others have ended, `LINGER` seconds at most."""
        self._noticed.set()
        if self.heartbeat is None or self._cut_off():
            return
        words = {kind: text for kind, (_, text) in self._told.items()}
        why = f"rank {self.rank} failed: {words['error']}" if "error" in words else words.get("heard")
        try:
            if why is None:
                self._tell("left", "finished")
            else:
                self.give_verdict(why)
            ended = f"{self._keys}/ended"
            self.line.ask(lambda store: store.add(ended, 1))
            end = time.monotonic() + (LINGER if self.rank == 0 and not hosted_by_launcher() else 0.0)
            while time.monotonic() < end and self.line.ask(lambda store: store.add(ended, 0)) < len(self._world):
                time.sleep(0.05)
        except StoreError:  # it is gone, and who waits for it knows
            pass
        self.heartbeat.close()

    def give_verdict(self, why: str) -> None:
        """Nothing can go on, on any rank; on this one from now on. Raises StoreError."""
        if self.heartbeat is not None:
            self.heartbeat.verdict = why
        self.line.ask(lambda store: store.compare_set(f"{self._keys}/verdict", "", why))

    def first_to_say(self, key: str, text: str) -> str | None:
        """What the first rank has said under a key. None if this rank has told an error, or the store is gone."""
        if not self._told.keys().isdisjoint(("heard", "error")):
            return None
        try:
            return self.line.ask(lambda store: store.compare_set(f"{self._keys}/{key}", "", text)).decode()
        except StoreError:
            return None

    # --- what this rank tells -------------------------------------------------------------------------

    def report(self, error: BaseException) -> None:
        """Publish this rank's own error. A CollectiveError is not one: its cause is elsewhere, and is passed on."""
        if isinstance(error, CollectiveError):
            self._tell("heard", error.why)
        else:
            first = (str(error).splitlines() or [""])[0]
            self._own = f"{type(error).__name__}: {first}"[:500]
            self._tell("error", self._own)

    def clear(self) -> None:
        """Take back what this rank told: its error was handled, and it waits no longer."""
        self._noticed.clear()
        for kind in list(self._told):
            self._tell(kind, "")

    def succeeded(self) -> None:
        self._own = ""

    def _tell(self, kind: str, text: str, about: int | None = None) -> None:
        """This rank's word of a kind, for those that look at it; and for all, unless it is about one collective."""
        before = self._told.pop(kind, None)
        rank = self.rank if about is None else about
        if text:
            self._told[kind] = rank, text

        def tell(store: dist.Store) -> None:
            if about is None:
                store.set(f"{self._keys}/{kind}/{self.rank}", text)
            if kind != "waiting" and before is not None:
                self._notices.take_back(store, kind, *before)
            if kind != "waiting" and text:
                self._notices.tell(store, kind, rank, text)

        if len(self._world) > 1 and not self._cut_off():
            try:
                self.line.ask(tell)
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

    def ended(self, what: str, verdict: str) -> CollectiveError:
        """The error of a call that is in vain, since a verdict is known."""
        self._noticed.set()
        return self._error(what, verdict)

    def _error(self, what: str, why: str, raw: str = "") -> CollectiveError:
        out = CollectiveError(f"comm: {what} failed on rank {self.rank}: {why}{raw}")
        out.why = why
        return out

    def _look_after(self, verdict: str) -> None:
        """After a beat: if waits that raise nothing are in vain, they are ended; on a thread, since that takes time."""
        ranks = [] if verdict else aborts.broken_group()
        if not self._ends and (verdict or ranks) and aborts.there_are_some():
            self._ends = True
            threading.Thread(target=self._end_waits, args=(verdict, ranks), name="autopar-end", daemon=True).start()

    def _end_waits(self, verdict: str, ranks: Sequence[int]) -> None:
        what = aborts.last_started() or self.doing or "a collective"
        error = self._error(what, verdict or self.explain(ranks, what))
        aborts.end_waits(self.thread, error, self._noticed)

    def translated(self, error: BaseException, action: str) -> BaseException:
        """A backend's error in words that name ranks; any other error itself."""
        if isinstance(error, CollectiveError) or not (isinstance(error, StoreError) or is_backend_error(error)):
            return error
        return self.failed(action, self._world, error)

    def explain(self, ranks: Sequence[int], what: str) -> str:
        """Why something among ``ranks`` failed here, in words; asks for at most about SILENCE seconds."""
        if self._cut_off():
            return self.verdict
        self._tell("waiting", what)
        try:
            return self._ask(ranks)
        except StoreError as error:
            return self.verdict or str(error)

    def trouble(self, ranks: Sequence[int]) -> str:
        """Why waiting for ``ranks`` is in vain, if it is known: a verdict, an error, a rank that has finished."""
        try:
            return self.line.ask(lambda store: self._known(store, ranks, ranks))
        except StoreError as error:
            return self.verdict or str(error)

    def at_work(self, ranks: Sequence[int]) -> dict[int, str]:
        """Which of ``ranks`` are in a call of autopar and do not wait for others there, and in which call."""
        try:
            signs = self.line.ask(lambda store: self._signs(store, ranks))
        except StoreError:
            return {}
        return {r: doing for r, sign in signs.items() if (doing := shown_in(sign)[0])}

    def gone_on(self, name: str, number: int) -> Callable[[], int | None]:
        """Asked first, then called: the next rank, if it was beyond call ``number`` of ``name`` when that was asked."""
        rank, places = self.heartbeat.next if self.heartbeat is not None else (-1, {})
        passed = name in places and places[name].passed(number)
        return lambda: rank if passed else None

    def near(self, ranks: Sequence[int], most: int = NEAR) -> list[int]:
        """Those of ``ranks`` (in order) that this rank looks at: all others if they are few, else the next ones."""
        start = bisect.bisect_right(ranks, self.rank)
        found = (ranks[(start + i) % len(ranks)] for i in range(min(len(ranks), most + 1)))
        return [r for r in found if r != self.rank][:most]

    def _cut_off(self) -> bool:
        """Whether the store is known not to answer: who asks would wait as long once more."""
        return self.heartbeat is not None and self.heartbeat.cut_off

    @property
    def verdict(self) -> str:
        """Why nothing can go on, as far as this rank knows, or empty."""
        return self.heartbeat.verdict if self.heartbeat is not None else ""

    def _known(self, store: dist.Store, failing: Sequence[int], needed: Sequence[int]) -> str:
        told = self._notices.read(store)
        others = {r: text for r, text in told["error"].items() if r in failing and r != self.rank}
        errors = {r: text for r, text in others.items() if text != self._own}
        if errors:
            return "; ".join(f"rank {r} failed: {text}" for r, text in sorted(errors.items()))
        if verdict := said_by_launcher(store) or self.verdict:
            return verdict
        # What another rank heard, unless it is about this one: a rank that waits may look as if it were the cause.
        me = re.compile(rf"\branks? ([\d, ]*, )?{self.rank}\b")
        heard = [t for r, t in told["heard"].items() if r in failing and r != self.rank and not me.search(t)]
        left = {r for r in told["left"] if r in needed}
        if told["left"]:
            left |= self._texts(store, "left", self.near(needed)).keys()
        return heard[0] if heard else f"{ranks_named(sorted(left))} finished: its main returned" if left else ""

    def _ask(self, ranks: Sequence[int]) -> str:
        # The world, and not only the group: the cause may be a rank that a silent member of the group waits for.
        others = self.near(ranks)
        looked = list(dict.fromkeys([*others, *self.near(self._world, max(NEXT, NEAR + NEXT - len(others)))]))
        sees_all = len(looked) == len(self._world) - 1
        before = self.line.ask(lambda store: self._signs(store, looked))
        start, silent, patience = time.monotonic(), looked, SILENCE * self.beat / BEAT
        while (waited := time.monotonic() - start) < patience and (silent or waited < 1.5 * self.beat or not sees_all):
            known = self.line.ask(lambda store: self._known(store, self._world, ranks))
            if known:
                return known
            time.sleep(min(0.05 + len(self._world) * EACH, 1.0))
            after = self.line.ask(lambda store: self._signs(store, looked))
            silent = [r for r in looked if after[r] == before[r]]
        left = self.line.ask(lambda store: self._texts(store, "left", silent))
        if dead := self._with_others("silent", [r for r in silent if r not in left], self._world, sees_all):
            return f"{ranks_named(dead)} did not respond: no sign of life for {patience:.1f} s"
        waiting = self.line.ask(lambda store: self._texts(store, "waiting", others))
        sees_all = len(others) == len(ranks) - (self.rank in ranks)
        if absent := self._with_others("absent", [r for r in others if r not in waiting], ranks, sees_all):
            return f"{ranks_named(absent)} did not respond: alive, but never joined this collective"
        stories = ", ".join(f"rank {r} in {text}" for r, text in waiting.items())
        return f"every rank waited for another one: {stories}"

    def _with_others(self, kind: str, found: list[int], among: Sequence[int], sees_all: bool) -> list[int]:
        """What this rank has found of those that it looks at, with what others tell of theirs."""
        if sees_all:
            return found
        if found:
            self._tell(kind, "looked at", about=found[0])
        else:
            time.sleep(0.5 * self.beat)  # until they have told
        told = self.line.ask(self._notices.read)[kind]
        return sorted({*found, *(r for r in told if r in among and r != self.rank)})

    def _signs(self, store: dist.Store, ranks: Sequence[int]) -> dict[int, str]:
        return {r: look(store, f"{self._keys}/alive/{r}") for r in ranks}

    def _texts(self, store: dist.Store, kind: str, ranks: Sequence[int]) -> dict[int, str]:
        return {r: text for r in ranks if (text := look(store, f"{self._keys}/{kind}/{r}"))}


def ranks_named(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 3, 4"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
