"""How a wait that cannot end is ended, and with which error.

gloo: a collective waits in C++ for its timeout if a peer is stopped, whoever called it: a step, DTensor, an optimizer,
distributed checkpoint. Nothing in torch reaches into that wait. What does is the operating system: once its sockets are
shut down, the wait fails as if the peer had closed them. Only sockets that appeared while groups were made are touched.

NCCL, whose work does not raise in ``wait``: the host waits for the GPU in ``loss.item()``, and the GPU for a rank that
is dead. All groups are aborted, so the GPU goes on with values that mean nothing; before ``item`` returns one of them,
a CollectiveError is raised in the thread of the training loop. torch's own watchdog would end the process without a
word of who failed: `leave_to_us` tells it not to.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from autopar.adapters.distributed import quiet_groups, raise_in_thread

# --- gloo: sockets ---------------------------------------------------------------------------------------------

FOLDER = "/proc/self/fd"

_made: dict[int, int] = {}  # descriptor -> inode, which is another one if the number is used again


@contextmanager
def recorded() -> Iterator[None]:
    """Sockets that appear in this block belong to process groups."""
    before = _sockets()
    yield
    _made.update({number: inode for number, inode in _sockets().items() if before.get(number) != inode})


def break_all(store_port: int) -> None:
    """Every wait in a process group fails, now and later. What leads to the store, or to others from a store that is
    hosted here, stays: they may have connected at the same moment."""
    now = _sockets()
    for number, inode in _made.items():
        if now.get(number) == inode:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                peer = connection.getpeername()  # none of one that listens: gloo ends the process when that breaks
                if store_port not in (connection.getsockname()[1], peer[1]):
                    connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    """Descriptor -> inode. Empty on systems that do not list them."""
    found = {}
    for name in os.listdir(FOLDER) if os.path.isdir(FOLDER) else ():
        with suppress(OSError):
            facts = os.stat(int(name))
            if stat.S_ISSOCK(facts.st_mode):
                found[int(name)] = facts.st_ino
    return found


# --- NCCL: groups that are aborted -----------------------------------------------------------------------------

HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
CLEAN_UP_ONLY = "2"  # on an error torch's watchdog aborts communicators, and leaves the process alone
STREAMS = 32  # that torch gives to process groups, in turn
NOTICED = 1.5  # seconds in which the training loop may raise by itself: it waits in the store, or for gloo
ABORTED = 15.0  # seconds until groups that do not end are left behind
SPOKEN = 20.0  # seconds until an error that nobody has raised is printed

_started: tuple[Callable[..., str], tuple[Any, ...]] = (str, ())


def leave_to_us() -> None:
    """Groups that are made from now on do not end the process on an error, unless the user wants them to."""
    if not any(name in os.environ for name in HANDLING):
        os.environ[HANDLING[0]] = CLEAN_UP_ONLY


def started(words: Callable[..., str], *args: Any) -> None:
    """Remember what this rank has started last as ``words(*args)``, which is asked for only if it fails."""
    global _started
    _started = words, args


def last_started() -> str:
    """What this rank has started last; the host is ahead of the GPU, so an earlier one may be what waits."""
    words, args = _started
    return words(*args)


def there_are_some() -> bool:
    """Whether this process has such groups."""
    return bool(quiet_groups())


def tell_count() -> None:
    """Log how many there are; warn if they share streams, of which torch has a fixed number: one then waits for what
    was started on another. Which ones share is a matter of who else in the process takes streams, so that no order of
    transfers can be checked for it ahead (`autopar.schedule.order_checks` has one for each link)."""
    count = len(quiet_groups())
    logging.getLogger(__name__).info("this rank is in %d process groups on the GPU", count)
    if count > STREAMS:
        warnings.warn(
            f"groups: this rank is in {count} process groups on the GPU, torch has {STREAMS} streams for them, so some "
            "wait for each other, at worst in a circle that only the mesh's timeout ends; use fewer axes or pipeline "
            "stages, or destroy groups that you have made yourself",
            stacklevel=2,
        )


def broken_group() -> list[int]:
    """The ranks of a group that has failed, if one has."""
    return next((group.ranks for group in quiet_groups() if group.broken()), [])


def end_waits(thread: int, error: BaseException, noticed: threading.Event) -> None:
    """Raise ``error`` in a thread, unless it raises by itself and sets ``noticed``, and end what it waits for.

    The error is there before the wait ends, so the thread never sees what the wait returns.
    """
    if noticed.wait(NOTICED):
        _abort_all()
        return
    raise_in_thread(thread, _raised_as(error, noticed))
    _abort_all()
    if not noticed.wait(SPOKEN):  # it is in a call that does not come back
        print(error, file=sys.stderr, flush=True)


def _raised_as(error: BaseException, noticed: threading.Event) -> type[BaseException]:
    """A class whose instances are like ``error``: Python makes what is raised in another thread there."""

    def arrive(raised: BaseException) -> None:
        BaseException.__init__(raised, *error.args)
        raised.__dict__.update(error.__dict__)
        noticed.set()

    kind = type(error)
    return type(kind.__name__, (kind,), {"__init__": arrive, "__module__": kind.__module__})


def _abort_all() -> None:
    """Side by side: the abort of one group may wait for the kernel of another."""
    threads = [threading.Thread(target=group.abort, daemon=True) for group in quiet_groups()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + ABORTED
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
