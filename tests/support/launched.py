"""Processes of `autopar.launch` in tests: what forks them has imported once what each of them would import.

    serve()                         from now on, for all that this process launches
    serve_workers()                 for all that workers of this process launch: one server, not one of each
    in_child(body, *args)           in a process of its own that may make meshes and launch ranks
    in_fresh(body, *args)           in one in which no test has changed anything

Users' ranks come from such a server too, which imports less: see tests/runtime/test_launched_script.py.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.ranks import PR_SET_PDEATHSIG

ADDRESS = "TESTS_SERVER"  # variable of the environment, of workers; those of autopar are in the keys of steps
TIMEOUT, LEAVE = 600.0, 10.0  # seconds until there is an answer, and to clean up
ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def serve() -> None:
    """Once per process. What `launch` asks for afterwards is there."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if ADDRESS in os.environ:
        server._forkserver_address, server._forkserver_alive_fd = os.environ[ADDRESS], os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = resource_tracker.ensure_running  # a server of somebody else, who outlives this process
        return
    forkserver.set_forkserver_preload(
        ["tests.support.no_device_threads", "autopar.runtime.training.launch", "tests.support.launched_warm"]
    )
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])):
        forkserver.ensure_running()


def serve_workers() -> None:
    """To be called before they are started. Of servers that also want a key each worker has its own."""
    serve()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if not hasattr(server, "_forkserver_authkey"):
        os.environ[ADDRESS] = server._forkserver_address


def forget_server() -> None:
    """In a process that has inherited what another one knows of its server."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    serve.cache_clear()


def in_child(body: Callable[..., Any], *args: Any) -> Any:
    """What ``body(*args)`` returns in a process that is forked from this one, which has imported and captured much."""
    return _answer(multiprocessing.get_context("fork"), body, args)


def in_fresh(body: Callable[..., Any], *args: Any) -> Any:
    """The same in one that the server forks, where no test has run. Its environment is of when the server started."""
    serve()
    return _answer(multiprocessing.get_context("forkserver"), body, args)


def _answer(context: Any, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(there, body, args))
    process.start()
    there.close()
    try:
        found, error = here.recv() if here.poll(TIMEOUT) else (None, f"it was still running after {TIMEOUT:.0f} s")
    except EOFError:
        found, error = None, "it died"
    process.join(LEAVE)
    process.kill()
    process.join()
    assert not error, error
    return found


def _child(pipe: Connection, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A server is the parent's, and alive: only the parent can wait for it.
    if serve.cache_info().currsize:
        forkserver._forkserver.ensure_running = os.getpid  # type: ignore[attr-defined]
    try:
        pipe.send((body(*args), ""))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
