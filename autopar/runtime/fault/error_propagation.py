"""Error propagation: ranks report failures through the store, so that an error names a rank and not a socket.

A collective that loses a peer fails on the survivors as "Connection closed by peer" or as a timeout. Neither names
the cause. So every rank
  - writes a heartbeat (`autopar.runtime.fault.heartbeat`),
  - reports its own error (``error/<rank>``), caught by `error_context` or uncaught,
  - reports a collective that failed (``waiting/<rank>``), and that it has finished (``left/<rank>``).
A survivor reads these keys. Its error names the ranks that failed, and with which error; those that died (their
heartbeat has stopped); those that have finished; and those that are alive but did not join.

In a large world each rank reads only the keys of a few next ranks and publishes what it finds in one place of the store
(`ErrorLog`): if all ranks fail together, requests grow with the number of ranks, and not with its square.
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
from types import MappingProxyType
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.adapters.distributed import hosted_by_launcher, is_backend_error
from autopar.runtime.fault import aborts
from autopar.runtime.fault.call_sequence import Places
from autopar.runtime.fault.flight import write_flight
from autopar.runtime.fault.heartbeat import BEAT, Heartbeat, beat_of, said_by_launcher, shown_in
from autopar.runtime.fault.store_client import StoreClient, StoreError, look

MOST = 8  # notices kept per kind
TRIES = 100  # to write, while others write at the same time; each of them adds a notice


class ErrorLog:
    """The notices under a key of the store. A notice has a kind, the rank that it is about, and a text."""

    def __init__(self, key: str) -> None:
        self._key = key

    def read(self, store: dist.Store) -> Mapping[str, dict[int, str]]:
        """Kind -> rank -> text, the first notice of each rank."""
        found: dict[str, dict[int, str]] = defaultdict(dict)
        for line in look(store, self._key).splitlines():
            kind, rank, text = json.loads(line)
            found[kind].setdefault(rank, text)
        return found

    def tell(self, store: dist.Store, kind: str, rank: int, text: str) -> None:
        """Add a notice, unless there are `MOST` of its kind or it is there already."""
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


SILENCE = 2.5 * BEAT  # after a failure: a rank whose heartbeat stops for so long is dead
NEAR = 8  # ranks of a group that one rank checks
NEXT = 2  # ranks of the world that one rank checks
EACH = 25e-6  # seconds of the store per request
LINGER = 4.0  # seconds that rank 0 keeps its store open after its work, for the last requests of others

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or read. The message names the rank."""


class CollectiveError(RuntimeError):
    """A collective failed because of other ranks. The message names the call, the rank, and the ranks at fault."""

    why = ""  # the part of the message that names the ranks at fault


class ErrorBoard:
    """What this rank knows of failures in its world. One per process and default group. ``line``: the client of the
    store. ``heartbeat``: None in a world of one rank. ``roles``: name -> ranks, if ranks have roles. ``keys``: what all
    of its keys in the store begin with."""

    first = 0  # the global number of the rank that callers call 0
    base = 0  # and of the one that process groups call 0; they count around the world

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        keys: str,
        timeout: float,
        roles: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self._roles = roles
        self.rank, self.keys, self._world = rank, keys, range(world)
        self._told: dict[str, tuple[int, str]] = {}  # published by this rank: kind -> (the rank that it is about, text)
        self._own = ""  # the error of this rank's last call: all ranks may have had it, and some may still report it
        self._notices = ErrorLog(f"{keys}/notices")
        self.doing = ""  # the call of autopar that this rank is in, unless it waits for others there
        self.calls = Places()
        self.beat = beat_of(world)
        self.line = StoreClient(store, timeout)
        if world > 1:
            self.line.ask(lambda store: store.check([keys]))  # connect now, not after a failure
        self.thread = threading.get_ident()  # of the training loop, which calls autopar
        self._noticed, self._ends = threading.Event(), False
        doing, after = lambda: self.doing, self._look_after
        beats = world > 1
        given = (keys, doing, self.calls, after, timeout, self.named)
        self.heartbeat = Heartbeat(store, rank, world, *given) if beats else None

    def close(self) -> None:
        """End this rank: it has finished, or it ends with the error that it has published, which becomes the verdict
        for all. A rank that hosts the store waits until the others have ended, for at most `LINGER` seconds."""
        self._noticed.set()
        if self.heartbeat is None or self._cut_off():
            return
        words = {kind: text for kind, (_, text) in self._told.items()}
        why = f"{self.named([self.rank])} failed: {words['error']}" if "error" in words else words.get("heard")
        try:
            if why is None:
                self._tell("left", "finished")
            else:
                self.give_verdict(why)
            ended = f"{self.keys}/ended"
            self.line.ask(lambda store: store.add(ended, 1))
            end = time.monotonic() + (LINGER if self.rank == 0 and not hosted_by_launcher() else 0.0)
            while time.monotonic() < end and self.line.ask(lambda store: store.add(ended, 0)) < len(self._world):
                time.sleep(0.05)
        except StoreError:  # the store is gone, which others notice themselves
            pass
        self.heartbeat.close()

    def finished(self) -> None:
        """This rank makes no further call, unless it ends with an error: others must not wait for it in one."""
        self._noticed.set()
        if self._told.keys().isdisjoint(("heard", "error")):
            self._tell("left", "finished")

    def give_verdict(self, why: str) -> None:
        """Publish the verdict: the job cannot continue, on any rank. Raises StoreError."""
        if self.heartbeat is not None:
            self.heartbeat.verdict = why
        self.line.ask(lambda store: store.compare_set(f"{self.keys}/verdict", "", why))

    def first_to_say(self, key: str, text: str) -> str | None:
        """The text of the first rank that has written under a key. None if this rank has published an error, or the
        store is gone."""
        if not self._told.keys().isdisjoint(("heard", "error")):
            return None
        try:
            return self.line.ask(lambda store: store.compare_set(f"{self.keys}/{key}", "", text)).decode()
        except StoreError:
            return None

    # --- what this rank publishes ---------------------------------------------------------------------

    def report(self, error: BaseException) -> None:
        """Publish this rank's own error; of a CollectiveError, whose cause is on another rank, publish that cause."""
        if isinstance(error, CollectiveError):
            write_flight(self.rank, str(error), self.numbered)
            self._tell("heard", error.why)
        else:
            first = (str(error).splitlines() or [""])[0]
            self._own = f"{type(error).__name__}: {first}"[:500]
            self._tell("error", self._own)

    def clear(self) -> None:
        """Withdraw what this rank has published: its error was handled, and it waits no longer."""
        self._noticed.clear()
        for kind in list(self._told):
            self._tell(kind, "")

    def succeeded(self) -> None:
        self._own = ""

    def _tell(self, kind: str, text: str, about: int | None = None) -> None:
        """Publish a text of a kind for the ranks that check this one; and for all, unless it is about a collective."""
        before = self._told.pop(kind, None)
        rank = self.rank if about is None else about
        if text:
            self._told[kind] = rank, text

        def tell(store: dist.Store) -> None:
            if about is None:
                store.set(f"{self.keys}/{kind}/{self.rank}", text)
            if kind != "waiting" and before is not None:
                self._notices.take_back(store, kind, *before)
            if kind != "waiting" and text:
                self._notices.tell(store, kind, rank, text)

        if len(self._world) > 1 and not self._cut_off():
            try:
                self.line.ask(tell)
            except StoreError:  # this rank's own error explains more
                return

    @contextmanager
    def at(self, doing: str) -> Iterator[None]:
        """Context manager: publishes what this rank does, for ranks that wait for it; empty: it waits for others."""
        before, self.doing = self.doing, doing
        try:
            yield
        finally:
            self.doing = before

    # --- what this rank reads -------------------------------------------------------------------------

    def failed(self, what: str, ranks: Sequence[int], error: BaseException | None = None) -> CollectiveError:
        """The error of a call that needed ``ranks`` and failed, with the backend's message if there is one."""
        self._noticed.set()
        why = self.explain(ranks, what)
        raw = (
            (str(error).splitlines() or [""])[0][:160]
            if error is not None and not isinstance(error, StoreError)
            else ""
        )
        return self._error(what, why, f" [{raw}]" if raw else "")

    def ended(self, what: str, verdict: str) -> CollectiveError:
        """The error of a call that cannot succeed, since a verdict is known."""
        self._noticed.set()
        return self._error(what, verdict)

    def _error(self, what: str, why: str, raw: str = "") -> CollectiveError:
        out = CollectiveError(f"comm: {what} failed on {self.named([self.rank])}: {why}{raw}")
        out.why = why
        return out

    def _look_after(self, verdict: str) -> None:
        """After a beat: if a wait that does not raise cannot succeed, abort it; on a thread, since that takes time."""
        ranks = [] if verdict else self.numbered(aborts.broken_group())
        if not self._ends and (verdict or ranks) and aborts.there_are_some():
            self._ends = True
            threading.Thread(target=self._end_waits, args=(verdict, ranks), name="autopar-end", daemon=True).start()

    def _end_waits(self, verdict: str, ranks: Sequence[int]) -> None:
        what = aborts.last_started() or self.doing or "a collective"
        error = self._error(what, verdict or self.explain(ranks, what))
        aborts.end_waits(self.thread, error, self._noticed)

    def translated(self, error: BaseException, action: str) -> BaseException:
        """A backend's error as a CollectiveError that names ranks; any other error unchanged."""
        if isinstance(error, CollectiveError) or not (isinstance(error, StoreError) or is_backend_error(error)):
            return error
        return self.failed(action, self._world, error)

    def explain(self, ranks: Sequence[int], what: str) -> str:
        """Why a call among ``ranks`` failed here, as a text; takes at most about SILENCE seconds."""
        if self._cut_off():
            return self.verdict
        self._tell("waiting", what)
        try:
            return self._ask(ranks)
        except StoreError as error:
            return self.verdict or str(error)

    def trouble(self, ranks: Sequence[int]) -> str:
        """Why waiting for ``ranks`` cannot succeed, if known: a verdict, an error, a rank that has finished."""
        try:
            return self.line.ask(lambda store: self._known(store, ranks, ranks))
        except StoreError as error:
            return self.verdict or str(error)

    def at_work(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of ``ranks`` that are working in a call of autopar, not waiting for others, and the call."""
        try:
            signs = self.line.ask(lambda store: self._signs(store, ranks))
        except StoreError:
            return {}
        return {r: doing for r, sign in signs.items() if (doing := shown_in(sign)[0])}

    def gone_on(self, name: str, number: int) -> Callable[[], int | None]:
        """A function that returns the next rank, if at the time of this call it was beyond call ``number`` of
        ``name``."""
        rank, places = self.heartbeat.next if self.heartbeat is not None else (-1, {})
        passed = name in places and places[name].passed(number)
        return lambda: rank if passed else None

    def near(self, ranks: Sequence[int], most: int = NEAR) -> list[int]:
        """Those of ``ranks`` (in order) that this rank checks: all others if they are few, else the next ones."""
        start = bisect.bisect_right(ranks, self.rank)
        found = (ranks[(start + i) % len(ranks)] for i in range(min(len(ranks), most + 1)))
        return [r for r in found if r != self.rank][:most]

    def numbered(self, ranks: Sequence[int]) -> list[int]:
        """The global numbers of ranks as process groups of this process count them."""
        return sorted((self.base + rank) % len(self._world) for rank in ranks)

    def named(self, ranks: Sequence[int]) -> str:
        """Ranks in words, with their roles."""
        return ranks_named(ranks, self._roles)

    @property
    def whole(self) -> ErrorBoard:
        """The board of the whole world: this one."""
        return self

    def _cut_off(self) -> bool:
        """Whether the store is known not to answer: another request would wait until its timeout, too."""
        return self.heartbeat is not None and self.heartbeat.cut_off

    @property
    def verdict(self) -> str:
        """Why the job cannot continue, as far as this rank knows, or empty."""
        return self.heartbeat.verdict if self.heartbeat is not None else ""

    def _known(self, store: dist.Store, failing: Sequence[int], needed: Sequence[int]) -> str:
        told = self._notices.read(store)
        others = {r: text for r, text in told["error"].items() if r in failing and r != self.rank}
        errors = {r: text for r, text in others.items() if text != self._own}
        if errors:
            return "; ".join(f"{self.named([r])} failed: {text}" for r, text in sorted(errors.items()))
        if verdict := said_by_launcher(store) or self.verdict:
            return verdict
        # What another rank has read, unless it is about this one: a waiting rank may look like the cause.
        me = re.compile(rf"\branks? ([\d, ]*, )?{self.rank}\b")
        heard = [t for r, t in told["heard"].items() if r in failing and r != self.rank and not me.search(t)]
        left = {r for r in told["left"] if r in needed}
        if told["left"]:
            left |= self._texts(store, "left", self.near(needed)).keys()
        return heard[0] if heard else f"{self.named(sorted(left))} finished: its main returned" if left else ""

    def _ask(self, ranks: Sequence[int]) -> str:
        # All ranks of the world, not only the group: a silent member of the group may wait for a rank outside of it.
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
            return f"{self.named(dead)} did not respond: no sign of life for {patience:.1f} s"
        waiting = self.line.ask(lambda store: self._texts(store, "waiting", others))
        sees_all = len(others) == len(ranks) - (self.rank in ranks)
        if absent := self._with_others("absent", [r for r in others if r not in waiting], ranks, sees_all):
            return f"{self.named(absent)} did not respond: alive, but never joined this collective"
        stories = ", ".join(f"{self.named([r])} in {text}" for r, text in waiting.items())
        return f"every rank waited for another one: {stories}"

    def _with_others(self, kind: str, found: list[int], among: Sequence[int], sees_all: bool) -> list[int]:
        """What this rank has found about the ranks that it checks, with what others have published about theirs."""
        if sees_all:
            return found
        if found:
            self._tell(kind, "looked at", about=found[0])
        else:
            time.sleep(0.5 * self.beat)  # until the others have published
        told = self.line.ask(self._notices.read)[kind]
        return sorted({*found, *(r for r in told if r in among and r != self.rank)})

    def _signs(self, store: dist.Store, ranks: Sequence[int]) -> dict[int, str]:
        return {r: look(store, f"{self.keys}/alive/{r}") for r in ranks}

    def _texts(self, store: dist.Store, kind: str, ranks: Sequence[int]) -> dict[int, str]:
        return {r: text for r in ranks if (text := look(store, f"{self.keys}/{kind}/{r}"))}


class RoleBoard:
    """The board ``whole`` of a world of several roles, as one of them uses it: callers number ranks within the role,
    whose rank 0 is the global rank ``first``, and ``line`` is the client of the role's own store. Errors name global
    ranks."""

    def __init__(self, whole: ErrorBoard, first: int, store: dist.Store, timeout: float) -> None:
        self.whole, self.first, self.line = whole, first, StoreClient(store, timeout)
        whole.base = first

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def failed(self, what: str, ranks: Sequence[int], error: BaseException | None = None) -> CollectiveError:
        return self.whole.failed(what, self.numbered(ranks), error)

    def trouble(self, ranks: Sequence[int]) -> str:
        return self.whole.trouble(self.numbered(ranks))

    def at_work(self, ranks: Sequence[int]) -> dict[int, str]:
        return {rank - self.first: call for rank, call in self.whole.at_work(self.numbered(ranks)).items()}

    def near(self, ranks: Sequence[int], most: int = NEAR) -> list[int]:
        return [rank - self.first for rank in self.whole.near(self.numbered(ranks), most)]

    def gone_on(self, name: str, number: int) -> Callable[[], int | None]:
        found = self.whole.gone_on(name, number)
        return lambda: None if (rank := found()) is None else rank - self.first


def ranks_named(ranks: Sequence[int], roles: Mapping[str, Sequence[int]] = MappingProxyType({})) -> str:
    """ "rank 3", or "ranks 3, 4", or "ranks 0, 1 (attention) and rank 2 (experts)"."""
    by_role = {name: [rank for rank in ranks if rank in among] for name, among in roles.items()}
    if any(by_role.values()):
        return " and ".join(f"{ranks_named(found)} ({name})" for name, found in by_role.items() if found)
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
