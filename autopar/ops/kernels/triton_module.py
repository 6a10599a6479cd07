"""Modules with Triton kernels, where Triton runs."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def module_that_runs(name: str, device: torch.device, probe: Callable[[Any, torch.device], None], instead: str) -> Any:
    """The module of a name, if ``probe`` runs with it; else None, and a warning of what happens ``instead``.

    Tried once per device: Triton may be installed without the compiler that it calls.
    """
    try:
        module = importlib.import_module(name)
        probe(module, device)
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"{name.rpartition('.')[2]}: Triton does not run on {device} ({type(error).__name__}: {why}), so {instead}",
            stacklevel=3,
        )
        return None
    return module
