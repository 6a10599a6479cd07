"""Guards on the modules: has anything changed that a compiled step depends on?

A step is compiled for the modules as they are: their modes, attributes, hooks, the code of their classes and which
parameters require a gradient; and for what their forwards read elsewhere, such as a global variable of their file.
`ModuleGuards` records all of it and compares at each step, mostly by identity and in C: about 0.5 us per module.
The identity of parameters does not count: a step accepts any with the same layout (`sharded_modules.ShardedModules`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import chain, starmap
from typing import Any

from torch import nn

from autopar.adapters.autograd import version_of
from autopar.adapters.copying.fake import geometry_of
from autopar.adapters.dtensor import as_plain, storage_of
from autopar.adapters.hooks import hooks_of_all, hooks_so_far
from autopar.capture.branches.buffer_values import has_bytes
from autopar.capture.reads.forward_reads import HOOKS, NOT_PERSISTENT, ForwardReads
from autopar.runtime.guards.tag_guards import TagGuards

_FACTS: tuple[Callable[[Any], Any], ...] = (operator.attrgetter("requires_grad"), operator.attrgetter("dtype"))


class ModuleGuards:
    """``ModuleGuards(root).holds()``: whether modules, attributes, parameters and what forwards read are unchanged
    since it was created. ``modes``: whether the modules' ``training`` counts."""

    def __init__(self, root: nn.Module, modes: bool = True) -> None:
        self._root, self._modes = root, modes
        modules = list(root.modules())
        self._all, self._classes = modules, list(map(type, modules))  # m.__class__ may be set
        self._children = [m._modules for m in modules]
        self._children_then = list(map(dict, self._children))
        self._persistence = list(map(NOT_PERSISTENT, modules))
        self._persistence_then = list(map(set, self._persistence))
        self._hooks = [h for m in modules for name in HOOKS if isinstance(h := m.__dict__.get(name), dict)]
        self._hooks += hooks_of_all()  # most stay empty
        self._some_hooks = list(filter(None, self._hooks))
        self._hooks_then = list(map(dict, self._some_hooks))
        self._hooks_so_far, self._hook_counts = hooks_so_far(), list(map(len, self._hooks))
        self._owners = [m._parameters for m in modules]
        self._facts = self._facts_now()
        self._buffers = [m._buffers for m in modules]
        self._tags = TagGuards(root)
        self._buffer_facts = self._buffers_now()
        self._reads = ForwardReads(root, modes).guards
        self._values: list[tuple[dict[str, Any], str, str]] = []  # (buffers of a module, name, bytes)
        self._values_at: list[Any] = []

    def note_values(self, values: Iterable[tuple[str, str]]) -> None:
        """Guard the content of buffers: (name, its bytes), as `Signature.values`."""
        places = ((*name.rpartition("."), text) for name, text in values)
        self._values = [(self._root.get_submodule(path)._buffers, name, text) for path, _, name, text in places]
        self._values_at = self._versions_now()

    def _versions_now(self) -> list[Any]:
        held = (buffers[name] for buffers, name, _ in self._values)
        return [(id(x), storage_of(x), version_of(x)) for x in held]

    def _same_values(self) -> bool:
        """Compares the content of buffers that were written to, or replaced."""
        if not self._values or (now := self._versions_now()) == self._values_at:
            return True
        if not all(has_bytes(buffers[name], text) for buffers, name, text in self._values):
            return False
        self._values_at = now
        return True

    @property
    def guards(self) -> int:
        """Number of values compared, beside facts of parameters, buffers and hooks."""
        return self._reads.count

    def holds(self) -> bool:
        try:
            holds = (
                self._children == self._children_then
                and list(map(type, self._all)) == self._classes
                and self._same_hooks()
                and self._persistence == self._persistence_then
                and self._facts_now() == self._facts
                and self._buffers_now() == self._buffer_facts
                and self._same_values()
                and self._tags.holds()
                and self._reads.holds()
            )
        except Exception:  # an attribute is gone, or its == does not return a bool
            return False
        if holds and self._reads.replaced:  # by an equal object, which may change from now on
            self._reads = ForwardReads(self._root, self._modes).guards
        return holds

    def _same_hooks(self) -> bool:
        """Compares existing hooks one by one, and checks that tables that were empty still are."""
        if self._some_hooks != self._hooks_then:
            return False
        if (now := hooks_so_far()) == self._hooks_so_far:
            return True
        if list(map(len, self._hooks)) != self._hook_counts:
            return False
        self._hooks_so_far = now
        return True

    def changed(self) -> str:
        """Names the first value that has changed, for an error or a warning."""
        if not self._same_values():
            return "the value of a buffer that the forward branches on"
        found = next(iter(self._reads.changed()), None)
        return str(found) if found is not None else "a hook, a module, a buffer or requires_grad"

    def _facts_now(self) -> list[Any]:
        parameters = [p for p in chain.from_iterable(map(dict.values, self._owners)) if p is not None]
        with as_plain():
            return [list(map(fact, parameters)) for fact in _FACTS]

    def _buffers_now(self) -> list[Any]:
        found = list(chain.from_iterable(map(dict.items, self._buffers)))
        first: dict[int, int] = {}  # storage -> index of its first buffer: a step has tied buffers once
        ties = [first.setdefault(storage_of(b), i) for i, (_, b) in enumerate(found) if b is not None]
        return [ties, *starmap(lambda name, b: (name, None if b is None else geometry_of(b)), found)]
