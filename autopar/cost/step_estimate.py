"""How long a step takes on any mesh, how much of it is computation, and the MFU.

The Order of the step is simulated (`autopar.schedule.simulate`) with times of graphs whose transfers overlap with
computation (`autopar.cost.graph_times`), at what a software stack reaches of the chip and of the links of each axis.
The optimizer steps
after all of it, on the rank that has most parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field

import torch
from torch.fx import GraphModule, Node

from autopar.cost.attention_costs import is_context_attention, sent_by
from autopar.cost.axis_shares import forward_flops
from autopar.cost.flops import flops
from autopar.cost.graph_times import HOST, GraphTimes
from autopar.cost.hardware import Device, Links, device_of
from autopar.cost.stage_costs import TimesOfGraphs, step_timeline, times_of_graphs
from autopar.cost.traffic import transfer
from autopar.ir.graph import arguments, module_path, nbytes, outputs, placeholders
from autopar.ir.mesh import Mesh
from autopar.ir.storages import size_of, storages
from autopar.ops.traits import COPIES, SUMS
from autopar.steps.graphs import Compiled, Stage, is_a, of
from autopar.steps.of_rank import graphs_of_rank

TRAINED = 3  # FLOPs of forward and backward, of those of the forward: two products for one (Kaplan et al. 2020, 2.1)


@dataclass(frozen=True)
class StepEstimate:
    """seconds: of a step. For the rank that computes longest: computing: seconds of computation; moving: of all
    transfers within its graphs, one after another; exposed: of these, seconds that the computation waits. flops: of the
    model, on the global batch, without recomputation. utilization: MFU, flops / (seconds · ranks · peak of the chip)
    (Chowdhery et al. 2022, appendix B). optimizer: seconds of its step."""

    device: str
    links: str
    seconds: float
    computing: float
    moving: float
    exposed: float
    flops: float
    utilization: float
    optimizer: float = 0.0


def step_estimate(compiled: Compiled, times: TimesOfGraphs | None = None) -> StepEstimate:
    """The estimate for a compiled step."""
    plan = compiled.plan
    device, times = device_of(plan.options), times or times_of_graphs(plan)
    optimizer = _optimizer(compiled, device)
    seconds = step_timeline(compiled, times=times).cost + optimizer
    sums = [_sums(compiled, times, rank) for rank in range(plan.mesh.size("pp"))]
    computing, moving, exposed = max(sums)
    work, dtype = model_flops(compiled)
    peak = device.peak(dtype) * plan.mesh.world_size
    return StepEstimate(
        device.name, str(Links.of(plan.options, plan.mesh)), seconds, computing, moving, exposed, work,
        work / (seconds * peak) if seconds else 0.0, optimizer,
    )  # fmt: skip


def _optimizer(compiled: Compiled, device: Device) -> float:
    """Seconds of the optimizer on the rank with most elements that are trained; 0 where nothing is."""
    plan, elements = compiled.plan, [0.0] * compiled.plan.mesh.size("pp")
    for spec in compiled.parameters if compiled.train else ():
        for rank in spec.ranks if spec.requires_grad else ():
            elements[rank] += spec.nbytes(plan.mesh) / spec.dtype.itemsize
    return device.optimizer_seconds(max(elements), plan.options.optimizer_cpu_offload)


def model_flops(compiled: Compiled) -> tuple[float, torch.dtype]:
    """(FLOPs of the model in a step, on the global batch and without recomputation; the dtype of most of them)."""
    return (TRAINED if compiled.train else 1) * forward_flops(compiled.local, compiled.plan), _dtype(compiled)


def _sums(compiled: Compiled, times: TimesOfGraphs, rank: int) -> tuple[float, float, float]:
    """(computing, moving, exposed) of all runs of a rank's graphs."""
    totals = [0.0, 0.0, 0.0]
    for gm, runs in graphs_of_rank(compiled.pipeline, compiled.prologue, rank).values():
        found = times(gm)
        for i, values in enumerate((found.computing, found.moving, found.exposed)):
            totals[i] += runs * sum(values.values())
    return totals[0], totals[1], totals[2]


def _dtype(compiled: Compiled) -> torch.dtype:
    """The dtype with most FLOPs."""
    by_dtype: dict[torch.dtype, int] = {}
    for node in compiled.local.graph.nodes:
        if (dtype := _result_dtype(node)) is not None:
            by_dtype[dtype] = by_dtype.get(dtype, 0) + flops(node)
    return max(by_dtype, key=by_dtype.__getitem__, default=torch.float32)


def _result_dtype(node: Node) -> torch.dtype | None:
    val = node.meta.get("val")
    first = val[0] if isinstance(val, (tuple, list)) and val else val
    return first.dtype if isinstance(first, torch.Tensor) else None


# --- by module -----------------------------------------------------------------------------------------

FORWARD, BACKWARD = "forward", "backward"
Way = tuple[str, str, str]  # axis, kind, FORWARD or BACKWARD


@dataclass(frozen=True)
class Exchanged:
    """Exchanges of one kind over one axis, in a step. seconds: of the transfers. exposed: seconds that the computation
    waits for them."""

    calls: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: Exchanged) -> Exchanged:
        values = zip(astuple(self), astuple(other), strict=True)
        return Exchanged(*(one + more for one, more in values))


@dataclass
class ModuleCost:
    """Cost of one module without its submodules, on one rank that has it, in a step. forward, backward: seconds of
    computation. kept: bytes that F of one microbatch keeps for the backward."""

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
        _add_graph(found, runs, way, times(gm), _Owners(holders, compiled.plan.mesh))
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
    """Every graph that any rank of pp runs, once."""
    found: dict[str, tuple[GraphModule, int]] = {}
    for rank in range(compiled.plan.mesh.size("pp")):
        found = graphs_of_rank(compiled.pipeline, compiled.prologue, rank) | found
    return found


def _add_graph(found: dict[str, ModuleCost], runs: int, way: str, times: GraphTimes, owners: _Owners) -> None:
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
    """The modules to which transfers belong. holders: placeholder of a parameter -> path of its module."""

    holders: Mapping[str, str]
    mesh: Mesh

    def of(self, node: Node) -> list[tuple[str, float]]:
        """(path, share) of each module: one, or for a bucket those of its members."""
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
        """A reduction belongs to the module whose result is partial, other transfers to the module that uses the value,
        and those of a parameter to the module that holds it."""
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
