"""Files of Triton kernels as modules of their own: interpreted on the CPU, or to be compiled."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


def fresh(file: Path, name: str) -> ModuleType:
    """A copy of the module; Triton decides at its import whether kernels are interpreted."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def interpreted(file: Path, name: str) -> Iterator[ModuleType]:
    """On the CPU. The interpreter cuts bits off where GPUs round: its conversion to bfloat16 is torch's here."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (str(source), str(target)) != ("fp32", "bf16"):
            return convert(x, source, target, mode)
        return torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounded)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TRITON_INTERPRET", "1")
            module = fresh(file, name)
        yield module
