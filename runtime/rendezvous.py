"""How ranks meet in the store, what they show each other there, in rounds, and how it differs."""

from __future__ import annotations

import functools
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from math import inf
from typing import TypeVar

import torch.distributed as dist

from autopar.adapters.distributed import hosted_by_launcher, root_store, store_host
from autopar.runtime.failures import CollectiveError, FailureBoard, board
from autopar.runtime.heartbeat import BEAT, LAUNCHER
from autopar.runtime.store_line import Answer, Line, StoreError

T = TypeVar("T")
PATIENCE = 10  # times the timeout, that an agreement waits for ranks which beat and are at work in a call of autopar
BETWEEN = 5 * BEAT  # seconds that they may be between two calls
MOST_SHOWN = 200  # characters of what ranks differ in


def world_store(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The store of torchrun's environment, once all ranks have come. torch's own rendezvous says how many did not come;
    this one says which. Raises CollectiveError."""
    what, start, limit = f"comm: starting the ranks failed on rank {rank}: ", time.monotonic(), timeout.total_seconds()
    store = _connected(rank, world, timeout, what)
    line = Line(store, limit)
    try:
        line.ask(lambda s: _come(s, rank, world))
        while why := line.ask(
            functools.partial(_absent, world=world, named=(late := time.monotonic() - start > limit))
        ):
            if not isinstance(why, str) and late:
                who = ("rank " if len(why) == 1 else "ranks ") + ", ".join(map(str, why))
                why = f"{who} did not come within {limit:.0f} s"
                line.ask(functools.partial(_give_up, why=why))
            if isinstance(why, str):
                time.sleep(BEAT if rank == 0 else 0.0)  # it may host the store, and the others look there
                raise CollectiveError(what + why)
            time.sleep(0.01)
    except StoreError as error:
        raise CollectiveError(what + str(error)) from error
    return store


def _connected(rank: int, world: int, timeout: timedelta, what: str) -> dist.Store:
    host, port, launched = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), hosted_by_launcher()
    answer, hosts = Answer(), rank == 0 and not launched
    # On a thread: torch counts the timeout for each address of the host.
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
    if launched:  # it serves all restarts
        return dist.PrefixStore(f"/worker/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store


def _give_up(store: dist.Store, why: str) -> None:
    store.set("autopar/absent", why)


def _come(store: dist.Store, rank: int, world: int) -> None:
    if store.add(f"autopar/here/{rank}", 1) == 1 and store.add("autopar/come", 1) == world:
        store.set("autopar/all", "")


def _absent(store: dist.Store, world: int, named: bool) -> list[int] | str:
    """The ranks that have not come yet (all of them, unless they are to be ``named``: that asks for each), or why
    waiting for them has ended: what the launcher or another rank says."""
    if store.check(["autopar/all"]):
        return []
    for where, key in ((root_store(store), LAUNCHER), (store, "autopar/absent")):
        if where.check([key]):
            return where.get(key).decode()
    return [r for r in range(world) if not (named and store.check([f"autopar/here/{r}"]))]


APART = 2**40  # added to how many have come


def meet(
    scope: str, count: int, rank: int, ranks: Sequence[int], votes: Mapping[int, str], what: str, limit: float
) -> bool:
    """Wait until all ``ranks`` are in this round. Whether all that vote under the same number vote alike; that is the
    first of their ranks.

    A rank that comes last asks one question and one for each vote, any other at least one more, be they 2 ranks or
    16,384. Raises CollectiveError as `show` does.
    """
    come, waits = f"{scope}/{count}/come", f"{scope}/{count}/waits"
    vote_of, start = f"{scope}/{count}/vote".__add__, time.monotonic()
    late = False

    def vote(store: dist.Store) -> bool | None:
        apart = any(store.compare_set(vote_of(f"/{n}"), "", text).decode() != text for n, text in votes.items())
        arrived = store.add(come, 1 + apart * APART)
        if arrived % APART == len(ranks):
            if count:  # so nobody is in the last round any more
                store.delete_key(f"{scope}/{count - 1}/come")
            return arrived < APART
        return poll(store, 0.05)

    def poll(store: dist.Store, seconds: float) -> bool | None:
        nonlocal late
        end = time.monotonic() + seconds
        while (arrived := store.add(come, 0)) % APART < len(ranks):
            if not _rest(start, end):
                if not late:
                    store.set(f"{waits}/{rank}", "")
                late = True
                return None
        return arrived < APART

    def absent(store: dist.Store) -> list[int]:
        found = [r for r in ranks if r != rank and not store.check([f"{waits}/{r}"])]
        return found if store.add(come, 0) % APART < len(ranks) else []

    def forget(store: dist.Store) -> None:  # all have voted
        for key in [vote_of(f"/{n}") for n in votes if n == rank] + [f"{waits}/{rank}"] * late:
            store.delete_key(key)

    found = _waited_for(ranks, f"agreeing on {what}", limit, vote, poll, absent)
    if late or rank in votes:
        board().ask(forget)
    return found


def show(scope: str, count: int, rank: int, ranks: Sequence[int], text: str, limit: float) -> list[str]:
    """Show a text (what it is about, then the rest, by lines) and wait for those of all ``ranks`` in this round.

    Raises CollectiveError that names the ranks which do not come: after ``limit`` seconds, or as soon as it is known
    that they cannot. Ranks that beat and are at work within autopar (a slow compile) are waited for `PATIENCE` times
    as long, with a warning.
    """
    keys, start = [f"{scope}/{count}/{r}" for r in ranks], time.monotonic()

    def poll(store: dist.Store, seconds: float) -> list[str] | None:
        end = time.monotonic() + seconds
        while not store.check(keys):
            if not _rest(start, end):
                return None
        found = [v.decode() for v in store.multi_get(keys)]
        if count:  # everybody has set this round's key, so everybody has read the last round's
            store.delete_key(f"{scope}/{count - 1}/{rank}")
        return found

    def set_and_poll(store: dist.Store) -> list[str] | None:
        store.set(f"{scope}/{count}/{rank}", text)
        return poll(store, 0.05)

    def absent(store: dist.Store) -> list[int]:
        return [r for r, key in zip(ranks, keys) if not store.check([key])]

    return _waited_for(ranks, f"agreeing on {text.partition(chr(10))[0]}", limit, set_and_poll, poll, absent)


def _rest(start: float, end: float) -> bool:
    """Before one more look, unless time is over. Who has waited for long looks seldom."""
    now = time.monotonic()
    if now > end:
        return False
    time.sleep(min(max(0.0002, (now - start) / 20), 0.05))
    return True


def _waited_for(
    ranks: Sequence[int],
    what: str,
    limit: float,
    come: Callable[[dist.Store], T | None],
    poll: Callable[[dist.Store, float], T | None],
    absent: Callable[[dist.Store], list[int]],
) -> T:
    """What ``come`` gives, or ``poll`` later on: None while others are ``absent``."""
    mine, start, look = board(), time.monotonic(), BEAT
    patience = _Patience(mine, limit, what)
    try:
        with mine.at(""):
            found = mine.ask(come)
            while found is None:
                waited = time.monotonic() - start
                ended = waited > limit and patience.ended(waited, mine.ask(absent))
                if ended or (waited > look and mine.trouble(ranks)):
                    raise mine.failed(what, ranks)
                look += BEAT if waited > look else 0.0
                found = mine.ask(lambda store: poll(store, 0.25))
    except StoreError as error:
        raise mine.failed(what, ranks, error) from error
    return found


class _Patience:
    """With ranks that beat and are at work within autopar: a slow compile is no failure."""

    def __init__(self, mine: FailureBoard, limit: float, what: str) -> None:
        self._mine, self._limit, self._what = mine, limit, what
        self._seen = -inf  # when all that were absent were at work

    def ended(self, waited: float, absent: Sequence[int]) -> bool:
        """Whether to give up on ranks that have not come after ``waited`` seconds, the limit or more."""
        found = self._mine.at_work(absent)
        if len(found) == len(absent):
            if absent and self._seen == -inf:
                self._warn(found)
            self._seen = waited
        return waited - self._seen > BETWEEN or waited > PATIENCE * self._limit

    def _warn(self, found: Mapping[int, str]) -> None:
        who = ", ".join(f"rank {r} in {call}" for r, call in found.items())
        warnings.warn(
            f"comm: {self._what} on rank {self._mine.rank} has waited {self._limit:.0f} s for others that are alive "
            f"and at work ({who}); it waits on, up to {PATIENCE * self._limit:.0f} s",
            stacklevel=2,
        )


def differences(ranks: Sequence[int], values: Sequence[str]) -> str:
    """Who holds what, if not all hold the same: first those that differ from most."""
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
    """Long texts are cut to what stands around the first difference."""
    if max(map(len, texts)) <= MOST_SHOWN:
        return texts
    same = next((i for i, found in enumerate(zip(*texts, strict=False)) if len(set(found)) > 1), min(map(len, texts)))
    start = max(same - MOST_SHOWN // 4, 0)
    ends = [start + MOST_SHOWN < len(text) for text in texts]
    return [
        f"{'...' * (start > 0)}{text[start : start + MOST_SHOWN]}{'...' * more}"
        for text, more in zip(texts, ends, strict=True)
    ]
