"""The connections of this rank's process groups, and how a wait that cannot end is ended: by breaking them.

A gloo collective waits in C++ for its timeout if a peer is stopped, whoever called it: a step, DTensor, an optimizer,
distributed checkpoint. Nothing in torch reaches into that wait. What does is the operating system: once its sockets are
shut down, the wait fails as if the peer had closed them. Only sockets that appeared while groups were made are touched.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
