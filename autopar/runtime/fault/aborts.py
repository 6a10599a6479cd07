"""Aborts waits that cannot finish, and raises the error there.

gloo: if a peer is stopped, a collective waits in C++ until its timeout, no matter whether a step, DTensor, an optimizer
or distributed checkpoint has called it. torch cannot interrupt that wait, but the operating system can: once the
sockets are shut down, the wait fails as if the peer had closed them. Only sockets that were opened while groups were
created are touched.

NCCL: its work does not raise in ``wait``. The host waits for the GPU in ``loss.item()``, and the GPU for a dead rank.
All groups are aborted, so the GPU continues with garbage; before ``item`` returns any of it, a CollectiveError is
raised in the thread of the training loop. torch's own watchdog would end the process without naming the failed rank:
`leave_to_us` turns this off.
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

_made: dict[int, int] = {}  # descriptor -> inode, which differs once the descriptor is reused


@contextmanager
def recorded(made: dict[int, int] = _made) -> Iterator[None]:
    """Context manager: records the sockets opened inside as those of process groups."""
    before = _sockets()
    yield
    made.update({number: inode for number, inode in _sockets().items() if before.get(number) != inode})


def break_all(store_port: int) -> None:
    """Make every wait in a process group fail, now and later."""
    shut_down(_made, store_port)


def shut_down(made: dict[int, int], store_port: int) -> None:
    """Shut down recorded sockets. Connections of the store are kept, of clients and of a store hosted here: they may
    have been opened at the same time."""
    now = _sockets()
    for number, inode in list(made.items()):
        if now.get(number) == inode:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                peer = connection.getpeername()  # raises for a listening socket: gloo ends the process if that breaks
                if store_port not in (connection.getsockname()[1], peer[1]):
                    connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    """Descriptor -> inode of this process's sockets. Empty on systems that do not list them."""
    found = {}
    for name in os.listdir(FOLDER) if os.path.isdir(FOLDER) else ():
        with suppress(OSError):
            facts = os.stat(int(name))
            if stat.S_ISSOCK(facts.st_mode):
                found[int(name)] = facts.st_ino
    return found


# --- NCCL: groups that are aborted -----------------------------------------------------------------------------

HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
CLEAN_UP_ONLY = "2"  # torch's watchdog aborts communicators on an error, and does not end the process
STREAMS = 32  # streams that torch assigns to process groups, round-robin
NOTICED = 1.5  # seconds in which the training loop may raise by itself: it waits for the store or gloo
ABORTED = 15.0  # seconds until groups that do not abort are abandoned
SPOKEN = 20.0  # seconds until an error that was not raised is printed

_started: tuple[Callable[..., str], tuple[Any, ...]] = (str, ())


def leave_to_us() -> None:
    """Process groups created from now on do not end the process on an error, unless the user has configured that."""
    if not any(name in os.environ for name in HANDLING):
        os.environ[HANDLING[0]] = CLEAN_UP_ONLY


def started(words: Callable[..., str], *args: Any) -> None:
    """Remember what this rank has started last, described by ``words(*args)``, called only after a failure."""
    global _started
    _started = words, args


def last_started() -> str:
    """What this rank has started last; the host is ahead of the GPU, so an earlier operation may be the one waiting."""
    words, args = _started
    return words(*args)


def there_are_some() -> bool:
    """Whether this process has NCCL groups."""
    return bool(quiet_groups())


def tell_count() -> None:
    """Log the number of groups; warn if they share streams, of which torch has a fixed number: a group then waits for
    work of another one. Which groups share depends on other users of streams in the process, so the order of transfers
    cannot be checked for it in advance (`autopar.schedule.order_checks` assumes a stream for each link)."""
    count = len(quiet_groups())
    logging.getLogger(__name__).info("this rank is in %d process groups on the GPU", count)
    if count > STREAMS:
        warnings.warn(
            f"groups: this rank is in {count} process groups on the GPU, torch has {STREAMS} streams for them, so some "
            "wait for each other, at worst in a deadlock until the mesh's timeout; use fewer axes or pipeline stages, "
            "or destroy groups that you have created yourself",
            stacklevel=2,
        )


def broken_group() -> list[int]:
    """The ranks of a group that has failed, if one has."""
    return next((group.ranks for group in quiet_groups() if group.broken()), [])


def end_waits(thread: int, error: BaseException, noticed: threading.Event) -> None:
    """Raise ``error`` in a thread, unless it raises by itself and sets ``noticed``, and abort its wait.

    The error is set before the wait ends, so the thread never uses what the wait returns.
    """
    if noticed.wait(NOTICED):
        _abort_all()
        return
    raise_in_thread(thread, _raised_as(error, noticed))
    _abort_all()
    if not noticed.wait(SPOKEN):  # the thread is in a call that does not return
        print(error, file=sys.stderr, flush=True)


def _raised_as(error: BaseException, noticed: threading.Event) -> type[BaseException]:
    """A class whose instances are like ``error``: Python takes a class to raise in another thread."""

    def arrive(raised: BaseException) -> None:
        BaseException.__init__(raised, *error.args)
        raised.__dict__.update(error.__dict__)
        noticed.set()

    kind = type(error)
    return type(kind.__name__, (kind,), {"__init__": arrive, "__module__": kind.__module__})


def _abort_all() -> None:
    """Abort all groups in parallel: the abort of one may wait for the kernel of another."""
    threads = [threading.Thread(target=group.abort, daemon=True) for group in quiet_groups()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + ABORTED
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
