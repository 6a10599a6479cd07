"""What is there: the GPU, what drives it, and the libraries."""

from __future__ import annotations

import functools
import importlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator

import torch

from tests.gpu_check.processes import Check, Machine
from tests.gpu_check.rows import NOT_APPLICABLE, OK, Row


def checks(machine: Machine) -> list[Check]:
    """All in one process."""
    return [Check("facts", "facts", facts, seconds=60.0)]


def facts(machine: Machine) -> Iterator[Row]:
    """A row for each; what cannot be found out does not apply."""
    known: dict[str, Callable[[], object]] = {
        "torch": lambda: f"{torch.__version__}, CUDA {torch.version.cuda}",
        "python": platform.python_version,
        "host": lambda: f"{platform.platform()}, {os.cpu_count()} cores",
        "autopar": commit,
        "flash-attn": flash_attn,
        "triton": lambda: importlib.import_module("triton").__version__,
        "driver": lambda: smi("--query-gpu=driver_version", "--format=csv,noheader"),
        "topology": lambda: smi("topo", "-m"),
    }
    if machine.is_gpu:
        known |= {f"GPU {i}": functools.partial(gpu, i) for i in range(machine.gpus)}
        known |= {"NCCL": lambda: torch.cuda.nccl.version(), "cuDNN": torch.backends.cudnn.version}
        known |= {"peers": peers}
    for name, find in known.items():
        try:
            yield Row(name, "", OK, words=str(find()))
        except Exception as error:
            yield Row(name, "", NOT_APPLICABLE, words=f"{type(error).__name__}: {error}")


def gpu(index: int) -> str:
    """Name, capability, memory, partition."""
    found = torch.cuda.get_device_properties(index)
    return (
        f"{found.name}, capability {found.major}.{found.minor}, {found.total_memory / 2**30:.1f} GiB, "
        f"{found.multi_processor_count} multiprocessors"
    )


def peers() -> str:
    """Which GPUs reach each other's memory."""
    count = torch.cuda.device_count()
    pairs = [(i, j) for i in range(count) for j in range(count) if i < j]
    return f"{sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)} of {len(pairs)} pairs"


def flash_attn() -> str:
    """The version, if the interface that we call can be imported."""
    version = importlib.import_module("flash_attn").__version__
    importlib.import_module("flash_attn.flash_attn_interface")
    return str(version)


def commit() -> str:
    """Of this checkout."""
    here = os.path.dirname(__file__)
    found = subprocess.run(
        ["git", "-C", here, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10
    )
    return found.stdout.strip() or "no git checkout"


def smi(*arguments: str) -> str:
    """What nvidia-smi says."""
    if shutil.which("nvidia-smi") is None:
        raise FileNotFoundError("no nvidia-smi")
    found = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=True)
    return found.stdout.strip()
