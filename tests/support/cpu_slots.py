"""How long processes and threads of the tests keep a core that they share.

    set_turn(LONG)          this process: up to 100 ms; what it forks takes turns as everybody
    take_turns_as_rank()    a rank: 8 ms, and gloo's threads, which do not push it from its core, 0.1 ms
    with usual_turns(): ... a rank, and gloo's threads: as everybody

The working sets of Python and torch are larger than the caches next to a core: four workers on two cores that change
every 1.4 ms, as Linux has it, need 30 % more processor time than two. Linux gives longer turns since 6.12
(sched_setattr(2)); before, and elsewhere, nothing happens.

Ranks wait for each other, and have shorter ones. gloo's thread asks again and again for the lock of a connection: while
the rank that holds it waits for its turn, the thread burns its own. (And lets go of tensors later, than where it is
served at once: who meters them takes usual turns.)
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LONG = 0.1  # seconds, the longest that there is
OF_RANK, OF_LOOP = 0.008, 0.0001
_SET, _GET = {"x86_64": (314, 315), "aarch64": (274, 275)}.get(platform.machine(), (0, 0))  # numbers of system calls
_LINUX = _SET and hasattr(os, "SCHED_BATCH")
_RESET_ON_FORK = 1
_FACTS = struct.Struct("=IIQiIQQQII")  # struct sched_attr: size, policy, flags, nice, priority, runtime in ns, ...


def set_turn(seconds: float, thread: int = 0, *, yields: bool = False) -> bool:
    """Of the calling thread, or another one; its niceness stays. ``yields``: it pushes nobody from a core. 0: as
    everybody. False where the system does not know or allow it, or the thread is scheduled as idle or real-time."""
    if not _LINUX or os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK not in (os.SCHED_OTHER, os.SCHED_BATCH):
        return False
    policy, nice = os.SCHED_BATCH if yields else os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, thread)
    facts = _FACTS.pack(_FACTS.size, policy, _RESET_ON_FORK, nice, 0, int(seconds * 1e9), 0, 0, 0, 0)
    return bool(ctypes.CDLL(None).syscall(_SET, thread, facts, 0) == 0)


def turn(thread: int = 0) -> float:
    """Seconds of the calling thread, or another one; 0 where it is not known."""
    facts = ctypes.create_string_buffer(_FACTS.size)
    found = _LINUX and ctypes.CDLL(None).syscall(_GET, thread, facts, _FACTS.size, 0) == 0
    return _FACTS.unpack(facts.raw)[5] / 1e9 if found else 0.0


def take_turns_as_rank() -> None:
    """Of a process that has a group."""
    set_turn(OF_RANK)
    for thread in loops():
        set_turn(OF_LOOP, thread, yields=True)


@contextmanager
def usual_turns() -> Iterator[None]:
    """Of a rank."""
    for thread in (0, *loops()):
        set_turn(0, thread)
    try:
        yield
    finally:
        take_turns_as_rank()


def loops() -> list[int]:
    """gloo's threads of this process."""
    found = []
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # of others, which end meanwhile
            if (thread / "comm").read_text().startswith("gloo_tcp_loop"):
                found.append(int(thread.name))
    return found
