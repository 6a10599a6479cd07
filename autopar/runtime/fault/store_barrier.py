"""Barriers and exchanges of texts between ranks through the store, in rounds; and how the texts differ."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from typing import TypeVar

import torch.distributed as dist

from autopar.adapters.distributed import hosted_by_launcher, own_client, store_host
from autopar.runtime.fault.error_propagation import EACH, ErrorBoard, RoleBoard, ranks_named
from autopar.runtime.fault.errors import CollectiveError, board
from autopar.runtime.fault.heartbeat import BEAT, said_by_launcher
from autopar.runtime.fault.store_client import Answer, StoreClient, StoreError, look

T = TypeVar("T")
PATIENCE = 10  # times the timeout that a barrier waits for ranks that are alive and working in a call of autopar
BETWEEN = 5 * BEAT  # seconds that they may be between two calls
STARTS = "autopar/start/"
LATE = 0.02  # seconds after which a rank reports that it waits
MOST_SHOWN = 200  # characters of a difference in an error


def world_store(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The store of torchrun's environment, once all ranks have joined, under a prefix of this start: one store may
    serve all restarts of a job, and holds keys of ranks that are gone. Unlike torch's own rendezvous, the error names
    the ranks that are missing, not just their number. Raises CollectiveError.

    Rank 0 publishes a new name. The others count themselves under it. A rank that was counted there before reads the
    name of an earlier start, and waits for the next one. Only rank 0 says that all are there.
    """
    what, start, limit = f"comm: starting the ranks failed on rank {rank}: ", time.monotonic(), timeout.total_seconds()
    store = _connected(rank, world, timeout, what)
    line, meeting = StoreClient(store, limit), _Meeting(rank, world, limit)
    try:
        while (why := line.ask(functools.partial(meeting.look, late=time.monotonic() - start > limit))) is None:
            time.sleep(0.01 + world * EACH)
    except StoreError as error:
        raise CollectiveError(what + str(error)) from error
    if why:
        time.sleep(BEAT if rank == 0 else 0.0)  # rank 0 may host the store that the others read
        raise CollectiveError(what + why)
    if rank == 0:
        threading.Thread(target=_forget_earlier, args=(own_client(store), meeting.name), daemon=True).start()
    return dist.PrefixStore(meeting.name, store)


def _forget_earlier(store: dist.Store, name: str) -> None:
    """Delete the keys of earlier starts, whose ranks are gone, those of torch's groups among them: a launcher's store
    would grow with every restart. In the background, with pauses for other requests."""
    with contextlib.suppress(AttributeError, RuntimeError):  # before torch 2.13; the store has ended
        for key in store.list_keys():
            if key.startswith(STARTS) and not key.startswith(f"{name}/"):
                store.delete_key(key)
                time.sleep(EACH)


def _connected(rank: int, world: int, timeout: timedelta, what: str) -> dist.Store:
    host, port, launched = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), hosted_by_launcher()
    answer, hosts = Answer(), rank == 0 and not launched
    # On a thread: torch applies the timeout to each address of the host.
    threading.Thread(
        target=answer.run,
        args=(lambda: dist.TCPStore(host, port, world, hosts, timeout, wait_for_workers=False, multi_tenant=True),),
        daemon=True,
    ).start()
    if not answer.wait(timeout.total_seconds() + BEAT) or answer.error is not None:
        raw = f" [{str(answer.error).splitlines()[0][:160]}]" if answer.error is not None else ""
        where = f"{store_host()} cannot be reached at {host}:{port}"
        raise CollectiveError(f"{what}{where}{raw}") from answer.error
    store: dist.Store = answer.value
    return store


class _Meeting:
    """The ranks of one start of a job, in the store. ``name``: the prefix of its keys, once this rank is counted."""

    def __init__(self, rank: int, world: int, limit: float) -> None:
        self.name = ""
        self._rank, self._world, self._limit = rank, world, limit

    def look(self, store: dist.Store, late: bool) -> str | None:
        """Why waiting for all ranks has ended, as reported by the launcher or by the first rank that asks when it is
        ``late``. "": all ranks have joined; None: not yet."""
        self._join(store)
        if self.name and store.check([f"{self.name}/all"]):
            return ""
        if said := said_by_launcher(store) or (look(store, f"{self.name}/absent") if self.name else ""):
            return said
        if self.name and self._rank == 0 and store.add(f"{self.name}/come", 0) == self._world:
            store.set(f"{self.name}/all", "")
            return ""
        return self._absent(store) if late else None

    def _join(self, store: dist.Store) -> None:
        """Be counted under the name that rank 0 has published last, which is a new one."""
        last = f"autopar/start of {self._world}"  # an earlier start may have had fewer ranks
        if self._rank == 0 and not self.name:
            store.set(last, f"{STARTS}{uuid.uuid4().hex}")
        published = look(store, last)
        if published not in ("", self.name) and store.add(f"{published}/here/{self._rank}", 1) == 1:
            self.name = published
            store.add(f"{published}/come", 1)

    def _absent(self, store: dist.Store) -> str | None:
        """The ranks that are not there, in the words of the first that asks; None: another one is about to say it."""
        if not self.name:
            return f"rank 0 did not come within {self._limit:.0f} s"
        if store.compare_set(f"{self.name}/names them", "", str(self._rank)).decode() != str(self._rank):
            return None
        absent = [r for r in range(self._world) if not store.check([f"{self.name}/here/{r}"])]
        why = f"{ranks_named(absent)} did not come within {self._limit:.0f} s"
        store.set(f"{self.name}/absent", why)
        return why


@dataclass
class Rounds:
    """How often the ranks of a scope have used it, and the keys that they left there: cleared in the next round."""

    count: int = 0
    left: list[str] = field(default_factory=list)

    def next(self, scope: str) -> str:
        self.count += 1
        return f"{scope}/{self.count}"


Event = Callable[[], int | None]  # a rank that has gone on with something else


class RankMovedOn(Exception):
    """While this rank waits for all others, ``rank`` has gone on with another call."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


class Round:
    """All ``ranks`` of a scope meet and vote: alike if all hold the same ``digest``, and those that vote under the same
    number (the first of their ranks) the same text.

    Each rank increments a counter under its digest. The rank that completes the count is the last; the others see that
    when they look. So a rank makes two requests as a rule, and one more for each vote, whether there are 2 ranks or
    16,384. A rank that finds the count incomplete also counts itself as late: if all are late, digests differ.
    """

    def __init__(
        self, scope: str, rounds: Rounds, rank: int, ranks: Sequence[int], digest: str, votes: Mapping[int, str]
    ) -> None:
        self._left, self._where = rounds.left, rounds.next(scope)
        self._digest, self._votes = f"{self._where}/{digest}", votes
        self._rank, self._ranks = rank, ranks
        self._lates, self._apart, self._is_late = f"{self._where}/late", False, False
        self._start = time.monotonic()
        self._patience = max(LATE, 2 * len(ranks) * EACH)
        rounds.left = [self._digest, self._lates]

    def come(self, store: dist.Store) -> bool | None:
        """Vote. Returns the result if this rank is the last, else None."""
        for n, text in self._votes.items():
            self._apart |= store.compare_set(f"{self._where}/vote/{n}", "", text).decode() != text
        if self._apart:
            return self._be_late(store)
        if store.add(self._digest, 1) < len(self._ranks):
            return None
        for key in self._left:  # all ranks are here, so none is in the last round any more
            store.delete_key(key)
        return True

    def _be_late(self, store: dist.Store) -> bool | None:
        self._is_late = True
        store.set(f"{self._where}/waits/{self._rank}", "")
        return self._all_late(store, 1)

    def _all_late(self, store: dist.Store, more: int) -> bool | None:
        if store.add(self._lates, more) < len(self._ranks):
            return None
        return not self._apart and store.add(self._digest, 0) == len(self._ranks)

    def look(self, store: dist.Store) -> bool | None:
        if not self._apart and store.add(self._digest, 0) == len(self._ranks):
            return True
        if self._is_late:
            return self._all_late(store, 0)
        return self._be_late(store) if time.monotonic() - self._start > self._patience else None

    def absent(self, store: dist.Store, near: Sequence[int]) -> list[int]:
        """Which of the ranks ``near`` have not come: a rank that waits has counted itself as late."""
        found = [r for r in near if not store.check([f"{self._where}/waits/{r}"])]
        return found if self.look(store) is None else []

    def forget(self, store: dist.Store) -> None:
        own = [f"{self._where}/vote/{n}" for n in self._votes if n == self._rank]
        for key in own + [f"{self._where}/waits/{self._rank}"] * self._is_late:
            store.delete_key(key)

    @property
    def leaves(self) -> bool:
        return self._is_late or self._rank in self._votes


def meet(round_: Round, ranks: Sequence[int], what: str, limit: float, event: Callable[[], Event] | None) -> bool:
    """Wait until all ``ranks`` are in this round; returns whether they hold the same values.

    Raises CollectiveError as `show` does, and RankMovedOn if ``event``, called before each look, reports a rank after
    it.
    """
    found = _waited_for(ranks, f"agreeing on {what}", limit, round_.come, round_.look, round_.absent, event)
    if round_.leaves:
        board().line.ask(round_.forget)
    return found


def show(
    scope: str,
    rounds: Rounds,
    rank: int,
    ranks: Sequence[int],
    text: str,
    limit: float,
    reply: Callable[[list[str]], str],
    mine: ErrorBoard | None = None,
) -> str:
    """Publish a text (its subject, then the rest, by lines) and wait for the reply of the first of ``ranks`` to the
    texts of all of them, the same for all. Only that rank reads the texts. ``mine``: the board, of the whole world;
    None: that of the default group, whose ranks they are.

    Raises CollectiveError that names the ranks that do not come: after ``limit`` seconds, or as soon as it is known
    that they cannot. Waits `PATIENCE` times as long, with a warning, for ranks that are alive and working in autopar (a
    slow compile).
    """
    left, where, answer = rounds.left, rounds.next(scope), f"{scope}/{rounds.count}/reply"
    keys = [f"{where}/{r}" for r in ranks] if rank == ranks[0] else []
    rounds.left = [answer] if rank == ranks[0] else [f"{where}/{rank}"]

    def find(store: dist.Store) -> str | None:
        if not store.check(keys or [answer]):
            return None
        if keys:
            store.set(answer, reply([v.decode() for v in store.multi_get(keys)]))
            for key in [keys[0], *left]:  # all ranks in this round have read the last reply
                store.delete_key(key)
        return store.get(answer).decode()

    def set_and_look(store: dist.Store) -> str | None:
        for key in left if rank != ranks[0] else ():  # the first rank has read it
            store.delete_key(key)
        store.set(f"{where}/{rank}", text)
        return find(store)

    def absent(store: dist.Store, near: Sequence[int]) -> list[int]:
        return [r for r in near if not store.check([f"{where}/{r}"])] if not store.check([answer]) else []

    what = f"agreeing on {text.partition(chr(10))[0]}"
    return _waited_for(ranks, what, limit, set_and_look, find, absent, mine=mine)


def _rest(start: float, end: float, ranks: int) -> bool:
    """Sleep before the next look: longer for more ranks and after a longer wait. False if the time is over."""
    now = time.monotonic()
    if now > end:
        return False
    least = ranks * EACH
    time.sleep(min(max(0.0002, least, (now - start) / 20), max(0.05, 2 * least)))
    return True


def _waited_for(
    ranks: Sequence[int],
    what: str,
    limit: float,
    come: Callable[[dist.Store], T | None],
    look: Callable[[dist.Store], T | None],
    absent: Callable[[dist.Store, Sequence[int]], list[int]],
    event: Callable[[], Event] | None = None,
    mine: ErrorBoard | RoleBoard | None = None,
) -> T:
    """Poll ``come`` once, then ``look``, until one returns a result: both return None while others are ``absent``."""
    mine, start = mine or board(), time.monotonic()

    def poll(store: dist.Store) -> T | None:
        end, found = time.monotonic() + 0.25, None
        while found is None and _rest(start, end, len(ranks)):
            found = look(store)
        return found

    patience, near, next_look = _patience(mine, limit, what), mine.near(ranks), mine.beat
    try:
        with mine.at(""):
            found = mine.line.ask(come)
            while found is None:
                waited = time.monotonic() - start
                ended = waited > limit and patience(waited, mine.line.ask(lambda store: absent(store, near)))
                if ended or (waited > next_look and mine.trouble(ranks)):
                    raise mine.failed(what, ranks)
                next_look += mine.beat if waited > next_look else 0.0
                gone_on = event() if event is not None else lambda: None
                found = mine.line.ask(poll)
                if found is None and (rank := gone_on()) is not None:
                    raise RankMovedOn(rank)
    except StoreError as error:
        raise mine.failed(what, ranks, error) from error
    return found


def _patience(mine: ErrorBoard | RoleBoard, limit: float, what: str) -> Callable[[float, Sequence[int]], bool]:
    """A function that decides whether to give up on absent ranks after so many seconds, the limit or more: not on ranks
    that are alive and working in autopar, since a slow compile is not a failure."""
    seen = -inf  # the last time at which all absent ranks were working

    def ended(waited: float, absent: Sequence[int]) -> bool:
        nonlocal seen
        found = mine.at_work(absent)
        if len(found) == len(absent):
            if absent and seen == -inf:
                who = ", ".join(f"rank {mine.first + r} in {call}" for r, call in found.items())
                warnings.warn(
                    f"comm: {what} on rank {mine.rank} has waited {limit:.0f} s for others that are alive and at work "
                    f"({who}); it keeps waiting, up to {PATIENCE * limit:.0f} s",
                    stacklevel=2,
                )
            seen = waited
        return waited - seen > BETWEEN or waited > PATIENCE * limit

    return ended


def differences(ranks: Sequence[int], values: Sequence[str]) -> str:
    """Which ranks hold which values, if they differ; ranks that differ from the majority come first."""
    by_value: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values):
        by_value.setdefault(value, []).append(rank)
    if len(by_value) == 1:
        return ""
    common = max(by_value, key=lambda v: len(by_value[v]))
    odd = {value: who for value, who in by_value.items() if value != common}
    told = {value: value.partition("\n")[2] for value in by_value}
    shown = dict(zip(told, _where_they_differ(list(told.values())), strict=True))
    listed = "; ".join(f"rank {', '.join(map(str, who))}: {shown[value]}" for value, who in odd.items())
    return f"{listed}; against rank {', '.join(map(str, by_value[common]))}: {shown[common]}"


def _where_they_differ(texts: list[str]) -> list[str]:
    """Long texts, shortened to the surroundings of the first difference."""
    if max(map(len, texts)) <= MOST_SHOWN:
        return texts
    same = next((i for i, found in enumerate(zip(*texts, strict=False)) if len(set(found)) > 1), min(map(len, texts)))
    start = max(same - MOST_SHOWN // 4, 0)
    ends = [start + MOST_SHOWN < len(text) for text in texts]
    return [
        f"{'...' * (start > 0)}{text[start : start + MOST_SHOWN]}{'...' * more}"
        for text, more in zip(texts, ends, strict=True)
    ]
