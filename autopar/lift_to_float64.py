"""Float32 islands lifted to float64, so that two runs of one model can be compared bit for bit.

Many models compute norms, rotary tables, router scores and losses in float32 whatever their own dtype. A float64
model then rounds in the middle, and equal mathematics in another order differs by 1e-8 instead of 1e-16. Under
`LiftFloat32` each request for float32 is read as one for float64:

    x.float(), x.to(torch.float32), softmax(x, dtype=torch.float32)   -->   x.double(), x.to(torch.float64), ...
    torch.zeros(3), torch.arange(0.5, 2)                              -->   float64: the default dtype is lifted too
    module.to(torch.float32)                                          -->   module.to(torch.float64)

Existing tensors are not converted: pass a float64 model and float64 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_RENAMED: dict[Any, Callable[..., torch.Tensor]] = {torch.Tensor.float: torch.Tensor.double}


class LiftFloat32(TorchFunctionMode):
    """Within this mode, requests for float32 are served in float64.

    Works around an eager run and around `torch.export.export` (not strict) alike; nests.
    """

    def __enter__(self) -> LiftFloat32:
        self._default = torch.get_default_dtype()
        if self._default == torch.float32:
            torch.set_default_dtype(torch.float64)
        self._to = to = nn.Module.to  # not dispatched to __torch_function__

        def lifted(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            return to(module, *map(_lift, args), **{name: _lift(value) for name, value in kwargs.items()})

        setattr(nn.Module, "to", lifted)  # noqa: B010  (typed as a method)
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        torch.set_default_dtype(self._default)
        setattr(nn.Module, "to", self._to)  # noqa: B010

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = _RENAMED.get(func, func)
        lifted = {name: _lift(value) for name, value in (kwargs or {}).items()}
        return func(*(_lift(value) for value in args), **lifted)


def _lift(value: Any) -> Any:
    """float32 -> float64, as a dtype or as the name that `Tensor.type` takes."""
    if value is torch.float32 or (type(value) is str and value == "torch.FloatTensor"):  # a tensor's == is slow
        return torch.float64
    return value
