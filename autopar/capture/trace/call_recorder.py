"""A dispatch mode that records operators, with nodes or numbers in place of tensors."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

# Lazy conjugate and negative views, whose bit the values of a graph do not have: operators would see it while tracing,
# but not when the graph runs. They are computed eagerly instead.
MADE = {
    torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
OF_NUMBERS: dict[Any, Callable[[Any], Any]] = {
    torch.ops.aten._conj.default: lambda x: x.conjugate(),
    torch.ops.aten._neg_view.default: operator.neg,
}
DEVICE_OF, META = torch.ops.prim.device.default, torch.device("meta")


class CallRecorder(TorchDispatchMode):
    """Passes every call to `note`. ``complete``: whether all operands were known. Unknown operands set it to False
    instead of raising, since an exception here ends the process in some callers of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.complete = True
        # weak keys: autograd copies a result that has another reference when it makes it a view
        self.known = WeakTensorKeyDictionary()

    @abstractmethod
    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """One call, with tensors in its arguments replaced by their entries in ``known``, and its result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and isinstance(x := args[0], FakeTensor):  # a fast path for three of four calls
            return META if x.fake_mode.in_kernel_invocation else x.fake_device
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        named, by_name = self.named((args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func in MADE and isinstance(number := args[0], (complex, float, int)):
            self.known[out] = OF_NUMBERS[func](number)  # autograd multiplies by it for x * 1j
        else:
            self.note(MADE.get(func, func), named, by_name, out)
        return out

    def named(self, values: Any) -> Any:
        """Values with tensors replaced by their entries in ``known``."""
        return map_aggregate(values, self._name)

    def _name(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x not in self.known and not isinstance(x, FakeTensor) and not x.dim():
            return x.item()  # a number that the dispatcher wrapped
        self.complete &= x in self.known
        return self.known.get(x)
