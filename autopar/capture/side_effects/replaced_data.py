"""``x.data = value`` for a parameter or buffer of the traced copy, which leaves no operator in the graph.

    k.data = k.data * m + q.data * (1 - m)    -->   k.detach().copy_(...)      a write, as that of any buffer
    k.data *= m                               -->   k.detach().mul_(m)         the data that is set is its own
    old = k.data; k.data = new; k - old             refused: in torch ``old`` keeps its values, here it is ``k``

In torch the tensor gets the memory of ``value``, so that views from before keep the old values, and writes to ``value``
show in the tensor. Where a forward would see the difference, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from autopar.adapters.copying.fake import memory_of
from autopar.capture.branches.known_values import writes

_NOT_STATE = "the forward replaces the data of a tensor; return the value, or copy_ it into a buffer"


class ReplacedData:
    """The replacements of one forward of ``replica``. ``refuse`` raises."""

    def __init__(self, replica: nn.Module, refuse: Callable[[str], Any]) -> None:
        self._replica, self._refuse = replica, refuse
        self._names: dict[int, str] = {}  # memory that was replaced -> the tensor's name
        self._since: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensors in such memory that were made afterwards
        self._given: dict[int, str] = {}  # memory of the values -> name of the tensor that has it in torch

    def replace(self, x: Tensor, value: Tensor) -> None:
        """Write ``value`` to a parameter or buffer of the replica; refuses what a write cannot stand for."""
        with torch._C.DisableTorchFunction():
            state = [*self._replica.named_parameters(), *self._replica.named_buffers()]
            name = next((name for name, held in state if held is x), None)
            if name is None:
                self._refuse(_NOT_STATE)
                return
            if (value.shape, value.dtype) != (x.shape, x.dtype):
                self._refuse(
                    f"the forward replaces the data of {name}, {list(x.shape)} of {x.dtype}, by {list(value.shape)} of "
                    f"{value.dtype}; steps have one shape and dtype of it: use another tensor, or change it between "
                    "steps"
                )
            if memory_of(value) == memory_of(x) and value.storage_offset() == x.storage_offset():
                return  # k.data *= m sets what it has written to
            other = next((name for name, held in state if memory_of(held) == memory_of(value)), None)
            if other is not None:
                self._refuse(
                    f"the forward sets the data of {name} to memory of {other}, with which it would change from then "
                    "on; set a copy: .clone()"
                )
            x.detach().copy_(value.detach())
            self._names[memory_of(x)] = self._given[memory_of(value)] = name
            for old in [old for old in self._since if memory_of(old) == memory_of(x)]:
                del self._since[old]
            self._since[x] = None

    def check(self, function: Any, arguments: Any) -> None:
        """Refuses a call that reads what a tensor was before, or writes to its value."""
        if not self._names or getattr(function, "__name__", "") == "__get__":
            return
        for x in pytree.tree_leaves(arguments):
            if (name := self._before(x)) is not None:
                self._refuse(
                    f"the forward reads a view of {name} from before it set {name}.data, which keeps its old values in "
                    "torch; clone what is needed later: .clone()"
                )
        x = arguments[0][0] if arguments[0] else None
        if writes(function) and isinstance(x, Tensor) and (name := self._given.get(_memory(x))) is not None:
            self._refuse(
                f"the forward writes to a tensor that it has set as {name}.data, so that {name} changes with it; set a "
                "copy: .clone()"
            )

    def note(self, arguments: Any, made: Any) -> None:
        """Note the results of a call."""
        if self._names and all(self._before(x) is None for x in pytree.tree_leaves(arguments)):
            for x in pytree.tree_leaves(made):
                if isinstance(x, Tensor) and _memory(x) in self._names:
                    self._since[x] = None

    def _before(self, x: Any) -> str | None:
        """The name of the tensor of which ``x`` is a view from before."""
        if not isinstance(x, Tensor) or x in self._since:
            return None
        return self._names.get(_memory(x))


def _memory(x: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return memory_of(x) if x.layout == torch.strided else 0
