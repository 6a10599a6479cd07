"""Ranks on this machine: ``launch(fn, nproc=4)`` runs fn on 4 processes and returns their results.

Each process gets the environment that torchrun sets, so ``autopar.init_mesh`` in ``fn`` works the same under both.
Under torchrun, `launch` starts no process and runs ``fn`` on the current rank. The launcher hosts the store, which
therefore outlives any rank: survivors can read there which rank failed. Functions of a script are sent by name; those
of a REPL, ``python -c`` or a notebook by value, with cloudpickle.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import inspect
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.consistency.exit_checks import found_at_end
from autopar.runtime.fault import errors
from autopar.runtime.fault.error_propagation import SILENCE
from autopar.runtime.fault.heartbeat import LAUNCHER
from autopar.runtime.mesh.process_groups import DEFAULT_TIMEOUT
from autopar.values import whole_number

LEAVE = 5.0  # seconds for a rank that has reported to clean up
GRACE = SILENCE + 3.0  # seconds that the others get, after a rank has failed, to report their errors


# --- the caller: a script, which each rank imports, or code that no rank can import ------------------------------


def is_interactive() -> bool:
    """Whether ranks cannot import the caller: it has no file, or the file is "<stdin>"."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (file is None or not os.path.exists(file))


@contextlib.contextmanager
def importable_main() -> Iterator[None]:
    """Context manager: multiprocessing does not make ranks import "<stdin>"."""
    main: dict[str, Any] = vars(sys.modules["__main__"])
    hidden = {name: main.pop(name) for name in ("__file__",) if name in main and is_interactive()}
    try:
        yield
    finally:
        main.update(hidden)


def task_bytes(fn: Any, args: tuple[Any, ...]) -> tuple[bytes, bool]:
    """The pickled function and arguments, and whether they are sent by value. Raises ValueError if they cannot be."""
    if is_interactive() and getattr(fn, "__module__", "__main__") == "__main__":
        return by_value(f"launch: a function of {_where()}").dumps((fn, args)), True
    try:
        return pickle.dumps((fn, args)), False
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"launch: fn must be a module-level function with picklable arguments: {error}") from error


def by_value(what: str) -> ModuleType:
    """The module cloudpickle. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        raise ValueError(
            f"{what} is sent to ranks by value, which needs cloudpickle; pip install cloudpickle, or move it into a "
            "file and import it"
        ) from None


def _where() -> str:
    if "ipykernel" in sys.modules:
        return "a notebook"
    return "a REPL" if hasattr(sys, "ps1") else "python -c"


def check_guard() -> None:
    """Raises ValueError if the script launches outside of its ``__main__`` guard: each rank imports the script."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    line = _running_line(file)
    if line is None or file is None:
        return
    try:
        with open(file, encoding="utf-8") as source:
            statements = ast.parse(source.read()).body
    except (OSError, SyntaxError, ValueError):
        return
    before = [s for s in statements if s.lineno <= line]
    tests = [node for s in before if isinstance(s, ast.If) for node in ast.walk(s.test)]
    if any(isinstance(node, ast.Name) and node.id == "__name__" for node in tests):
        return
    raise ValueError(
        f"launch: each rank imports {os.path.basename(file)}, and its line {line} would launch ranks there again; put "
        'that line under if __name__ == "__main__":'
    )


def _running_line(file: str | None) -> int | None:
    """The line of the script's top level that is running."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__" and code.co_filename == file:
            return frame.f_lineno
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


# --- launching -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RankReport:
    """The result that a rank sends to the launcher."""

    value: Any = None
    error: str = ""
    trace: str = ""
    consequence: bool = False  # failed because another rank did


class LaunchError(RuntimeError):
    """Ranks started by `launch` failed. refusal: the ValueError that all of them raised alike, else ""."""

    def __init__(self, text: str, refusal: str = "") -> None:
        super().__init__(text)
        self.refusal = refusal


def launch(
    fn: Callable[..., Any],
    nproc: int = 4,
    args: Sequence[Any] = (),
    timeout: float | None = None,
    device: str | None = None,
) -> list[Any]:
    """Run ``fn(*args)`` on ``nproc`` ranks of this machine; returns their results in rank order.

    ``fn`` is a module-level function of a script with a guard (``if __name__ == "__main__":``), or any function of a
    notebook, a REPL or ``python -c``, which is sent by value (this needs cloudpickle). The function, its arguments and
    results are pickled; tensors on a GPU come back on the CPU. ``timeout``: seconds after which a collective whose
    peers are missing fails (default $AUTOPAR_TIMEOUT or 600). ``device``: "cpu" or "cuda" (a GPU per rank).
    Under torchrun, returns ``[fn(*args)]`` of this rank.

    Raises RuntimeError that names the ranks that failed, with the traceback of the first cause; the other ranks are
    terminated.
    """
    if not callable(fn):
        raise ValueError(f"launch: needs a function, found {fn!r}; pass a module-level one, and its arguments as args=")
    if "RANK" in os.environ:
        return [fn(*args)]
    whole_number("nproc", nproc, 1)
    if device == "cuda" and nproc > torch.cuda.device_count():
        raise ValueError(
            f"launch: {nproc} ranks need {nproc} GPUs, found {torch.cuda.device_count()}; launch fewer ranks, or use "
            "device='cpu'"
        )
    check_guard()
    task, by_value = task_bytes(fn, tuple(args))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    module = getattr(fn, "__module__", "")
    preload = [module] if module.startswith("autopar.") else []  # the caller's module may start threads
    with importable_main():
        processes, pipes = _start((task, by_value), preload, nproc, store.port, timeout, device)
    try:
        results = _collect(processes, pipes, store)
        for process in processes:
            process.join(LEAVE)
        return results
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _start(
    task: tuple[bytes, bool], preload: Sequence[str], nproc: int, port: int, timeout: float | None, device: str | None
) -> tuple[list[BaseProcess], list[Connection]]:
    # A server that has imported everything once forks the ranks; it has no threads and no device.
    context = multiprocessing.get_context("forkserver")
    preload = ["autopar.runtime.training.launch", "autopar.api", *preload]
    context.set_forkserver_preload(preload)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    for rank in range(nproc):
        here, there = context.Pipe(duplex=False)
        environment = _environment(rank, nproc, port, timeout, device)
        process = context.Process(target=_rank_main, args=(task, there, environment, device), daemon=True)
        _forked(process, preload)
        there.close()
        processes.append(process)
        pipes.append(here)
    return processes, pipes


def _forked(process: BaseProcess, preload: Sequence[str]) -> None:
    """Start one rank. An import that ends the server is repeated here, so that it raises."""
    try:
        process.start()
    except (EOFError, ConnectionError) as error:
        for name in preload:
            importlib.import_module(name)
        raise RuntimeError(
            f"launch: the process that forks ranks has ended ({error!r}); its own error is printed above"
        ) from error


def _environment(rank: int, nproc: int, port: int, timeout: float | None, device: str | None) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // nproc)
    out = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The launcher hosts the store, as torchrun's agent does.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    if timeout is not None:
        out["AUTOPAR_TIMEOUT"] = str(timeout)
    out.setdefault("AUTOPAR_TIMEOUT", str(DEFAULT_TIMEOUT))
    if device == "cpu":
        out["CUDA_VISIBLE_DEVICES"] = ""
    if "lo" in (name for _, name in socket.if_nameindex()):
        out.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return out


class _HostPickler(pickle.Pickler):
    """Pickles GPU tensors as CPU tensors: the launcher uses no GPU, and a rank's GPU memory ends with the rank."""

    def reducer_override(self, x: Any) -> Any:
        if type(x) is not torch.Tensor or not _on_gpu(x):  # a parameter is a pickle of such a tensor
            return NotImplemented
        return x.detach().cpu().requires_grad_(x.requires_grad).__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


def to_bytes(report: Any, by_value: bool = False) -> bytes:
    """A pickle that can be read without a GPU. ``by_value``: with cloudpickle, for classes of a notebook or REPL."""
    out = io.BytesIO()
    (_value_pickler() if by_value else _HostPickler)(out).dump(report)
    return out.getvalue()


def _value_pickler() -> Any:
    pickler: Any = by_value("launch: a result").Pickler

    class Both(pickler):
        def reducer_override(self, x: Any) -> Any:
            found = _HostPickler.reducer_override(self, x)
            return super().reducer_override(x) if found is NotImplemented else found

    return Both


def _rank_main(task: tuple[bytes, bool], pipe: Connection, environment: dict[str, str], device: str | None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # the garbage collector would copy pages shared with the server
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if device == "cuda":
        torch.cuda.set_device(int(environment["LOCAL_RANK"]))
    try:
        sent, by_value = task
        fn, args = pickle.loads(sent)
        report = _RankReport(fn(*args))
        if problem := found_at_end():
            raise ValueError(problem)
        message = to_bytes(report, by_value)
    except BaseException as error:
        error = errors.named(error)
        first = (str(error).splitlines() or [""])[0]
        consequence = isinstance(error, errors.CollectiveError)
        message = pickle.dumps(
            _RankReport(
                None, f"{type(error).__name__}: {first}", "".join(traceback.format_exception(error)), consequence
            )
        )
    pipe.send_bytes(message)
    pipe.close()
    errors.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _collect(processes: list[BaseProcess], pipes: list[Connection], store: dist.Store) -> list[Any]:
    reports: list[_RankReport | None] = [None] * len(pipes)
    pending = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline: float | None = None
    while pending:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(pending), left)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            try:
                report: _RankReport = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                processes[rank].join(5)
                report = _RankReport(None, f"died with exit code {_fate(processes[rank].exitcode)}")
            reports[rank] = report
            if report.error and not report.consequence:  # its peers need not wait for the heartbeat
                died = report.error.startswith("died")
                store.set(LAUNCHER, f"rank {rank} {'' if died else 'failed: '}{report.error}")
            if report.error and deadline is None:
                deadline = time.monotonic() + GRACE
    failed = {rank: r for rank, r in enumerate(reports) if r is not None and r.error}
    if failed:
        raise LaunchError(_story(failed, [rank for rank, r in enumerate(reports) if r is None]), _refusal(failed))
    return [r.value for r in reports if r is not None]


def _refusal(failed: dict[int, _RankReport]) -> str:
    """The text of the ValueError that all ranks which failed by themselves raised alike, else ""."""
    said = {r.error for r in failed.values() if not r.consequence}
    (words,) = said if len(said) == 1 else ("",)
    return words.removeprefix("ValueError: ") if words.startswith("ValueError: ") else ""


def _fate(code: int | None) -> str:
    if code is None or code >= 0:
        return str(code)
    name = signal.Signals(-code).name
    often = ", often by the kernel because memory ran out" if name == "SIGKILL" else ""
    return f"{code} (killed by {name}{often})"


def _story(failed: dict[int, _RankReport], ended: list[int]) -> str:
    causes = {rank: r for rank, r in failed.items() if not r.consequence} or failed
    lines = [
        f"launch: rank {rank} {'' if r.error.startswith('died') else 'failed: '}{r.error}" for rank, r in causes.items()
    ]
    lines += [f"  as a consequence, rank {rank}: {r.error}" for rank, r in failed.items() if rank not in causes]
    if ended:
        lines.append(f"  terminated by the launcher: rank {', '.join(map(str, ended))}")
    first = next(iter(causes.items()))
    if first[1].trace:
        lines.append(f"traceback of rank {first[0]}:\n{first[1].trace}")
    return "\n".join(lines)
