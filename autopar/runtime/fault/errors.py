"""Errors of this process: publishing its own, and translating those of backends into errors that name ranks.

What ranks know of each other is on their error boards (`autopar.runtime.fault.error_propagation`), one per process,
created here.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from types import MappingProxyType, TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.adapters.distributed import default_store
from autopar.runtime.fault.error_propagation import CollectiveError as CollectiveError
from autopar.runtime.fault.error_propagation import ErrorBoard, RoleBoard
from autopar.runtime.fault.flight import flying, write_flight
from autopar.runtime.fault.heartbeat import BEAT
from autopar.runtime.fault.store_client import Answer, StoreError

T = TypeVar("T")

# --- the board of this process --------------------------------------------------------------------------

_boards: dict[int, ErrorBoard | RoleBoard] = {}
_made = itertools.count()  # a store may outlive a default group and serve the next one


def board() -> ErrorBoard | RoleBoard:
    """The board of the default process group, created at the first call. Not collective."""
    store = default_store()
    if id(store) not in _boards:
        _boards[id(store)] = _new_board(store, dist.get_rank(), dist.get_world_size())
    return _boards[id(store)]


def _new_board(
    store: dist.Store,
    rank: int,
    world: int,
    timeout: float = inf,
    roles: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> ErrorBoard:
    close()
    try:
        made = ErrorBoard(store, rank, world, f"autopar/failures/{next(_made)}", timeout, roles)
    except StoreError as error:
        raise CollectiveError(f"comm: joining the others failed on rank {rank}: {error}") from error
    _install_hook()
    return made


def starting(store: dist.Store, rank: int, world: int, limit: float, call: Callable[[], None]) -> None:
    """Run a call that creates the default process group over ``store``; heartbeats start before it.

    Raises CollectiveError that names the ranks that do not join within ``limit`` seconds.
    """
    mine = _new_board(store, rank, world, limit)
    with _ends_with(mine):
        waited_for(mine, limit, call, "starting the ranks", range(world))
    _boards[id(default_store())] = mine


def starting_role(
    store: dist.Store,
    rank: int,
    roles: Mapping[str, range],
    limit: float,
    check: Callable[[ErrorBoard], None],
    call: Callable[[], None],
) -> None:
    """The same where the default process group has the ranks of one of the ``roles`` of a world alone, while heartbeats
    and errors are those of the whole world over ``store``. ``rank``: the global one. ``check``: called with the board
    before the group is made."""
    mine = _new_board(store, rank, sum(map(len, roles.values())), limit, roles)
    (own,) = (ranks for ranks in roles.values() if rank in ranks)
    with _ends_with(mine):
        check(mine)
        waited_for(mine, limit, call, "starting the ranks", own)
    _boards[id(default_store())] = RoleBoard(mine, own.start, default_store(), limit)


@contextmanager
def _ends_with(mine: ErrorBoard) -> Iterator[None]:
    """Context manager: an error ends the board."""
    try:
        yield
    except BaseException as error:
        mine.report(error)
        mine.close()
        raise


def first_to_say(key: str, text: str) -> str | None:
    """`ErrorBoard.first_to_say`, also if the default group is already gone."""
    return next((mine.first_to_say(key, text) for mine in _boards.values()), None)


def close() -> None:
    """Report that this rank has finished: at exit, or before the process group is destroyed."""
    for old in _boards.values():
        old.close()
    _boards.clear()


def _forget() -> None:
    """Forget the boards in a forked process: they belong to the parent, whose threads are not copied."""
    _of_parents.extend(_boards.values())  # kept alive: a destructor might wait for a thread
    _boards.clear()


_of_parents: list[ErrorBoard | RoleBoard] = []
os.register_at_fork(after_in_child=_forget)


# --- translating errors ---------------------------------------------------------------------------------


@contextmanager
def error_context(action: str = "a collective") -> Iterator[None]:
    """Context manager: errors that leave it name the ranks at fault, on this rank and on others.

    An error of this rank is published, so that errors on other ranks can name it. An error of a backend ("Connection
    closed by peer") becomes a CollectiveError that names ``action`` and the ranks that failed:

        with autopar.error_context("saving the optimizer"):
            torch.distributed.checkpoint.save(...)
    """
    mine = board().whole
    mine.clear()
    mine.thread = threading.get_ident()
    try:
        with mine.at(mine.doing or action):
            yield
        mine.succeeded()
    except BaseException as error:
        found = mine.translated(error, action)
        mine.report(found)
        if found is error:
            raise
        raise found from error


class explained(flying):
    """Context manager around communication with ``ranks`` only, described by ``what``: its RuntimeErrors become
    CollectiveErrors, and the flight recorder has it."""

    __slots__ = ()

    def __init__(self, what: str, ranks: Sequence[int]) -> None:
        super().__init__("wait", what, ranks)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
            raise board().failed(self.what, self.ranks, error) from error


def waited_for(mine: ErrorBoard | RoleBoard, limit: float, call: Callable[[], T], what: str, ranks: Sequence[int]) -> T:
    """Run a call that blocks until ``ranks`` join, for at most ``limit`` seconds: torch's own timeouts do not count
    while the store does not answer. Raises CollectiveError as soon as it is known that one of them will not join."""
    answer, start, next_look = Answer(), time.monotonic(), mine.beat
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> T:
        if device is not None:
            torch.cuda.set_device(device)  # the current device is per thread
        return call()

    threading.Thread(target=answer.run, args=(run,), name="autopar-join", daemon=True).start()
    with flying("wait", what, ranks), mine.at(""):
        while not answer.wait(0.25):
            waited = time.monotonic() - start
            if waited > limit + BEAT or (waited > next_look and mine.trouble(ranks)):
                raise mine.failed(what, ranks)
            next_look += mine.beat if waited > next_look else 0.0
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
    """An error that ends this rank: published if it is this rank's own, else translated to name the ranks at fault."""
    for mine in _boards.values():
        found = mine.translated(error, "a collective")
        if not isinstance(error, (KeyboardInterrupt, SystemExit)) and mine.whole.heartbeat is not None:
            write_flight(mine.whole.rank, f"{type(found).__name__}: {found}", mine.whole.numbered)
        mine.report(found)
        if found is not error:
            found.__cause__ = error
            return found
    return error


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    found = named(error)
    _previous_hook(type(found), found, trace)
