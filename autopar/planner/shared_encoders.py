"""Encoders that all ranks of an axis would run alike share their rows: where a region pays, by estimated time.

A model that reads images beside text has parts of unlike load: cp shards the tokens of the language model, but a tower
of 577 patches, whose sequence does not divide, is run by every rank of cp on the same images; so is, over tp, an
encoder whose weights are whole, and over dp one of an input without a batch dim. `autopar.rules.shared_rows` says what
such a region is. Sharing takes (n - 1)/n of its time and costs the exchange of what leaves it and, over tp, of its
weights' gradients.

    tower: 4 images on each of 2 ranks of cp    -->    2 images each, features gathered: S(0) -> R
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch.fx import GraphModule, Node

from autopar.cost.flops import node_seconds
from autopar.cost.hardware import Links, device_of
from autopar.ir.graph import global_shape, has_gradient, module_path, nbytes
from autopar.ir.meta import input_specs
from autopar.ir.placement import Shard
from autopar.ops.traits import PRODUCTS
from autopar.options import Options
from autopar.plan import Plan, Stream
from autopar.rules.sequence_parallel import stream_labels
from autopar.rules.shared_rows import row_labels, sharded_already

AXES = ("dp_replicate", "dp", "cp", "tp")  # inner blocks first
BACKWARD = 2  # times the forward


def share_encoders(gm: GraphModule, plan: Plan, options: Options) -> Plan:
    """The plan with the streams of rows that ranks share, and a note on each region that every rank runs on all rows
    since that is faster. For a normalised global graph; ``plan`` says what else its axes shard."""
    for axis in AXES if options.share_encoders else ():
        if plan.mesh.size(axis) > 1:
            plan = _over(axis, gm, plan, options)
    return plan


def _over(axis: str, gm: GraphModule, plan: Plan, options: Options) -> Plan:
    barred = sharded_already(gm, plan, axis, stream_labels(gm, plan.streams, plan.mesh, axis))
    taken: set[Node] = set()
    for node, name in _inputs(gm):
        stream = _stream(node, name, axis, plan)
        if stream is None or node in barred:
            continue
        labels = row_labels(gm, stream, plan.mesh, axis, barred)
        region = [n for n in gm.graph.nodes if n in labels and n not in taken and n is not node]
        if not any(n.target in PRODUCTS for n in region):
            continue
        saved, cost = _seconds(region, stream, name, plan, options)
        what = f"{_place(region)}, of input {name}"
        times = f"sharing its rows saves {saved * 1e3:.3g} ms and takes {cost * 1e3:.3g} ms"
        if options.share_encoders is True or saved > cost:
            plan = replace(plan, streams=(*plan.streams, replace(stream, reason=f"rows of {what}: {times}")))
            taken |= set(region)
        else:
            plan = replace(plan, notes=(*plan.notes, (what, f"alike on all ranks of {axis}: {times}")))
    return plan


def _inputs(gm: GraphModule) -> list[tuple[Node, str]]:
    specs = input_specs(gm)
    found = [(n, specs[n.name]) for n in gm.graph.nodes if n.op == "placeholder"]
    return [(n, spec.name) for n, spec in found if spec.kind == "input" and global_shape(n)]


def _stream(node: Node, name: str, axis: str, plan: Plan) -> Stream | None:
    """The rows of an input, in as many blocks as later axes shard them into; None where a block has one row, or does
    not divide into rows."""
    dim = plan.batch_dims.get(name) or 0
    blocks, rows = _pieces(node, name, axis, plan), global_shape(node)[dim]
    each, ranks = rows // blocks, plan.mesh.size(axis)
    if rows % blocks or each < 2:
        return None
    return Stream(node.name, dim, "", axis, (1,) * blocks, each if each % ranks else 0, rows=True)


def _pieces(node: Node, name: str, axis: str, plan: Plan) -> int:
    """Into how many pieces the axes after this one shard the rows of an input."""
    mesh = plan.mesh.with_microbatches(plan.options.all_microbatches)
    later = list(mesh.cut_order)[list(mesh.cut_order).index(axis) + 1 :]
    placed = {a for a, p in plan.inputs.get(name, {}).items() if isinstance(p, Shard)}
    placed |= {s.axis for s in plan.streams if s.rows and s.node == node.name}
    return math.prod(int(mesh.cut_order[a]) for a in later if a in placed)


def _seconds(region: Sequence[Node], stream: Stream, name: str, plan: Plan, options: Options) -> tuple[float, float]:
    """(seconds that a step of a rank saves, seconds of its exchanges), forward and backward of all microbatches."""
    device, links, axis = device_of(options), Links.of(options, plan.mesh), stream.axis
    mesh = plan.mesh.with_microbatches(1)
    ranks = plan.mesh.size(axis)
    placed = {a for a, p in plan.inputs.get(name, {}).items() if isinstance(p, Shard) and a in mesh.cut_order}
    parts = math.prod(mesh.size(a) for a in placed) * options.replicas  # of a rank, all microbatches together
    each = stream.units or ranks
    kept = -(-each // ranks) / each  # of the rows, padding included
    each_way = math.fsum(node_seconds(n, device) for n in region) / parts
    ways = 1 + BACKWARD * any(map(has_gradient, region))
    inside = set(region)
    leaves = [n for n in region if not inside >= n.users.keys()]
    sent = [(ranks - 1) / ranks * nbytes(n) / parts for n in leaves]
    cost = links.seconds(axis, "all_gather", sum(sent), plan.options.microbatches * len(sent))
    back = sum(size for size, n in zip(sent, leaves, strict=True) if has_gradient(n))
    cost += links.seconds(axis, "reduce_scatter", back, plan.options.microbatches)
    if axis == "tp":  # on the other axes gradients are summed in any case
        weights = dict.fromkeys(
            x for n in region for x in n.all_input_nodes if x.op == "placeholder" and has_gradient(x)
        )
        cost += links.seconds(axis, "all_reduce", 2 * (ranks - 1) / ranks * sum(map(nbytes, weights)))
    return (1 - kept) * each_way * ways, cost


def _place(region: Sequence[Node]) -> str:
    """The modules of a region: 'model.vision_tower and 1 more'."""
    found = dict.fromkeys(".".join(module_path(n).split(".")[:2]) for n in region)
    first, *others = [path for path in found if path] or ["the model"]
    return f"{first} and {len(others)} more" if others else first
