"""Buffers that a forward replaces by assignment, which leaves no operator in the graph.

    self.c.mul_(0.5)         writes to a tensor: an operator of the graph
    self.c = self.c * 0.5    assigns another tensor: found by comparing the attribute before and after the forward
    self.a, self.b = self.b, self.a

torch.export copies an assigned value into the old tensor, for buffers of the root, where shapes and dtypes allow it.
Here the traced copy returns such values as extra outputs, and gets its old buffers back afterwards. Fake tensors share
memory as real ones do, so aliasing between buffers and outputs is read from them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.adapters.copying.fake import extent_of, memory_of


class BufferAlias(NamedTuple):
    """A tensor that aliases a buffer: the tensor that the forward assigned to it (``new``), or the one from before.
    ``view``: (sizes, strides, offset from the first element of the buffer), or None for the buffer itself."""

    buffer: str
    new: bool
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None


class Assignment(NamedTuple):
    """A buffer to which the forward assigned another tensor: an alias of a buffer (``alias``), a new value (``value``),
    or None. ``given``: the value aliases an input; ``differentiable``: it requires grad."""

    name: str
    alias: BufferAlias | None = None
    value: bool = False
    given: bool = False
    differentiable: bool = False


class BufferWatch:
    """Watches the forward of ``replica``, a structure copy, while it is exported; to be created after its other hooks.

    assigned: the assignments to buffers; if there are any, the forward returns (its own result, the assigned values).
    outputs: index of an output leaf -> the buffer that it aliases. written_with_graph: buffers to which the forward
    writes values that depend on parameters. refused: the error text of an assignment that cannot be captured.
    """

    def __init__(self, replica: nn.Module) -> None:
        self.assigned: list[Assignment] = []
        self.outputs: dict[int, BufferAlias] = {}
        self.written_with_graph: list[str] = []
        self.refused = ""
        self._replica = replica
        self._shapes: dict[int, torch.Size] = {}
        self._before: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}  # path -> buffers, parameters
        number = id(self)  # hooks must not refer to self: it would count as state of the module
        _WATCHES[number] = self
        replica.register_forward_pre_hook(lambda *_: _WATCHES[number]._start(), prepend=True)
        replica.register_forward_hook(lambda _, *call: _WATCHES[number]._end(*call), with_kwargs=True)

    def _start(self) -> None:
        """Before the forward. Removes the hooks with which torch.export copies assigned values into old tensors."""
        hooks = torch_module._global_buffer_registration_hooks
        for key in [k for k, hook in hooks.items() if hook.__module__.startswith("torch._functorch")]:
            del hooks[key]
        self._before = {p: (dict(m._buffers), dict(m._parameters)) for p, m in self._replica.named_modules()}
        self._shapes = {id(x): x.shape for held, _ in self._before.values() for x in held.values() if x is not None}

    def _end(self, args: Any, kwargs: Any, made: Any) -> Any:
        """After the forward. Returns its result, with the assigned values if there are any."""
        with torch._C.DisableTorchFunction():
            self._refuse_lost()
            known = _Memories(self._replica, (args, kwargs))
            named = list(self._named())
            for name, _, _, before in named:
                if before is not None:
                    known.add(name, False, before)
            resized = [n for n, _, _, x in named if x is not None and self._shapes[id(x)] != x.shape]
            if resized:
                self.refused = f"the forward resizes buffer {resized[0]} in place; assign a new tensor to it"
            self.written_with_graph = [n for n, _, _, x in named if x is not None and x.requires_grad]
            self.assigned, values = [], []
            for name, module, key, before in named:
                now = module._buffers[key]
                if now is before:
                    continue
                self.assigned.append(self._assignment(name, now, known))
                if now is not None and self.assigned[-1].value:
                    known.add(name, True, now)
                    values.append(now)
                module._buffers[key] = before
            leaves = enumerate(pytree.tree_leaves(made))
            found = {i: known.find(x) for i, x in leaves if isinstance(x, Tensor) and not x.requires_grad}
            self.outputs = {i: alias for i, alias in found.items() if alias is not None}
        return (made, values) if self.assigned else None

    def _assignment(self, name: str, now: Tensor | None, known: _Memories) -> Assignment:
        if now is None:
            return Assignment(name)
        if (alias := known.find(now)) is not None:
            return Assignment(name, alias)
        self.refused = self.refused or known.why_not(name, now)
        return Assignment(name, None, True, known.is_given(now), now.requires_grad)

    def _named(self) -> Iterator[tuple[str, nn.Module, str, Tensor | None]]:
        """(name, module, attribute, tensor before the forward) of all buffers that still exist."""
        for path, module in self._replica.named_modules():
            for key, before in self._before[path][0].items() if path in self._before else ():
                if key in module._buffers:
                    yield (f"{path}.{key}" if path else key), module, key, before

    def _refuse_lost(self) -> None:
        for path, module in self._replica.named_modules():
            buffers, parameters = self._before.get(path, ({}, {}))
            dot = f"{path}." if path else ""
            if lost := [key for key in buffers if key not in module._buffers]:
                self.refused = (
                    f"the forward removes buffer {dot}{lost[0]} from its module; assign None or another tensor to it"
                )
            if lost := [key for key, p in parameters.items() if module._parameters.get(key) is not p]:
                self.refused = (
                    f"the forward replaces parameter {dot}{lost[0]}, which compiled steps cannot do; give the new "
                    "tensor another name, or write to the parameter between steps"
                )


_WATCHES: weakref.WeakValueDictionary[int, BufferWatch] = weakref.WeakValueDictionary()


class _Memories:
    """Buffers by their storage, and the storages of parameters and inputs."""

    def __init__(self, replica: nn.Module, given: Any) -> None:
        inputs = [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor) and x.layout == torch.strided]
        self._given = set(map(memory_of, inputs))
        self._parameters = {memory_of(p): name for name, p in replica.named_parameters()}
        self._known: dict[int, tuple[str, bool, Tensor]] = {}
        self._same: dict[int, tuple[str, bool]] = {}

    def add(self, name: str, new: bool, x: Tensor) -> None:
        self._same.setdefault(id(x), (name, new))
        self._known.setdefault(memory_of(x), (name, new, x))

    def is_given(self, x: Tensor) -> bool:
        """Whether a tensor aliases an input."""
        return x.layout == torch.strided and memory_of(x) in self._given

    def find(self, x: Tensor) -> BufferAlias | None:
        """The buffer that a tensor aliases, if it lies within the extent of that buffer."""
        if id(x) in self._same:
            return BufferAlias(*self._same[id(x)], None)
        if x.layout != torch.strided or (found := self._known.get(memory_of(x))) is None:
            return None
        name, new, base = found
        start = int(x.storage_offset()) - int(base.storage_offset())
        if base.dtype != x.dtype or start < 0 or start + extent_of(x) > extent_of(base):
            return None
        return BufferAlias(name, new, (tuple(x.shape), tuple(x.stride()), start))

    def why_not(self, name: str, x: Tensor) -> str:
        """Why a tensor cannot be assigned to a buffer: compiled steps cannot keep this alias."""
        memory = memory_of(x) if x.layout == torch.strided else None
        if memory in self._parameters:
            return (
                f"the forward assigns to buffer {name} a tensor that shares memory with parameter "
                f"{self._parameters[memory]} and would change with it; assign a copy: .detach().clone()"
            )
        if memory in self._known:
            return (
                f"the forward assigns to buffer {name} a tensor that shares memory with buffer "
                f"{self._known[memory][0]} in another dtype, or beyond its end; assign a copy: .clone()"
            )
        return ""
