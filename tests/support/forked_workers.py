"""Workers of xdist that are forked from the process which starts them: it has imported all files of tests, once.

Otherwise each of four workers takes as long, on two cores. What is started later, for one that died, is a new process.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from autopar.capture.trace.gc_pause import paused_collector
from tests.support.launched import ROOT, forget_server
from tests.support.ranks import PR_SET_PDEATHSIG


@dataclass(frozen=True)
class _Worker:
    """A process that waits for what execnet tells a new interpreter; ``told``, ``answers``: our ends of its pipes."""

    pid: int
    told: int
    answers: int


class _ErrorsNow:
    """What is ``sys.stderr`` when it is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class _Forked(gateway_io.Popen2IOMaster):
    """What execnet makes of a process that it has started."""

    def __init__(self, worker: _Worker, execmodel: Any) -> None:
        self.pid = worker.pid
        Popen2IO.__init__(self, os.fdopen(worker.told, "wb"), os.fdopen(worker.answers, "rb"), execmodel)

    def wait(self) -> int | None:
        with suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def fork_workers(config: pytest.Config, specs: Iterable[Any]) -> None:
    """One for each of ``specs`` that asks for no more than a process here. To be called before there are threads."""
    _import_tests(config.args)
    workers: list[_Worker] = []
    for _ in filter(_is_plain, specs):
        workers.append(_forked(workers))
    create_io = gateway_io.create_io

    def forked_first(spec: Any, execmodel: Any) -> Any:
        return _Forked(workers.pop(0), execmodel) if workers and _is_plain(spec) else create_io(spec, execmodel)

    gateway_io.create_io = forked_first


def _is_plain(spec: Any) -> bool:
    return bool(spec.popen) and not (spec.python or spec.via or spec.chdir or spec.env or spec.nice)


def _import_tests(args: Iterable[str]) -> None:
    """Of the files and folders that are asked for. What cannot be imported is for the workers to say."""
    with paused_collector():
        for arg in args:
            path = Path(arg.partition("::")[0]).resolve()
            for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
                with suppress(Exception, pytest.skip.Exception):
                    importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
        gc.freeze()


def _forked(others: Iterable[_Worker]) -> _Worker:
    asked, told = os.pipe()
    answers, answered = os.pipe()
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(asked), os.close(answered)
        return _Worker(pid, told, answers)
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # who is killed cannot end the workers
        for mine in (_Worker(0, told, answers), *others):
            os.close(mine.told), os.close(mine.answers)
        _be_new_interpreter(asked, answered)
        exec(eval(sys.stdin.readline()), vars(sys.modules["__main__"]))  # as execnet's own command line
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


def _be_new_interpreter(stdin: int, stdout: int) -> None:
    """What is there is of pytest as it was started, of which the new one knows nothing."""
    for end, number in ((stdin, 0), (stdout, 1)):
        os.dup2(end, number)
        os.close(end)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.modules["__main__"] = types.ModuleType("__main__")  # else what a test launches imports pytest as its main
    sys.argv = ["-c"]
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "AssertionRewritingHook"]
    for handler in filter(None, (reference() for reference in logging._handlerList)):
        if type(handler) is logging.StreamHandler:  # torch's have what pytest had in the place of stderr
            handler.stream = _ErrorsNow()
    forget_server()
