"""A stand-in for NCCL on the CPU: a backend whose work never raises in ``wait``.

    dist.init_process_group("deaf", ...)        # every group that is made from it is of that kind

It exchanges over gloo. When gloo fails in a wait (a rank is gone, or the timeout has passed), the wait goes on, as that
of a GPU does, until the group is aborted; then it returns as if nothing had happened. ``get_error`` tells of it, if
`watchdog` is true. What is started on an aborted group raises.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

watchdog = True


class DeafGroup(dist.ProcessGroup):  # type: ignore[misc]
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[attr-defined]
        self.aborted, self._error = threading.Event(), ErrorType.SUCCESS
        self._name = self._desc = ""
        for name in ("allreduce", "broadcast", "send", "recv", "barrier", "allgather", "reduce_scatter"):
            setattr(self, name, self._starts(getattr(self._gloo, name)))

    def _starts(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **kwargs: Any) -> DeafWork:
            if self.aborted.is_set():
                raise RuntimeError("NCCL communicator was aborted")
            return DeafWork(self, functools.partial(call, *args, **kwargs))

        return start

    def failed(self) -> None:
        if watchdog:
            self._error = ErrorType.COMM_ERROR
        self.aborted.wait()

    def get_error(self) -> ErrorType:
        return self._error

    def abort(self) -> None:
        self.aborted.set()

    def getBackendName(self) -> str:
        return "deaf"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, name: str) -> None:
        self._desc = name

    def getGroupDesc(self) -> str:
        return self._desc


class DeafWork(dist.Work):  # type: ignore[misc]
    def __init__(self, group: DeafGroup, call: Callable[[], Any]) -> None:
        super().__init__()
        self._group, self._work = group, None
        try:
            self._work = call()
        except RuntimeError:  # gloo may say so at once; a GPU does not
            self._work = None

    def wait(self, timeout: Any = None) -> bool:
        try:
            if self._work is None:
                raise RuntimeError
            self._work.wait()
        except RuntimeError:
            self._group.failed()
        return True


dist.Backend.register_backend("deaf", DeafGroup, devices=["cpu"])
