"""Which thread is tracing: classes of torch are patched for all threads, but only one traces."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.fx.experimental.proxy_tensor import get_proxy_mode


def traced_by_this_thread() -> Callable[[], bool]:
    """A function that returns whether the caller is in this thread, and operators are traced. (torch's own modes are
    global.)"""
    thread = threading.get_ident()
    return lambda: threading.get_ident() == thread and get_proxy_mode() is not None
