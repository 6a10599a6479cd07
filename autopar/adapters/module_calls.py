"""Intercepts calls of one module by its ``_compiled_call_impl``, which torch calls first, without changing its
class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_WAY_IN = "_compiled_call_impl"


def refuse_calls(module: nn.Module, error: Callable[[], Exception]) -> None:
    """Make calls of this module raise the error. Its copies and other modules of its class may be called."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise error()

    module.__dict__[_WAY_IN] = refused


def allow_calls(module: nn.Module) -> None:
    """Allow calls of the module again."""
    module.__dict__.pop(_WAY_IN, None)
