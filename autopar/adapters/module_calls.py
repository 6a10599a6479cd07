"""Intercepts calls of one module without changing its class: by its ``_compiled_call_impl``, which torch calls first,
or by a forward of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Context manager: the module computes by ``forward``."""
    own = {name: x for name, x in vars(module).items() if name == "forward"}
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        vars(module).update(own)
