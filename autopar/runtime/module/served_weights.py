"""`ServedWeights`: the parameters and buffers of a `ParallelModule`, as a server uses them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from autopar.adapters.autograd import version_of
from autopar.plan import Plan
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.params.sharded_modules import ShardedModules


@dataclass(frozen=True)
class ServedWeights:
    """``plan``: the one that has placed the parameters. lift_to_float64: as of `autopar.parallelize`."""

    groups: Groups
    tree: ShardedModules
    plan: Plan
    lift_to_float64: bool

    def structure(self) -> nn.Module:
        """A copy of the present modules in eval mode, with unsharded parameters without gradients on the meta
        device."""
        self.tree.refresh()
        return self.tree.structure().eval().requires_grad_(False)

    def values(self) -> dict[str, Tensor]:
        """This rank's parts of parameters, and buffers, by name."""
        pieces = self.tree.pieces()  # first: modules may have changed
        return {**pieces, **{name: b.detach() for name, b in self.tree.buffers().items()}}

    def versions(self) -> list[tuple[int, ...]]:
        """Equal to those of another moment if nothing was written since, as far as tensors record it."""
        values = [(x.data_ptr(), version_of(x)) for x in self.values().values()]
        return [*values, *((version_of(p),) for p in self.tree.own.values())]  # operators on shards change theirs alone

    def parameter_plan(self) -> Plan:
        """The decisions about the parameters, which the graphs of a server keep."""
        return self.plan.of_parameters({spec.name for spec in self.tree.specs})
