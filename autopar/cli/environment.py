"""Facts about this machine, one per line; none needs a GPU or starts processes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.cache.disk_cache import entry_folder
from autopar.capture.reads.code_owners import OURS
from autopar.chips import CHIPS
from autopar.spelling import did_you_mean
from autopar.version import VERSION

_LIBRARIES = ("numpy", "transformers", "accelerate", "triton", "flash-attn", "safetensors", "scipy", "rich")
_SETTINGS = re.compile(r"(AUTOPAR|TORCH|PYTORCH|NCCL|GLOO|OMP|MKL|CUDA|HF|TRANSFORMERS)_|(RANK|LOCAL_RANK|WORLD_SIZE)$")
_READ = (
    "CACHE",
    "CACHE_CHECK",
    "CACHE_SIZE",
    "DUMP",
    "FLIGHT",
    "HEARTBEAT_TIMEOUT",
    "MEMORY",
    "REPLICA",
    "REPLICA_STORE",
    "TIMEOUT",
)
_OWN = tuple(f"AUTOPAR_{name}" for name in _READ)
_OTHER_WORDS = {"autopar_silence": "AUTOPAR_HEARTBEAT_TIMEOUT"}
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY")


def environment_lines() -> list[str]:
    """Lines to paste into a bug report, without secrets and the name of the home folder."""
    width = max(len(name) for name, _ in _facts())
    home = str(Path.home())
    return [f"{name:<{width}}  {value.replace(home, '~')}".rstrip() for name, value in _facts()]


def _facts() -> Iterator[tuple[str, str]]:
    yield "autopar", f"{VERSION}, in {OURS}"
    yield "python", f"{platform.python_version()}, {sys.executable}"
    yield "system", f"{platform.platform()}, {os.cpu_count()} cores, {_memory()}"
    yield "torch", f"{torch.__version__} {_asked('torch')}"
    for name in _LIBRARIES:
        yield name, f"{_version(name)} {_asked(name)}".strip()
    yield "devices", _devices()
    yield "communication", ", ".join(_backends()) or "none: torch is built without torch.distributed"
    for name, words in _supported():
        yield name, words
    yield "cache", _cache()
    for name in sorted(os.environ):
        if _SETTINGS.match(name) and not _SECRET.search(name):
            yield name, (os.environ[name] or "(empty)") + _unread(name)


def _unread(name: str) -> str:
    if not name.startswith("AUTOPAR_") or name in _OWN:
        return ""
    return f" (autopar reads no such variable{did_you_mean(name, _OWN, _OTHER_WORDS)})"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _asked(name: str) -> str:
    """The versions that autopar supports."""
    try:
        lines = importlib.metadata.requires("autopar") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    for line in lines:
        found = re.fullmatch(r"([\w-]+)\s*([^;]*)(;.*)?", line)
        if found and found[1] == name and found[2].strip():
            return f"(made for {found[2].strip()})"
    return ""


def _memory() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return f"{pages / 2**30:.0f} GiB"


def _devices() -> str:
    if not torch.cuda.is_available():
        why = "this torch is built for the CPU" if torch.version.cuda is None else "no GPU, or no driver"
        threads = torch.get_num_threads()
        kind = f"{torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' * (threads > 1)}"
        return f"CPU ({kind}); CUDA: {why}"
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}: " + ", ".join(f"{x.name} {x.total_memory / 2**30:.0f} GiB" for x in found)


def _backends() -> list[str]:
    if not dist.is_available():
        return []
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [name for name, here in there.items() if here]


def _supported() -> Iterator[tuple[str, str]]:
    """Features that work on this machine, and requirements of the others."""
    gpu = torch.cuda.is_available()
    yield "ranks on GPUs", "yes" if gpu and dist.is_nccl_available() else "no: needs a GPU, and torch with NCCL"
    yield "ranks on CPUs", "yes" if "gloo" in _backends() else "no: needs torch with gloo"
    yield (
        "models of transformers",
        "yes" if importlib.util.find_spec("transformers") else "no: pip install 'autopar[hf]'",
    )
    compiler = any(
        os.access(Path(folder) / name, os.X_OK) for folder in os.get_exec_path() for name in ("g++", "clang++")
    )
    inductor = "yes" if gpu or compiler else "no: needs a C++ compiler (g++) on the CPU"
    yield "backend=eager", "yes"
    yield "backend=inductor", inductor
    yield "backend=cudagraphs", "yes" if gpu else "no: needs a GPU"
    yield "plans for", f"any mesh, without processes; estimates for {', '.join(CHIPS)}"


def _cache() -> str:
    try:
        folder = entry_folder()
    except ValueError as error:
        return str(error)
    if folder is None:
        return "off"
    there = next(path for path in (folder.path, *folder.path.parents) if os.path.exists(path))
    return f"{folder.path}" if os.access(there, os.W_OK) else f"{folder.path}: cannot be written, so nothing is kept"
