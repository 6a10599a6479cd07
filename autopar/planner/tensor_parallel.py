"""Column- and row-parallel weights: which closures to shard, chosen by traffic per sharded product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import arguments, global_shape, is_call, module_path, reach, tensor_operands
from autopar.ir.mesh import Mesh
from autopar.ir.placement import REPLICATE, Shard
from autopar.ops.padded_pieces import shares_text
from autopar.ops.traits import PRODUCTS
from autopar.plan import ParameterPlan, Stream
from autopar.planner.factor_propagation import Analysis, Closure, Rejected, close_with_blocks
from autopar.rules.sequence_parallel import spread_label

# A lookup table (embedding) is worth an exchange of activations if it holds at least this share of all parameters.
LOOKUP_SHARE = 0.01


@dataclass
class TensorParallel:
    """The decisions on one axis: parameter plans, the Partial results that they leave, and what was rejected, why."""

    parameters: dict[str, ParameterPlan] = field(default_factory=dict)
    contractions: list[Node] = field(default_factory=list)
    refused: dict[tuple[str, int], str] = field(default_factory=dict)
    cut: set[Node] = field(default_factory=set)
    weight_pieces: dict[str, Shard] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)


def plan_tensor_parallel(
    analysis: Analysis, names: dict[Node, str], fixed: dict[Node, Shard], by_expert: dict[Node, Shard]
) -> TensorParallel:
    """Choose closures greedily, least traffic per product first; each weight is sharded on one dim only.

    ``fixed``: placements of an earlier plan, which are kept. ``by_expert``: weights of experts that the axis shards by
    expert.
    """
    out = TensorParallel()
    candidates = _candidates(analysis, names, out)
    total = sum(p.meta["val"].numel() for p in analysis.parameters)
    taken = fixed | by_expert
    for closure in _ordered(candidates, analysis.ranks):
        if any(p in taken and taken[p] != s for p, s in closure.parameters.items()):
            continue
        if not closure.products and _size(closure) < LOOKUP_SHARE * total:
            for p, s in closure.parameters.items():
                out.refused[names[p], s.dim] = "a lookup table too small to be worth an exchange of activations"
            continue
        taken |= closure.parameters
        _accept(analysis, closure, names, out)
    if not fixed:
        _note_heads(analysis, out)
    return out


def _ordered(candidates: list[Closure], ranks: int) -> list[Closure]:
    """Cheapest first; those that leave ranks without work, as 2 heads on 4 ranks do, after all others. A gathering
    closure comes before all others if it shards more weights than all closures that it excludes: without gathering,
    only one weight of a recurrence can be sharded, on its other dim."""

    def first(closure: Closure) -> bool:
        others = (c for c in candidates if not c.gathered and _exclude(c, closure))
        return bool(closure.gathered) and _size(closure) > sum(map(_size, others))

    return sorted(
        candidates,
        key=lambda c: (
            not first(c), _leaves_idle(c, ranks), not c.products, c.returns,
            c.traffic / (c.products or _size(c)) / _saved(c, ranks),
        ),
    )  # fmt: skip


def _leaves_idle(closure: Closure, ranks: int) -> bool:
    return any(0 < shard.units < ranks for shard in closure.parameters.values())


def _saved(closure: Closure, ranks: int) -> float:
    """Which part of its products sharding takes off a rank, padding counted."""
    units = next(shard.units for shard in closure.parameters.values()) or ranks
    return 1 - -(-units // ranks) / units


def _exclude(a: Closure, b: Closure) -> bool:
    return any(b.parameters.get(p, s) != s for p, s in a.parameters.items())


def _size(closure: Closure) -> int:
    return sum(p.meta["val"].numel() for p in closure.parameters)


def _candidates(analysis: Analysis, names: dict[Node, str], out: TensorParallel) -> list[Closure]:
    """One closure for every class of dims; (parameter, dim) pairs of an earlier closure are skipped."""
    seen: set[tuple[Node, int]] = set()
    found = []
    for parameter in analysis.gm.graph.nodes:
        if parameter not in analysis.parameters:
            continue
        shape = global_shape(parameter)
        for dim in range(len(shape) if len(shape) > 1 else 0):
            if (parameter, dim) in seen:
                continue
            try:
                closure = close_with_blocks(analysis, parameter, dim)
            except Rejected as rejected:
                out.refused[names[parameter], dim] = str(rejected)
                continue
            seen |= {(p, s.dim) for p, s in closure.parameters.items()}
            found.append(closure)
    return found


def _accept(analysis: Analysis, closure: Closure, names: dict[Node, str], out: TensorParallel) -> None:
    for parameter, shard in closure.parameters.items():
        padded = f"; {shares_text(shard.units, analysis.ranks)}" if shard.units else ""
        reason = _reason(parameter, shard, closure) + padded
        out.parameters[names[parameter]] = ParameterPlan(shard, shard, reason)
    out.contractions += list(closure.contractions)
    out.cut |= set(closure.facts)
    out.weight_pieces |= {node.name: shard for node, shard in closure.slices.items()}
    for boundary in closure.boundaries:
        for weight in _weights_behind(analysis, boundary):
            if weight not in closure.parameters:
                why = "replicated: each rank slices its result (fewer kv heads than ranks); its gradient is summed"
                out.parameters.setdefault(names[weight], ParameterPlan(used=REPLICATE, reason=why))


def _reason(parameter: Node, shard: Shard, closure: Closure) -> str:
    users = [u for u in parameter.users for u in (u, *u.users)]
    contracted = next((u for u in users if u in closure.contractions), None)
    absorbed = next((u for u in users if u in closure.absorbed), None)
    count = len(closure.contractions)
    ends = f"{count} partial result{'s' * (count > 1)}" if count else "the loss"
    if contracted is not None:
        return f"row: contracted at {contracted.name}, its result is partial"
    if absorbed is not None or closure.absorbed:
        return "vocabulary: sharded classes end in the loss"
    if closure.gathered:
        uses = len(closure.gathered)
        fused = f", fused blocks {shard.blocks}" if shard.blocks else ""
        return f"column{fused}: multiplies its own result, which is gathered before products, {uses} times a step"
    heads = next((f for f in closure.facts if is_call(f, torch.ops.autopar.attention.default)), None)
    kept = "column: by heads" if heads is not None or _meets_attention(closure) else f"column: ends in {ends}"
    fused = f", fused blocks {shard.blocks}" if shard.blocks else ""
    return f"{kept}{fused}"


def _meets_attention(closure: Closure) -> bool:
    return any(is_call(u, torch.ops.autopar.attention.default) for f in closure.facts for u in f.users)


def _weights_behind(analysis: Analysis, node: Node) -> list[Node]:
    """Parameters between a value and the products that compute it, the products' weights included."""

    def onward(x: Node) -> list[Node]:
        operands = tensor_operands(x) if x in analysis.from_parameter else []
        return [o for o in operands if not _is_activation(analysis, o)] if x.target in PRODUCTS else operands

    return [x for x in reach([node], onward) if x in analysis.parameters]


def _is_activation(analysis: Analysis, node: Node) -> bool:
    """Whether a value depends on an input, not on parameters alone."""
    return any(x.op == "placeholder" and x not in analysis.parameters for x in reach([node]))


def _note_heads(analysis: Analysis, out: TensorParallel) -> None:
    """An attention whose heads do not divide, and could not be padded, is replicated, with a note. Other reasons (one
    fused projection of many query heads and one key head) are in the plan's notes."""
    axis, ranks = analysis.axis, analysis.ranks
    for node in analysis.gm.graph.nodes:
        if not is_call(node, torch.ops.autopar.attention.default):
            continue
        query = arguments(node)["q"]
        heads, kv_heads = global_shape(query)[1], global_shape(arguments(node)["k"])[1]
        divides = heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
        if query in analysis.from_parameter and query not in out.cut and not divides:
            found = f"{heads} heads ({kv_heads} kv heads) in {module_path(node) or 'the model'}"
            out.notes.append((node.name, f"replicated on {axis}: {found} do not divide over {ranks} ranks"))


# --- residual streams: where sequence parallelism starts -----------------------------------------------

SOURCES = (torch.ops.aten.linear.default, torch.ops.aten.embedding.default, torch.ops.autopar.moe_combine.default)


def find_streams(
    gm: GraphModule, contractions: list[Node], mesh: Mesh, axis: str, chunks: Mapping[Node, int]
) -> tuple[Stream, ...]:
    """One stream per residual stream: each partial result (..., sequence, width) that no earlier stream reaches.

    ``chunks``: value -> the number of chunks into which another axis splits its sequence; each chunk is sharded. What
    does not divide is padded.
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    labels: dict[Node, Shard] = {}
    streams: list[Stream] = []
    for node in sorted(contractions, key=order.__getitem__):
        if not is_call(node, *SOURCES) or len(global_shape(node)) < 3 or node in labels:
            continue
        dim = len(global_shape(node)) - 2
        size, count = global_shape(node)[dim], chunks.get(node, 1)
        uneven = size // count % mesh.size(axis) != 0
        shard = Shard(dim, (size // count,) * count, units=size // count if uneven else 0)
        reason = f"residual stream of {module_path(node) or node.name}"
        reason += f"; {shares_text(shard.units, mesh.size(axis))}" if uneven else ""
        streams.append(Stream(node.name, dim, reason, axis, shard.blocks, shard.units))
        labels |= spread_label(node, shard, mesh, axis)
    return tuple(streams)
