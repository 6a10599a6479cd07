"""torch asks a module's ``_compiled_call_impl`` first when it is called: a way in that leaves its class alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_WAY_IN = "_compiled_call_impl"


def refuse_calls(module: nn.Module, error: Callable[[], Exception]) -> None:
    """From now on a call of this module, of no other of its class, raises the error. Copies may be called."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise error()

    module.__dict__[_WAY_IN] = refused


def allow_calls(module: nn.Module) -> None:
    """A call of the module is what its class says it is."""
    module.__dict__.pop(_WAY_IN, None)
