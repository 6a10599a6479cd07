"""The operators that run while somebody watches, written down by what is known of the tensors that they take."""

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

# Lazy views, with a bit that says so, which a graph's values do not have: each operator would ask for it when it is
# traced, and find another answer when it runs. Their values are made instead.
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
    """Shows every call to `note`. ``complete``: whether each tensor that was asked for is known; nobody may raise in
    here, some of torch's callers end the process then."""

    def __init__(self) -> None:
        super().__init__()
        self.complete = True
        # weakly: a result that somebody else holds, too, is copied when autograd makes it a view
        self.known = WeakTensorKeyDictionary()

    @abstractmethod
    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """One call, with what is known in place of tensors, and its result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and isinstance(x := args[0], FakeTensor):  # three of four calls, each a trip in and out
            return META if x.fake_mode.in_kernel_invocation else x.fake_device
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        named, by_name = self.named((args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func in MADE and isinstance(number := args[0], (complex, float, int)):
            self.known[out] = OF_NUMBERS[func](number)  # what autograd multiplies with for x * 1j
        else:
            self.note(MADE.get(func, func), named, by_name, out)
        return out

    def named(self, values: Any) -> Any:
        """What is known of tensors in their place."""
        return map_aggregate(values, self._name)

    def _name(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x not in self.known and not isinstance(x, FakeTensor) and not x.dim():
            return x.item()  # a number that the dispatcher wrapped
        self.complete &= x in self.known
        return self.known.get(x)
