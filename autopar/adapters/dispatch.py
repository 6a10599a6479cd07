"""Dispatch modes, and kernels of operators."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

__all__ = ["DispatchMode", "has_kernel", "without_modes"]


def without_modes() -> AbstractContextManager[Any]:
    """Context manager without active modes, including fake tensor mode."""
    return _disable_current_modes()


def has_kernel(name: str, key: str) -> bool:
    """Whether an operator ("namespace::name.overload") has a kernel of its own under a dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def modes_around() -> int:
    """Number of active function and dispatch modes."""
    return len(_get_current_function_mode_stack()) + len(_get_current_dispatch_mode_stack())
