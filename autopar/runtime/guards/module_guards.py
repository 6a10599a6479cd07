"""Does what a compiled step was made from still hold?

A step is compiled from the modules as they are: their modes, attributes, hooks, the code of their classes, and which
parameters want a gradient; and from what their forwards read elsewhere, such as a global variable of their file. A
`ModuleGuards` remembers all of it and compares at each step, mostly by identity and within C: about 0.5 us per module.
Which parameters these are is for `tree.ShardedModules` to see: a step takes any of the same layout.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import chain, starmap
from typing import Any

from torch import nn

from autopar.adapters.copying.fake import geometry_of
from autopar.adapters.dtensor import as_plain, storage_of
from autopar.adapters.hooks import hooks_of_all, hooks_so_far
from autopar.capture.reads.forward_reads import HOOKS, NOT_PERSISTENT, ForwardReads
from autopar.runtime.guards.tag_guards import TagGuards

_FACTS: tuple[Callable[[Any], Any], ...] = (operator.attrgetter("requires_grad"), operator.attrgetter("dtype"))


class ModuleGuards:
    """``ModuleGuards(root).holds()``: whether modules, attributes, parameters and what forwards read are as they were
    when it was made; ``modes``: whether the modules' ``training`` counts."""

    def __init__(self, root: nn.Module, modes: bool = True) -> None:
        self._root, self._modes = root, modes
        modules = list(root.modules())
        self._all, self._classes = modules, list(map(type, modules))  # m.__class__ may be set
        self._children = [m._modules for m in modules]
        self._children_then = list(map(dict, self._children))
        self._persistence = list(map(NOT_PERSISTENT, modules))
        self._persistence_then = list(map(set, self._persistence))
        self._hooks = [h for m in modules for name in HOOKS if isinstance(h := m.__dict__.get(name), dict)]
        self._hooks += hooks_of_all()  # most are empty, and stay so
        self._some_hooks = list(filter(None, self._hooks))
        self._hooks_then = list(map(dict, self._some_hooks))
        self._hooks_so_far, self._hook_counts = hooks_so_far(), list(map(len, self._hooks))
        self._owners = [m._parameters for m in modules]
        self._facts = self._facts_now()
        self._buffers = [m._buffers for m in modules]
        self._tags = TagGuards(root)
        self._buffer_facts = self._buffers_now()
        self._reads = ForwardReads(root, modes).guards

    @property
    def guards(self) -> int:
        """How many values are compared, beside facts of parameters, buffers and hooks."""
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
                and self._tags.holds()
                and self._reads.holds()
            )
        except Exception:  # something is gone, or is now something that has no plain ==
            return False
        if holds and self._reads.replaced:  # by what has the same content, and may be changed from now on
            self._reads = ForwardReads(self._root, self._modes).guards
        return holds

    def _same_hooks(self) -> bool:
        """Those that were there are looked at one by one; of others none is there until somebody registers one."""
        if self._some_hooks != self._hooks_then:
            return False
        if (now := hooks_so_far()) == self._hooks_so_far:
            return True
        if list(map(len, self._hooks)) != self._hook_counts:
            return False
        self._hooks_so_far = now
        return True

    def changed(self) -> str:
        """What does not hold, in words: the first value that is another, if it is one."""
        found = next(iter(self._reads.changed()), None)
        return str(found) if found is not None else "a hook, a module, a buffer or what wants a gradient"

    def _facts_now(self) -> list[Any]:
        parameters = [p for p in chain.from_iterable(map(dict.values, self._owners)) if p is not None]
        with as_plain():
            return [list(map(fact, parameters)) for fact in _FACTS]

    def _buffers_now(self) -> list[Any]:
        found = list(chain.from_iterable(map(dict.items, self._buffers)))
        first: dict[int, int] = {}  # where each memory was seen first: a step has tied ones once
        ties = [first.setdefault(storage_of(b), i) for i, (_, b) in enumerate(found) if b is not None]
        return [ties, *starmap(lambda name, b: (name, None if b is None else geometry_of(b)), found)]
