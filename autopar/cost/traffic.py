"""Bytes on the wire: per conversion and per collective, per graph and per step. Formulas: `autopar.ir.traffic`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from autopar.cost.attention_costs import is_context_attention, sent_by
from autopar.cost.hardware import Links
from autopar.ir.conversions import conversion_of, exchange, is_conversion
from autopar.ir.graph import arguments, global_shape, is_call, nbytes, placement
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard, conversion
from autopar.ir.traffic import KINDS, Traffic, add_ledgers, collective_bytes
from autopar.ops import collectives as collectives  # registers the raw collectives
from autopar.steps.graphs import Compiled, Pipeline
from autopar.steps.of_rank import broadcasts, graphs_of_rank, sends, shared_gradients, slice_shares

_RAW = {getattr(torch.ops.autopar, kind).default: kind for kind in KINDS}


@dataclass(frozen=True)
class Transfer:
    """The transfer of one node: mesh axis, kind, and bytes that each rank sends."""

    axis: str
    kind: str
    bytes: int


def transfer_seconds(node: Node, links: Links) -> float | None:
    """Seconds of a node's transfer; None without one. For attention over ranks: of the longest exchanges, which overlap
    with its computation."""
    if is_context_attention(node):
        axis = str(arguments(node)["axis"])
        moved = sent_by(node).items()
        return max((links.seconds(axis, kind, size, calls) for kind, (calls, size) in moved), default=None)
    found = transfer(node, links.mesh)
    return None if found is None else links.seconds(found.axis, found.kind, found.bytes)


def transfer(node: Node, mesh: Mesh) -> Transfer | None:
    """The transfer of a conversion or collective, at any level; None for every other node.

    A conversion without communication has its kind ("none", "slice", ...) and 0 bytes.
    """
    if is_conversion(node):
        axis, src, dst = conversion_of(node)
        kind = conversion(src, dst)
        return Transfer(axis, kind, collective_bytes(kind, _whole_of_conversion(node, axis, mesh), mesh.size(axis)))
    kind = _RAW.get(node.target, "") if node.op == "call_function" else ""
    if not kind:
        return None
    args = arguments(node)
    axis = str(args["axis"])
    n = mesh.size(axis)
    if kind == "all_reduce":
        whole = nbytes(args["x"])
    elif kind == "all_gather":
        whole = nbytes(args["x"]) * n
    else:  # its result is a piece, padding included; rows: as many are received as sent, if routing is even
        whole = nbytes(node) * n
    if kind == "all_to_all_rows":  # padding on either side is not sent
        whole = min(nbytes(node), nbytes(args["x"])) * n
    if kind == "all_to_all":  # sent in pieces of the result, of what are pieces of the operand
        whole = max(whole, nbytes(args["x"]) * n)
    return Transfer(axis, kind, collective_bytes(kind, whole, n))


def _whole_of_conversion(node: Node, axis: str, mesh: Mesh) -> int:
    """Bytes of the value, replicated on ``axis`` and sharded on the other axes."""
    if is_call(node, exchange):
        _, src, dst = conversion_of(node)
        made = nbytes(node) * (mesh.size(axis) if isinstance(dst, Shard) else 1)
        return max(made, nbytes(node.args[0]) * mesh.size(axis)) if isinstance(src, Shard) else made  # type: ignore[arg-type]
    others = [a for a in mesh.cut_order if a != axis and isinstance(placement(node, a), Shard)]
    whole = math.prod(global_shape(node)) * node.meta["val"].dtype.itemsize
    return whole // math.prod(mesh.size(a) for a in others)


def communication(gm: GraphModule, mesh: Mesh) -> dict[tuple[str, str], Traffic]:
    """(axis, kind) -> volume of a graph's collectives and of its attention over sharded sequences ("send up", "send
    down", "send home": of the rank that sends most), in the order in which they first appear."""
    out: dict[tuple[str, str], Traffic] = {}
    for node in gm.graph.nodes:
        found = transfer(node, mesh)
        if found and found.kind in KINDS and mesh.size(found.axis) > 1:
            key = (found.axis, found.kind)
            out[key] = out.get(key, Traffic()) + Traffic(1, found.bytes)
        if is_context_attention(node):
            for kind, (calls, size) in sent_by(node).items():
                key = (str(arguments(node)["axis"]), kind)
                out[key] = out.get(key, Traffic()) + Traffic(calls, size)
    return out


# --- communication of a step ---------------------------------------------------------------------------

ONCE = ("prologue", "once", "each", "pre_pass", "gather", "reduce")  # graphs that do not run for every token slice


def graph_runs(compiled: Compiled, rank: int = 0) -> dict[str, tuple[GraphModule, int]]:
    """Name -> (step graph, how often a step runs it), for the ranks at coordinate ``rank`` of pp. Names are such as
    forward, or with stages part1.backward_input, which runs for every microbatch and token slice."""
    return graphs_of_rank(compiled.pipeline, compiled.prologue, rank)


def step_communication(compiled: Compiled, rank: int | None = None) -> dict[tuple[str, str], Traffic]:
    """(axis, kind) -> volume of one whole step: forward and backward of all microbatches, and the prologue; of the
    ranks at coordinate ``rank`` of pp, by default of those that send most.

    With pipeline stages ("pp", "send")
    are values that go to other stages and gradients that come back, ("pp", "all_reduce") the losses and the gradients
    of parameters that several stages hold, ("pp", "broadcast") new buffers.
    """
    mesh, pipeline = compiled.plan.mesh, compiled.pipeline
    if rank is None:
        every = [step_communication(compiled, i) for i in range(mesh.size("pp"))]
        return max(every, key=lambda volumes: sum(v.bytes for v in volumes.values()))
    shares = slice_shares(pipeline)
    share = sum(shares) / len(shares)  # of graphs that run for every token slice
    volumes = []
    for name, (gm, n) in graph_runs(compiled, rank).items():
        once = name.rpartition(".")[2].rstrip("0123456789") in ONCE
        volumes.append({k: v.times(n, 1.0 if once else share) for k, v in communication(gm, mesh).items()})
    if mesh.size("pp") > 1:
        volumes.append(_between_stages(compiled, pipeline, rank))
    return add_ledgers(*volumes)


def _between_stages(compiled: Compiled, pipeline: Pipeline, rank: int) -> dict[tuple[str, str], Traffic]:
    """The volume over pp."""
    mesh, bucket = compiled.plan.mesh, compiled.plan.options.bucket_bytes
    nodes = {s.name: s.node for s in compiled.signature.inputs if s.kind == "parameter"}
    sums = shared_gradients(pipeline, compiled.parameters, nodes, mesh, rank, bucket) if compiled.train else []
    if compiled.losses:
        sums.append((8 * len(compiled.losses), mesh.size("pp"), 1))
    moved = {
        "send": list(sends(pipeline, rank)),
        "all_reduce": [collective_bytes("all_reduce", size, n) for size, n, _ in sums],
        "broadcast": broadcasts(pipeline, rank, compiled.train),
    }
    return {("pp", kind): Traffic(len(sizes), sum(sizes)) for kind, sizes in moved.items() if sizes}
