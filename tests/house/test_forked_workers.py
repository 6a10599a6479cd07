"""A worker that is forked is, to what runs in it and to what it starts, as one that was started."""

from __future__ import annotations

import json
import os
import time

from execnet.gateway_base import get_execmodel

from tests.support.forked_workers import _Forked, _forked, _Worker

# As execnet tells a new interpreter. What ends this process's ranks when it ends is forgotten first.
FACTS = """import atexit, json, sys, __main__
from multiprocessing import forkserver
atexit._clear()
finders = [type(finder).__name__ for finder in sys.meta_path]
facts = {
    "main": [name for name in ("__file__", "pytest") if hasattr(__main__, name)] + [__main__.__spec__],
    "argv": sys.argv,
    "server": forkserver._forkserver._forkserver_pid,
    "streams": [sys.stdin.fileno(), sys.stdout.fileno()],
    "rewrites": "AssertionRewritingHook" in finders,
}
print(json.dumps(facts), flush=True)
"""
WRONG = "import atexit; atexit._clear(); raise ValueError('planted')"
WAITS = "import atexit, sys; atexit._clear(); print('ready', flush=True); assert not sys.stdin.read()"


def two(told: str) -> list[_Forked]:
    workers: list[_Worker] = []
    for _ in range(2):
        workers.append(_forked(workers))
    forked = [_Forked(worker, get_execmodel("main_thread_only")) for worker in workers]
    for one in forked:
        one.write(f"{told!r}\n".encode())
    return forked


def status(one: _Forked) -> int | None:
    """Once it has ended by itself; or it is killed."""
    end = time.monotonic() + 20
    while not os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) and time.monotonic() < end:
        time.sleep(0.02)
    one.kill()
    return one.wait()


def test_it_knows_nothing_of_pytest_as_it_was_started() -> None:
    for one in two(FACTS):
        assert json.loads(one.infile.readline()) == {
            "main": [None],
            "argv": ["-c"],
            "server": None,
            "streams": [0, 1],
            "rewrites": False,
        }
        assert status(one) == 0 and one.infile.read() == b""


def test_an_error_ends_it() -> None:
    assert [status(one) for one in two(WRONG)] == [1, 1]


def test_it_ends_with_the_process_that_started_it() -> None:
    """None of them holds the pipes of another one open."""
    first, second = two(WAITS)
    assert first.infile.readline() == second.infile.readline() == b"ready\n"
    first.close_write()
    assert status(first) == 0
    second.kill()
    assert status(second) == -9
    assert second.wait() is None  # as execnet asks once more
    second.kill()
