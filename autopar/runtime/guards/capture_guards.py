"""Are the modules, and what their forwards read, still what `parallelize` has captured?

Between `parallelize` and the first step a user may change anything.
"""

from __future__ import annotations

from autopar.runtime.guards.module_guards import ModuleGuards
from autopar.runtime.params.sharded_modules import ShardedModules


class CaptureGuards:
    """``CaptureGuards(tree).holds()``: whether a capture would see the same modules as when this was made, which
    ``watch`` then goes on to tell."""

    def __init__(self, tree: ShardedModules) -> None:
        self.watch = ModuleGuards(tree.root)

    def holds(self) -> bool:
        """Whether nothing is known to differ."""
        return self.watch.holds()
