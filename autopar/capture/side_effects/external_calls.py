"""External calls of a forward: clocks, entropy, files, processes. Their results would be constants of the graph.

    random.random(), os.urandom(4), uuid.uuid4()       refused: drawn once, when the forward is captured
    open(path), torch.load(path), os.path.exists(p)    refused: a later step would not see a changed file
    time.time(), datetime.now(), dist.get_rank()       noted: harmless in a log message

Such functions are written in C, may have any name and may be called by Python's standard library, so a profiler
function sees every call of the forward, except those within torch functions: 0.2 us each. The caller is the innermost
frame that is in neither the standard library nor torch. Loggers, progress bars, imports and tests may call anything.
"""

from __future__ import annotations

import builtins
import datetime
import io
import linecache
import random
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from autopar.capture.reads.code_owners import LIBRARY, USER, owner_of_file

_EVERY_STEP = (
    " while it is captured, and the result would be the same in every step; call it outside of the forward and pass "
    "the result in as a tensor"
)
_DRAWN = f"{_EVERY_STEP}, or use dropout or torch.rand"
_FILES = ("stat", "lstat", "listdir", "scandir", "access", "open", "read", "pread", "readlink", "getcwd", "statvfs")
_PROCESSES = ("system", "fork", "posix_spawn", "getloadavg", "times", "sched_getaffinity", "wait", "waitpid")
_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time",
           "process_time_ns", "thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns", "localtime",
           "gmtime", "ctime", "strftime")  # fmt: skip
_ARE_NOTED = {"os": ("getpid", "getppid", "uname", "cpu_count"), "time": _CLOCKS, "socket": ("gethostname",),
              "sys": ("getrefcount", "_current_frames"), "gc": ("get_count", "get_stats", "get_objects"),
              "resource": ("getrusage",), "_thread": ("get_ident", "get_native_id")}  # fmt: skip
_IN_DATES = {"now", "utcnow", "today"}
_OF_MEMORY, _OF_RANKS = "torch.cuda.memory", "torch.distributed.distributed_c10d"
_RANKS = {"get_rank", "get_node_local_rank", "get_group_rank"}
_LOADS = ("torch.serialization", "torch.hub")
# packages that may call anything
_FREE = {"logging", "warnings", "tqdm", "traceback", "inspect", "linecache", "importlib", "tokenize", "tempfile",
         "unittest", "_pytest", "pytest", "pdb", "bdb", "IPython", "wandb", "loguru", "structlog", "rich", "absl",
         "tensorboard", "cProfile", "profile", "transformers", "shutil", "sympy", "triton"}  # fmt: skip
_WRITES = {"makedirs", "mkdir", "removedirs", "touch", "unlink", "rename", "replace", "write_text", "write_bytes"}
_IMPORTS = "<frozen importlib"


class ExternalCalls:
    """Profiles the calls of a forward between ``begin`` and ``end``, in their thread, but not from ``rest``
    until ``look``. ``refuse(text, place)`` raises; ``noted``: allowed calls -> their line."""

    def __init__(self, refuse: Callable[[str, str], None]) -> None:
        self.noted: dict[str, str] = {}
        self._refuse = refuse
        self._before: Any = None
        self._on = False
        self._seeded: dict[int, random.Random] = {}  # in the forward

    def begin(self) -> None:
        """Before the forward."""
        self._before, self._on = sys.getprofile(), True
        _WATCHED.append(self)
        self.look()

    def end(self) -> None:
        """After the forward, or its exception."""
        self._on = False
        _WATCHED.remove(self)
        sys.setprofile(None)
        if hasattr(self._before, "enable"):  # cProfile
            self._before.enable()
        elif self._before is not None:
            sys.setprofile(self._before)

    def said(self) -> list[str]:
        """Warnings for the calls in ``noted``."""
        return [
            f"capture: {place}: the forward calls {name} while it is captured; a computation or branch that uses the "
            "result is the same in every step; call it outside of the forward and pass the result in as a tensor"
            for name, place in self.noted.items()
        ]

    def rest(self) -> None:
        """Before a torch function: stop profiling."""
        sys.setprofile(None)

    def look(self) -> None:
        """After a torch function: profile again."""
        if self._on:
            sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            if function in _KINDS:
                self._ask(frame, *_KINDS[function])
                return
            held = function.__self__
            if type(held) in _OFTEN:
                return
            if isinstance(held, random.Random):
                self._of_generator(held, function.__name__, frame)
            elif found := _of_object(held, function.__name__):
                self._ask(frame, *found)
        elif event == "call":
            module = frame.f_globals.get("__name__")
            if module == _OF_MEMORY:
                self._ask(frame.f_back, f"torch.cuda.{frame.f_code.co_name}", "")
            elif module == _OF_RANKS and frame.f_code.co_name in _RANKS:
                self._ask(frame.f_back, f"torch.distributed.{frame.f_code.co_name}", "")

    def _of_generator(self, held: random.Random, method: str, frame: FrameType) -> None:
        """A generator that the forward creates and seeds draws the same numbers in every forward, so it is allowed."""
        if method == "seed" and held is not random._inst and frame.f_locals.get("a", 0) is not None:
            self._seeded[id(held)] = held
        elif id(held) not in self._seeded:
            self._ask(frame, f"random.{method}", _DRAWN)

    def _ask(self, frame: FrameType | None, name: str, how: str) -> None:
        """``how``: the reason to refuse the call; "" to note it."""
        found = _asker(frame, how == _DRAWN)
        if found is None:
            return
        asker, called = found
        name = _called_name(called) or name
        place = _place_of(asker)
        if how:
            self._refuse(f"the forward calls {name}{how}", place)
        self.noted.setdefault(name, place)

    def opens(self, frame: FrameType) -> None:
        """Called when a file is opened for reading."""
        if self._on and sys.getprofile() is not None:
            self._ask(frame, "open", _EVERY_STEP)


_WATCHED: list[ExternalCalls] = []  # by this thread


@contextmanager
def seen_files() -> Iterator[None]:
    """Within: `open` tells the forward that runs what it opens to read."""
    original = builtins.open

    def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if _WATCHED and isinstance(mode, str) and ("r" in mode or "+" in mode):
            _WATCHED[-1].opens(sys._getframe(1))
        return original(file, mode, *args, **kwargs)

    builtins.open = io.open = open
    try:
        yield
    finally:
        builtins.open = io.open = original


def _asker(frame: FrameType | None, of_libraries: bool) -> tuple[FrameType, FrameType | None] | None:
    """(the frame of the forward's own code, the function that it has called, if it is not the one at hand); None for
    what loggers, imports and torch do by themselves. ``of_libraries``: whether a library is such code."""
    inner: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        owner = owner_of_file(file)
        if owner == USER or (owner == LIBRARY and of_libraries):
            free = _is_free(frame) or (inner is not None and _is_free(inner))
            return None if free else (frame, inner)
        if file.startswith(_IMPORTS):
            return None
        frame, inner = frame.f_back, frame
    return None


def _is_free(called: FrameType) -> bool:
    name = str(called.f_globals.get("__name__"))
    top = name.partition(".")[0]
    if top in ("torch", "autopar"):
        return not name.startswith(_LOADS)
    return top in _FREE or called.f_code.co_name in _WRITES


def _called_name(called: FrameType | None) -> str:
    if called is None:
        return ""
    module = str(called.f_globals.get("__name__"))
    top = module.partition(".")[0]
    name = called.f_code.co_name
    if name in ("__init__", "__new__"):
        made = next(iter(called.f_locals.values()))
        name = (made if isinstance(made, type) else type(made)).__qualname__
    return f"{top if top in ('torch', 'numpy') else _PUBLIC.get(module, module)}.{name}"


_PUBLIC = {"genericpath": "os.path", "posixpath": "os.path", "_thread": "threading", "_uuid": "uuid"}


def _place_of(frame: FrameType) -> str:
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{line} in {frame.f_code.co_name}, `{linecache.getline(file, line).strip()}`"


def _of_object(held: Any, method: str) -> tuple[str, str] | None:
    """(name, how) of a method of an object that is outside of Python."""
    if isinstance(held, io.IOBase):
        reads = method.startswith("read") and method != "readable" and not isinstance(held, (io.StringIO, io.BytesIO))
        return (f"{method} of a file", _EVERY_STEP) if reads else None
    if isinstance(held, socket.socket):
        return (f"{method} of a socket", _EVERY_STEP) if method.startswith(("recv", "accept", "connect")) else None
    if isinstance(held, type) and issubclass(held, datetime.date):
        return (f"{held.__name__}.{method}", "") if method in _IN_DATES else None
    if isinstance(held, torch.Generator) and held is torch.default_generator:
        return f"torch.default_generator.{method}", _DRAWN
    return None


def _kinds() -> Iterator[tuple[Any, tuple[str, str]]]:
    """Functions of C: (name, how they are refused)."""
    tables = [("os", _FILES, _EVERY_STEP), ("os", _PROCESSES, _EVERY_STEP), ("os", ("urandom", "getrandom"), _DRAWN),
              ("_uuid", ("generate_time_safe",), _DRAWN), ("_posixsubprocess", ("fork_exec",), _EVERY_STEP),
              ("_thread", ("start_new_thread", "start_new"), _EVERY_STEP), ("builtins", ("input",), _EVERY_STEP),
              ("numpy", ("fromfile",), _EVERY_STEP)]  # fmt: skip
    tables += [(module, names, "") for module, names in _ARE_NOTED.items()]
    for module, names, how in tables:
        with suppress(ImportError):
            scope = __import__(module)
            for name in names:
                if (function := getattr(scope, name, None)) is not None:
                    yield function, (f"{_PUBLIC.get(module, module)}.{name}", how)


_KINDS: dict[Any, tuple[str, str]] = dict(_kinds())
_OFTEN = {
    dict,
    list,
    str,
    type(sys),
    type(None),
    int,
    tuple,
    set,
    Tensor,
}  # types of frequent method calls, which are harmless
