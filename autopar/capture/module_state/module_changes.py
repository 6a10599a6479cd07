"""Changes of its own modules that a forward may make while it is captured.

    self.register_buffer("seen", x)                      becomes a plain attribute of the copy
    self.classifier = self.classifier.to(self.dtype)     the copy computes with cast parameters and buffers

The changes are made on the traced copy, which is discarded; a warning says that the model itself does not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def changes_as_values(running: Callable[[], bool], said: dict[str, None]) -> Iterator[None]:
    """Context manager: while ``running()``, new buffers and casts of modules leave registered tensors unchanged.
    Warnings are added to ``said``."""
    register, to = nn.Module.register_buffer, nn.Module.to

    def register_buffer(self: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if running() and tensor is not None and name not in self._buffers:
            self.__dict__[name] = tensor
        else:
            register(self, name, tensor, persistent)  # handled like assignments to buffers

    def cast(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not running():
            return to(self, *args, **kwargs)
        _, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        if layout is not None:
            return to(self, *args, **kwargs)
        for module in self.modules() if dtype is not None else ():
            for name, x in [*module._parameters.items(), *module._buffers.items()]:
                if x is not None and (x.is_floating_point() or x.is_complex()) and x.dtype != dtype:
                    module.__dict__[name] = value = x.to(dtype)  # shadows the registered tensor
                    if value is not x:
                        said[
                            f"capture: the forward casts {type(module).__name__}.{name} to {dtype}: steps compute with "
                            f"a cast copy, and the model keeps {x.dtype}"
                        ] = None
        return self

    setattr(nn.Module, "register_buffer", register_buffer)  # noqa: B010  (typed as methods)
    setattr(nn.Module, "to", cast)  # noqa: B010
    try:
        yield
    finally:
        setattr(nn.Module, "register_buffer", register)  # noqa: B010
        setattr(nn.Module, "to", to)  # noqa: B010
