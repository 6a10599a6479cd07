"""Which thread traces: torch's classes are changed for all of them, and the others go on with what they do."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.fx.experimental.proxy_tensor import get_proxy_mode


def traced_by_this_thread() -> Callable[[], bool]:
    """What tells whether the caller is in this thread, and operators are traced. (torch's own modes are the same in
    all threads.)"""
    thread = threading.get_ident()
    return lambda: threading.get_ident() == thread and get_proxy_mode() is not None
