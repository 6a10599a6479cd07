"""Numbers that a forward reads from its integer buffers, as tensors of a graph of static shapes.

    ptr = int(self.ptr)                     ptr' = self.ptr as a tensor without dims; so with self.ptr.item()
    self.queue[:, ptr : ptr + 4] = keys     self.queue[:, arange(4) + ptr'] = keys
    self.ptr[0] = (ptr + 4) % 64            as it stands, with ptr'
    0.5**ptr                                in float64, as Python computes

Only the length of a slice must be fixed. ``int`` of a tensor must return a Python number, whatever torch does: modules
of code in which it is called on a buffer get a name ``int`` of their own while they are captured again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.adapters.copying.fake import memory_of
from autopar.capture.branches.known_values import count_answer, is_real

_TENSOR: Any = Tensor
_ARITHMETIC = {
    "add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "rtruediv", "floordiv", "rfloordiv", "floor_divide",
    "mod", "rmod", "remainder", "pow", "rpow", "neg", "abs",
}  # fmt: skip
_SIGNS = {"add": 1, "radd": 1, "sub": -1}
_SLICES = (torch.ops.aten.slice, torch.ops.aten.slice.Tensor)
_KNOWN_LENGTH = (
    "an index with a number that a buffer holds needs one slice of a known length between slices, as "
    "x[:, i : i + 4]; index with a tensor instead: x[:, (torch.arange(4) + self.i) % size]"
)
_INDEXED = (_TENSOR.__getitem__, _TENSOR.__setitem__)


class IntCalls:
    """The namespaces whose calls of ``int`` read a buffer: known after a capture that was refused for one."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.new = False

    def add(self, frame: FrameType | None) -> None:
        if frame is not None and not any(frame.f_globals is known for known in self.found):
            self.found.append(frame.f_globals)
            self.new = True

    @contextlib.contextmanager
    def replaced(self, numbers: StateNumbers) -> Iterator[None]:
        """Context manager: ``int`` in these namespaces takes tensors that stand for numbers."""
        self.new = False
        own = _int_with(numbers)
        before = [(names, names.get("int", own)) for names in self.found]
        for names in self.found:
            names["int"] = own
        try:
            yield
        finally:
            for names, held in before:
                if held is own:
                    del names["int"]
                else:
                    names["int"] = held


class StateNumbers:
    """Of one traced forward of ``replica``. ``refuse`` raises."""

    def __init__(self, replica: nn.Module, refuse: Callable[[str], Any]) -> None:
        self._replica, self._refuse = replica, refuse
        # what stands for a number -> (the number that was read, what was added to it since)
        self._offsets: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def of(self, x: Any) -> Tensor | None:
        """What stands for the number in a buffer with one integer, or in one entry of a buffer; None for others."""
        if not isinstance(x, Tensor) or is_real(x) or x in self._offsets:
            return x if isinstance(x, Tensor) and x in self._offsets else None
        if x.numel() != 1 or x.dtype not in (torch.int64, torch.int32):
            return None
        with torch._C.DisableTorchFunction():
            memory = memory_of(x)
            if all(memory_of(b) != memory for b in self._replica.buffers() if b.layout == torch.strided):
                return None
            made = x.detach().reshape(()).clone()
        count_answer()
        self._offsets[made] = made, 0
        return made

    def called(self, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """(the result of item(), or of arithmetic with such numbers alone, ); () for other calls, whose arguments
        `with_indices` returns."""
        if function is _TENSOR.item and (made := self.of(args[0])) is not None:
            return (made,)
        numbers = [x for x in args[1:] if isinstance(x, Tensor) and x in self._offsets]
        if function in _SLICES and numbers:  # as torch.export writes x[a : b]
            x, dim, start, stop, *step = args
            span = self._span(slice(start, stop, *step))
            if span is not None:
                return (torch.index_select(x, dim, span),)
            self._refuse(_KNOWN_LENGTH)
        tensors = [x for x in args if isinstance(x, Tensor)] if self._offsets else []
        name = getattr(function, "__name__", "").strip("_")
        if not tensors or name not in _ARITHMETIC or any(x not in self._offsets for x in tensors):
            return ()
        with torch._C.DisableTorchFunction():
            made = function(*args)
            if made.is_floating_point():
                made = function(*(x.double() if isinstance(x, Tensor) else x for x in args))
        self._offsets[made] = self._sum(name, args) or (made, 0)
        return (made,)

    def _sum(self, name: str, args: tuple[Any, ...]) -> tuple[Tensor, int] | None:
        """Of a sum of a number and a Python number."""
        if name not in _SIGNS or type(args[1]) is not int:
            return None
        base, offset = self._offsets[args[0]]
        return base, offset + _SIGNS[name] * args[1]

    def with_indices(self, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of x[a : b] with a tensor of indices in place of a slice between two such numbers."""
        if function not in _INDEXED or not self._offsets:
            return args
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not any(x in self._offsets for i in index for x in _tensors_of(i)):
            return args
        spans = [self._span(i) for i in index]
        if sum(span is not None for span in spans) != 1 or any(isinstance(i, (int, Tensor)) for i in index):
            self._refuse(_KNOWN_LENGTH)
        return args[0], tuple(i if span is None else span for i, span in zip(index, spans, strict=True)), *args[2:]

    def _span(self, index: Any) -> Tensor | None:
        """Indices of a slice of known length."""
        if not isinstance(index, slice) or index.step not in (None, 1):
            return None
        if not all(isinstance(end, Tensor) and end in self._offsets for end in (index.start, index.stop)):
            return None
        (start, first), (stop, last) = self._offsets[index.start], self._offsets[index.stop]
        if start is not stop or last < first:
            return None
        with torch._C.DisableTorchFunction():
            span = torch.arange(first, last, device=start.device) + start
            # A slice from -2 to 2 is another one than indices -2, -1, 0, 1: an index that no tensor has is an error
            return torch.where(span < 0, torch.iinfo(torch.int64).max, span)


def _tensors_of(index: Any) -> list[Tensor]:
    ends = (index.start, index.stop, index.step) if isinstance(index, slice) else (index,)
    return [x for x in ends if isinstance(x, Tensor)]


def _int_with(numbers: StateNumbers) -> type:
    class Meta(type):
        def __instancecheck__(cls, x: Any) -> bool:
            return isinstance(x, int)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, int)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            found = numbers.of(args[0]) if len(args) == 1 and not kwargs else None
            return int(*args, **kwargs) if found is None else found

    return Meta("int", (int,), {})
