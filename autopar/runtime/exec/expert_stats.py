"""The number of tokens that chose each expert: counted while training steps dispatch them, summed over ranks on demand.

Counting needs no communication and no synchronization with an accelerator: it adds up the ends of experts' rows, which
the dispatch computes anyway. Tokens of a recomputed forward count once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from autopar.ir.graph import calls_of, is_call, module_path
from autopar.ir.placement import Shard
from autopar.ops.grouped_experts import DISPATCHED
from autopar.ops.token_dispatch import dispatch_tokens
from autopar.rules import result_placements
from autopar.runtime.comm.collectives import all_reduce, finish
from autopar.runtime.mesh.process_groups import Groups

# Ranks along other axes dispatch the same tokens, unless experts are sharded on these axes.
_CUTS_TOKENS = ("dp", "dp_replicate", "cp", "ep")


class ExpertLoad:
    """The counts of one model's steps on this rank."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._axis = ""  # on which experts are sharded
        self._ends: dict[str, Tensor] = {}  # layer -> sum of the row ends of this rank's experts
        self._padded: Mapping[str, int] = {}

    def add(self, layers: Sequence[str], found: Sequence[Tensor], axis: str, padded: Mapping[str, int]) -> None:
        """Add the dispatch of one forward of these layers. ``axis``: on which experts are sharded, if any. ``padded``:
        `padded_experts`."""
        self._axis, self._padded = axis, padded
        for layer, ends in zip(layers, found, strict=True):
            if layer not in self._ends:
                self._ends[layer] = torch.zeros_like(ends, dtype=torch.int64)
            self._ends[layer] += ends

    def summed(self) -> dict[str, Tensor]:
        """Counts of all ranks: [E] int64 on the CPU per layer, in the order of the model. Collective."""
        here = [self._whole(name, ends.diff(prepend=ends.new_zeros(1))) for name, ends in self._ends.items()]
        summed = self._over_ranks(torch.cat(here)).split([len(x) for x in here]) if here else ()
        own = dict(zip(self._ends, summed, strict=True))
        if self._groups.mesh.size("pp") == 1:
            return own
        stages: list[Any] = [None] * self._groups.mesh.size("pp")
        dist.all_gather_object(stages, own, self._groups.group("pp"))
        whole: dict[str, Tensor] = {}
        for layer, count in (found for part in stages for found in part.items()):
            whole[layer] = whole[layer] + count if layer in whole else count  # some schedules hold a stage twice
        return whole

    def _over_ranks(self, counts: Tensor) -> Tensor:
        for axis in dict.fromkeys((*_CUTS_TOKENS, self._axis or "ep")):
            if self._groups.mesh.size(axis) > 1:
                counts = finish(all_reduce(self._groups, "expert_load", axis, "sum")(counts))
        return counts.cpu()

    def _whole(self, layer: str, own: Tensor) -> Tensor:
        """Counts of this rank's experts, with zeros for those of other ranks."""
        ranks = self._groups.mesh.size(self._axis)
        whole = own.new_zeros(ranks, own.shape[0])
        whole[self._groups.index(self._axis) if ranks > 1 else 0] = own
        return whole.flatten()[: self._padded.get(layer.partition(" (")[0])]

    def clear(self) -> None:
        self._ends.clear()


def layers_of_experts(graph: GraphModule) -> list[str]:
    """The modules that dispatch, in forward order; a second dispatch in one module is "name (2)"."""
    met: Counter[str] = Counter()
    found = []
    for node in graph.graph.nodes:
        if is_call(node, *DISPATCHED):
            path = module_path(node) or node.name
            met[path] += 1
            found.append(path if met[path] == 1 else f"{path} ({met[path]})")
    return found


def padded_experts(local: GraphModule, axis: str) -> dict[str, int]:
    """Module -> the number of its experts, where shards of them are padded."""
    found = {}
    for node in calls_of(local.graph, dispatch_tokens):
        offsets = result_placements(node, axis)[2]
        if isinstance(offsets, Shard) and offsets.units:
            found[module_path(node) or node.name] = offsets.units
    return found
