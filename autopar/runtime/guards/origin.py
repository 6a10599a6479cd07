"""The models that a parallel model was made from, and what it shares with others: checked before each step."""

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
    """``models``: the originals, by path. ``tree``: the parallel model's modules. ``held``: names of tensors that user
    code holds beside the model. ``written``: returns the buffers that steps so far write to."""

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
        """Buffers whose memory user code holds as well."""
        return self._memory.buffers

    def refusal(self, kind: Kind) -> str:
        """Why a change of the originals forbids the next step, "" if nothing does. Allowed changes take effect."""
        try:
            self._handles.bring_over()
            self._memory.look()
            self._original.check(kind, kind.train)
            self._shared.check()
        except ValueError as error:
            return str(error)
        return ""
