"""Are the modules still what `parallelize` has captured?

Between `parallelize` and the first step a user may change anything. What a `ModuleWatch` sees is compared as before
every step; and, since that step would have been the first to read them, the names of their files that the modules'
code reads: `SCALE` and `helper` of ``def forward(self, x): return helper(x) * SCALE``, and what `helper` reads. Of
libraries' modules what their forward reads, but not what its functions read: thousands of names that nobody changes.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from autopar.adapters.hooks import forward_hooks
from autopar.adapters.names_read import MISSING, names_read
from autopar.runtime.module_watch import ModuleWatch
from autopar.runtime.tree import Tree


class PlannedState:
    """``PlannedState(tree).holds()``: whether a capture would see the same modules as when this was made."""

    def __init__(self, tree: Tree) -> None:
        self._tree, self._watch, self._flags = tree, ModuleWatch(tree.root), tree.flags_elsewhere()
        modules = list(tree.root.modules())
        called = [f for m in modules for f in (m.forward, *forward_hooks(m))]
        methods = [code for cls in {cls for m in modules for cls in type(m).__mro__} for code in vars(cls).values()]
        found = [*names_read(called, follow=False), *names_read([*called, *methods])]
        self._reads = [(scope, name, _copied(value)) for scope, name, value in found]

    def holds(self) -> bool:
        """Whether nothing is known to differ. What cannot be compared does."""
        with contextlib.suppress(Exception):
            same = self._tree.flags_elsewhere() == self._flags and self._watch.holds()
            now = ((scope.get(name, MISSING), then) for scope, name, then in self._reads)
            return same and all(x is then or x == then for x, then in now)
        return False


def _copied(value: Any) -> Any:
    """A copy of a plain container. A tensor may be written to: it is like nothing."""
    if isinstance(value, Tensor):
        return object()
    if type(value) is dict:
        return {key: _copied(x) for key, x in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value
