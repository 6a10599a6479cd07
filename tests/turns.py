"""How long a process of the tests keeps a core that it shares.

    set_turn(LONG)          this process: up to 100 ms; what it forks takes turns as everybody

The working sets of Python and torch are larger than the caches next to a core: four workers on two cores that change
every 1.4 ms, as Linux has it, need 30 % more processor time than two. Linux gives longer turns since 6.12
(sched_setattr(2)); before, and elsewhere, nothing happens. Ranks that send to each other keep short turns: gloo's
threads burn theirs while the rank that holds a lock waits for one.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

LONG = 0.1  # seconds, the longest that there is
_SET, _GET = {"x86_64": (314, 315), "aarch64": (274, 275)}.get(platform.machine(), (0, 0))  # numbers of system calls
_RESET_ON_FORK = 1
_FACTS = struct.Struct("=IIQiIQQQII")  # struct sched_attr: size, policy, flags, nice, priority, runtime in ns, ...


def set_turn(seconds: float) -> None:
    """Where it can be chosen. 0: as everybody."""
    if _SET and hasattr(os, "SCHED_OTHER"):  # Linux
        facts = _FACTS.pack(_FACTS.size, os.SCHED_OTHER, _RESET_ON_FORK, 0, 0, int(seconds * 1e9), 0, 0, 0, 0)
        ctypes.CDLL(None).syscall(_SET, 0, facts, 0)


def turn() -> float:
    """Seconds that this process has; 0 where it is not known."""
    facts = ctypes.create_string_buffer(_FACTS.size)
    found = _GET and hasattr(os, "SCHED_OTHER") and ctypes.CDLL(None).syscall(_GET, 0, facts, _FACTS.size, 0) == 0
    return _FACTS.unpack(facts.raw)[5] / 1e9 if found else 0.0
