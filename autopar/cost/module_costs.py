"""What each module of a model costs in a step: what its calls compute and exchange, what their results hold.

    model.layers.3.mlp.up_proj    computes 1.2 ms; all_reduce over tp, backward, 1 call, 8.0 MiB, 0.1 ms exposed

Calls of step graphs carry the module that they come from, those of the backward that of the forward's call. A bucket
of gradients or of gathers is dealt to the modules in it, by their elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field

from torch.fx import GraphModule, Node

from autopar.cost.attention_traffic import is_context_attention, sent_by
from autopar.cost.graph_times import HOST, GraphTimes
from autopar.cost.step_estimate import TimesOfGraphs
from autopar.cost.traffic import transfer
from autopar.ir.graph import arguments, module_path, nbytes, outputs, placeholders
from autopar.ir.mesh import Mesh
from autopar.ir.storages import size_of, storages
from autopar.ops.traits import COPIES, SUMS
from autopar.steps.graphs import Compiled, Stage
from autopar.steps.of_rank import graphs_of_rank
from autopar.steps.value_names import is_a, of

FORWARD, BACKWARD = "forward", "backward"
Way = tuple[str, str, str]  # axis, kind, FORWARD or BACKWARD


@dataclass(frozen=True)
class Exchanged:
    """Of one kind over one axis, in a step. seconds: of the transfers. exposed: of these, what computing waits for."""

    calls: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: Exchanged) -> Exchanged:
        values = zip(astuple(self), astuple(other), strict=True)
        return Exchanged(*(one + more for one, more in values))


@dataclass
class ModuleCost:
    """Of one module without those within it, on one rank that has it, in a step. forward, backward: seconds of
    computing. kept: bytes that F keeps for the backward, of one microbatch."""

    forward: float = 0.0
    backward: float = 0.0
    kept: int = 0
    exchanged: dict[Way, Exchanged] = field(default_factory=dict)


def module_costs(compiled: Compiled, times: TimesOfGraphs) -> dict[str, ModuleCost]:
    """Path of a module, "" of the model itself -> its cost."""
    found: dict[str, ModuleCost] = {}
    holders = _holders(compiled)
    for name, (gm, runs) in _graphs(compiled).items():
        way = BACKWARD if "backward" in name or name.endswith("reduce") else FORWARD
        _add_graph(found, gm, runs, way, times(gm), _Owners(holders, compiled.plan.mesh))
    for part in compiled.pipeline.parts:
        for path, size in _kept(part):
            found.setdefault(path, ModuleCost()).kept += size
    return found


def _holders(compiled: Compiled) -> dict[str, str]:
    """Placeholder of a parameter, or in R of its gradient -> path of the module that holds it."""
    found = {s.node: s.name.rpartition(".")[0] for s in compiled.signature.inputs if s.kind == "parameter"}
    for step in filter(None, (part.reduce for part in compiled.pipeline.parts)):
        for node, name in zip(placeholders(step.graph), step.outputs, strict=False):  # one for one, the stored names
            if is_a(name, "grad") and of(name) in found:
                found[node.name] = found[of(name)]
    return found


def _graphs(compiled: Compiled) -> dict[str, tuple[GraphModule, int]]:
    """All that any rank of pp runs, each once."""
    found: dict[str, tuple[GraphModule, int]] = {}
    for rank in range(compiled.plan.mesh.size("pp")):
        found = graphs_of_rank(compiled.pipeline, compiled.prologue, rank) | found
    return found


def _add_graph(
    found: dict[str, ModuleCost], gm: GraphModule, runs: int, way: str, times: GraphTimes, owners: _Owners
) -> None:
    for node, seconds in times.computing.items():
        cost = found.setdefault(module_path(node), ModuleCost())
        if way == FORWARD:
            cost.forward += runs * seconds
        else:
            cost.backward += runs * seconds
    for node, seconds in times.moving.items():
        ways = list(_moved(node, owners.mesh))
        for path, share in owners.of(node):
            to, each = found.setdefault(path, ModuleCost()).exchanged, runs * share
            for axis, kind, calls, size in ways:  # of attention that sends several ways each counts alike
                late = times.exposed.get(node, 0.0)
                more = Exchanged(each * calls, each * size, each * seconds / len(ways), each * late / len(ways))
                to[axis, kind, way] = to.get((axis, kind, way), Exchanged()) + more


def _moved(node: Node, mesh: Mesh) -> Iterator[tuple[str, str, int, int]]:
    """(axis, kind, calls, bytes)"""
    if is_context_attention(node):
        axis = str(arguments(node)["axis"])
        yield from ((axis, kind, calls, size) for kind, (calls, size) in sent_by(node).items())
    elif node.target in COPIES:
        yield HOST, "copy out" if node.target is COPIES[0] else "copy back", 1, nbytes(node)
    elif (moved := transfer(node, mesh)) is not None and moved.bytes:
        yield moved.axis, moved.kind, 1, moved.bytes


@dataclass(frozen=True)
class _Owners:
    """Whose a transfer is. holders: placeholder of a parameter -> path of the module that holds it."""

    holders: Mapping[str, str]
    mesh: Mesh

    def of(self, node: Node) -> list[tuple[str, float]]:
        """(path, share): one module, or of a bucket those of its parts."""
        if not node.meta.get("bucket"):
            return [(self._one(node), 1.0)]
        packed = node.args[0]
        while isinstance(packed, Node) and packed.meta.get("bucket"):
            packed = packed.args[0]
        assert isinstance(packed, Node)
        sizes: dict[str, float] = {}
        for part in packed.all_input_nodes:
            path = self._path(part) or self._path(part.all_input_nodes[0])
            sizes[path] = sizes.get(path, 0.0) + math.prod(part.meta["val"].shape)
        whole = sum(sizes.values()) or 1.0
        return [(path, size / whole) for path, size in sizes.items()]

    def _one(self, node: Node) -> str:
        """A sum over ranks belongs to the module that leaves it open, what is gathered or moved to the one that uses
        it, a parameter to its own."""
        near = node.all_input_nodes[:1]
        if near and near[0].name in self.holders:
            return self.holders[near[0].name]
        if node.target not in SUMS:
            near = list(node.users)[:1]
        return next(filter(None, map(self._path, (*near, node))), "")

    def _path(self, node: Node) -> str:
        return module_path(node) or self.holders.get(node.name, "")


def _kept(part: Stage) -> Iterator[tuple[str, int]]:
    """(path, bytes) of each storage that F keeps on the device."""
    gm, names = part.forward.graph, part.forward.outputs
    behind, values = storages(gm), outputs(gm)
    kept = [v for v, name in zip(values, names, strict=True) if is_a(name, "saved") and isinstance(v, Node)]
    for storage in dict.fromkeys(s for v in kept for s in behind[v]):
        yield module_path(storage[0]), size_of(storage)
