"""Requests to the store, each with a deadline.

A client of torch's store waits in C++ for the answer, and hangs if the host of the store is stopped or cut off: its own
timeout applies only to missing keys. So requests run on a thread, and the caller waits no longer than a limit.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from math import inf
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.adapters.distributed import own_client, store_host

T = TypeVar("T")
# Seconds for an answer of the store. It looks up the host name of each new client, for a log message, and answers
# nobody meanwhile: with slow DNS that takes the system's resolver 5 s, twice (observed; torch 2.13, both backends).
PATIENCE = 11.0
LEAST = 3.0
SLICE = 1.0  # seconds: a wait in which the process was suspended loses no more
FIRST = 30.0  # for the first answer: all ranks are new clients at the same time


def look(store: dist.Store, key: str) -> str:
    """The text under a key, empty if there is none: one request, which never waits for the key."""
    return store.compare_set(key, "", "").decode()


class StoreError(RuntimeError):
    """The store did not answer in time, or its connection broke. The message names the host of the store."""


class Answer:
    """The result or the error of a call on another thread."""

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self, call: Callable[[], Any]) -> None:
        """Run the call, on the other thread."""
        try:
            self.value = call()
        except BaseException as error:  # the caller raises it
            self.error = error
        self._done.release()

    def wait(self, seconds: float) -> bool:
        """Whether the result came within so many seconds, not counting time in which this process is suspended. Must
        not be called again after True."""
        while not self._done.acquire(timeout=min(seconds, SLICE)):
            seconds -= SLICE
            if seconds <= 0:
                return False
        return True


class StoreClient:
    """A connection to the store: ``line.ask(lambda store: store.get("x"))``. Waits at most ``timeout`` seconds, or
    `LEAST`, for each answer after the first. ``patience``: the default limit. ``connect``: creates torch's client.
    ``host``: of a store that is not that of the default group, as the subject of a sentence."""

    def __init__(
        self,
        store: dist.Store,
        timeout: float = inf,
        connect: Callable[[dist.Store], dist.Store] = own_client,
        host: str = "",
    ) -> None:
        self._host = host
        self.patience = max(LEAST, min(PATIENCE, timeout))
        self._jobs: queue.SimpleQueue[tuple[Callable[[dist.Store], Any], Answer]] = queue.SimpleQueue()
        self._silent, self._met, self._connect = "", False, connect
        self._thread = threading.Thread(target=self._work, args=(store,), name="autopar-store", daemon=True)
        self._thread.start()

    def ask(self, question: Callable[[dist.Store], T], limit: float | None = None) -> T:
        """What ``question(store)`` returns. Raises StoreError after ``limit`` seconds without an answer."""
        if self._silent:
            raise StoreError(self._silent)
        limit = self.patience if limit is None else limit
        limit = limit if self._met else max(limit, FIRST)
        answer = Answer()
        self._jobs.put((question, answer))
        self._met = answer.wait(limit)
        if not self._met:
            self._silent = f"{self._host or store_host()} did not respond for {limit:.0f} s"
            raise StoreError(self._silent)
        if isinstance(answer.error, (RuntimeError, OSError)):
            raise StoreError(
                f"{self._host or store_host()} cannot be reached [{str(answer.error).splitlines()[0]}]"
            ) from answer.error
        if answer.error is not None:
            raise answer.error
        found: T = answer.value
        return found

    def _work(self, store: dist.Store) -> None:
        client: list[dist.Store] = []
        while True:
            question, answer = self._jobs.get()

            def run(question: Callable[[dist.Store], Any] = question) -> Any:
                if not client:  # connecting is a request, too
                    client.append(self._connect(store))
                return question(client[0])

            answer.run(run)
