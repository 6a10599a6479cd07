"""What a parallel model was made of, and shares with others: looked at before each step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import nn

from autopar.runtime.guards.module_references import Handles
from autopar.runtime.guards.original_model import Original
from autopar.runtime.guards.shared_memory import KeptMemory
from autopar.runtime.guards.shared_parameters import SharedWeights
from autopar.runtime.guards.step_cache import Kind
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.params.sharded_modules import Tree


class MadeFrom:
    """Of ``models`` by paths, the parallel one's ``tree``. ``held``: names of tensors that somebody holds besides;
    ``written``: tells the buffers that the steps so far write to."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        tree: Tree,
        groups: Groups,
        held: Collection[str],
        written: Callable[[], set[str] | None],
    ) -> None:
        self._original = Original(models, tree, groups, written)
        self._handles = Handles(models[""], tree.root)
        self._memory = KeptMemory(models[""], tree, held)
        self._shared = SharedWeights(models, tree)

    def refusal(self, kind: Kind) -> str:
        """What has been done to them so that the parallel model cannot go on; "" if it can. What may be done to them
        takes effect."""
        try:
            self._handles.bring_over()
            self._memory.look()
            self._original.check(kind, kind.train)
            self._shared.check()
        except ValueError as error:
            return str(error)
        return ""
