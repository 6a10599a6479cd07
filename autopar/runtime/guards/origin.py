"""What a parallel model was made of, and shares with others: looked at before each step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import nn

from autopar.runtime.guards.module_references import ModuleReferences
from autopar.runtime.guards.original_model import OriginalModel
from autopar.runtime.guards.shared_memory import SharedMemory
from autopar.runtime.guards.shared_parameters import SharedParameters
from autopar.runtime.guards.step_cache import Kind
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.params.sharded_modules import ShardedModules


class Origin:
    """Of ``models`` by paths, the parallel one's ``tree``. ``held``: names of tensors that somebody holds besides;
    ``written``: tells the buffers that the steps so far write to."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        tree: ShardedModules,
        groups: Groups,
        held: Collection[str],
        written: Callable[[], set[str] | None],
    ) -> None:
        self._original = OriginalModel(models, tree, groups, written)
        self._handles = ModuleReferences(models[""], tree.root)
        self._memory = SharedMemory(models[""], tree, held)
        self._shared = SharedParameters(models, tree)

    def shared_buffers(self) -> Collection[str]:
        """Buffers in memory that somebody holds besides."""
        return self._memory.buffers

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
