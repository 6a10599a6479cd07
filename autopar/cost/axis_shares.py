"""How much of a model each axis of a mesh shards, and why not the rest.

    over tp: 83% of the bytes of parameters, 79% of the forward's FLOPs
      12% parameters  layers.{0,1}.attn.qkv.weight     replicated on tp: dim 0: 3 heads do not divide over 2 ranks
      14% FLOPs       aten.linear in layers.*.attn     its weight is replicated

Bytes are those of the global parameters, as they are stored. FLOPs are those of the global forward
(`autopar.cost.flops`) in graphs whose values have placements: a call is sharded on an axis if an operand or a result of
it is. For a global graph only bytes are known. Microbatches are left out, because they are not ranks; tables of the
pipeline show its stages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from torch.fx import GraphModule, Node

from autopar.adapters.operators import OpOverload
from autopar.cost.flops import flops
from autopar.ir.conversions import conversion_of, is_conversion
from autopar.ir.graph import compressed, global_shape, module_path, tensor_operands, without_indices, without_numbers
from autopar.ir.mesh import Mesh
from autopar.ir.meta import input_specs, names_of_parameters
from autopar.ir.placement import Shard
from autopar.plan import AxisShare, Plan, WholePart
from autopar.rules import result_placements

MOST = 8  # rows kept, the largest first, for parameters and for FLOPs
MUCH = 0.2  # of the FLOPs: ranks that repeat as much get a warning
_DIVIDES, _SIZE = re.compile(r"do(es)? not divide"), re.compile(r"a size of (\d+) does not divide")
LEAST = 0.005  # a share that is worth a line
_NOT_SHARDED = " is replicated"
Found = Iterable[tuple[str, float, str]]  # subject, amount, reason


def axis_shares(gm: GraphModule, plan: Plan) -> tuple[AxisShare, ...]:
    """The share of each axis, for a plan of a global graph, or of a graph with placements, which also has FLOPs."""
    calls = _TypedCalls(gm, plan) if any("placements" in n.meta for n in gm.graph.nodes) else None
    return tuple(_share(axis, gm, plan, calls) for axis, size in plan.mesh.axes if size > 1)


def forward_flops(gm: GraphModule, plan: Plan) -> float:
    """FLOPs of the global forward on the global batch, for a graph with placements."""
    return _TypedCalls(gm, plan).total


def _share(axis: str, gm: GraphModule, plan: Plan, calls: _TypedCalls | None) -> AxisShare:
    sizes = {name: math.prod(global_shape(node)) * node.meta["val"].dtype.itemsize for node, name in _parameters(gm)}
    whole = [(name, sizes[name], why) for name, why in _whole_parameters(plan, axis, sizes)]
    total = sum(sizes.values())
    parameters, rows = _cut(whole, total), _largest("parameters", whole, total)
    if calls is None or axis == "pp":
        return AxisShare(axis, parameters, None, rows)
    missed = calls.whole(axis)
    return AxisShare(axis, parameters, _cut(missed, calls.total), (*rows, *_largest("FLOPs", missed, calls.total)))


def _cut(whole: Found, total: float) -> float:
    return 1 - sum(amount for _, amount, _ in whole) / total if total else 0.0


def _largest(kind: str, whole: Found, total: float) -> tuple[WholePart, ...]:
    """One row per reason, the largest first."""
    groups: dict[str, list[tuple[str, float, str]]] = {}
    for entry in whole:
        groups.setdefault(without_numbers(entry[2]), []).append(entry)
    rows = [
        WholePart(kind, _subjects(group), amount / total, group[0][2])
        for group in groups.values()
        if (amount := sum(n for _, n, _ in group)) >= LEAST * total > 0
    ]
    return tuple(sorted(rows, key=lambda row: -row.share)[:MOST])


def _subjects(group: list[tuple[str, float, str]]) -> str:
    """The largest subject with its counterparts in other layers, and the number of the others."""
    alike: dict[str, dict[str, float]] = {}
    for name, amount, _ in group:
        names = alike.setdefault(without_indices(name), {})
        names[name] = names.get(name, 0) + amount
    largest = max(alike.values(), key=lambda names: sum(names.values()))
    others = sum(map(len, alike.values())) - len(largest)
    return compressed(list(largest)) + (f" and {others} more" if others else "")


def repeated(plan: Plan) -> list[str]:
    """A sentence for each axis whose ranks repeat much of the forward because sizes do not divide: what, why, and the
    way out."""
    out = []
    for share in plan.shares:
        parts, axis = _undivided(plan, share), share.axis
        much = sum(part.share for part, _ in parts)
        if much > MUCH:
            what = "; ".join(dict.fromkeys(f"{part.subject}: {why}" for part, why in parts))
            ranks = f"all {plan.mesh.size(axis)} ranks of {axis}"
            out.append(f"plan: {ranks} repeat {much:.0%} of the forward's FLOPs: {what}{_way_out(plan, axis, parts)}")
    return out


def _undivided(plan: Plan, share: AxisShare) -> list[tuple[WholePart, str]]:
    """(part of the FLOPs, why it is replicated), where a size is the reason."""
    notes = dict(plan.notes)
    parts = [(p, notes.get(p.reason.removesuffix(_NOT_SHARDED), p.reason)) for p in share.whole if p.kind == "FLOPs"]
    return [(part, why) for part, why in parts if _DIVIDES.search(why)]


def _way_out(plan: Plan, axis: str, parts: list[tuple[WholePart, str]]) -> str:
    ranks = plan.mesh.size(axis)
    sizes = dict.fromkeys(int(m[1]) for _, why in parts if (m := _SIZE.search(why)))
    fits = " and ".join(f"{size} to {-(-size // ranks) * ranks}" for size in sizes)
    if not fits:
        return f"; choose a size of {axis} that divides"
    return f"; pad {fits} (a vocabulary with model.resize_token_embeddings), or choose a size of {axis} that divides"


# --- parameters ---------------------------------------------------------------------------------------------


def _parameters(gm: GraphModule) -> Iterator[tuple[Node, str]]:
    names = names_of_parameters(gm)
    return ((n, names[n.name]) for n in gm.graph.nodes if n.op == "placeholder" and n.name in names)


def _whole_parameters(plan: Plan, axis: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name, why) of each parameter that an axis does not shard."""
    notes = dict(plan.notes)
    for name in names:
        if axis == "pp":
            holders = plan.pipeline.holders.get(name, ()) if plan.pipeline is not None else ()
            if len(holders) > 1:
                yield name, f"used by stages {', '.join(map(str, holders))}"
            continue
        decision = plan.parameter(name, axis)
        if not isinstance(decision.stored, Shard):
            yield name, decision.reason or notes.get(name, "") or "not connected to a sharded weight"


# --- calls --------------------------------------------------------------------------------------------------


class _TypedCalls:
    """The calls of a typed graph that compute something, each with the FLOPs of all ranks together."""

    def __init__(self, gm: GraphModule, plan: Plan) -> None:
        self.plan, self.notes = plan, dict(plan.notes)
        self.flops: dict[Node, float] = {}
        self.weights: dict[Node, str] = {}  # value that depends on no input -> a weight that it depends on
        self.reached: set[Node] = set()  # values that depend on an input
        mesh = plan.mesh.with_microbatches(plan.options.all_microbatches)
        names, specs = names_of_parameters(gm), input_specs(gm)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                if node.name in names:
                    self.weights[node] = names[node.name]
                elif node.name in specs and specs[node.name].kind == "input":
                    self.reached.add(node)
            elif node.op == "call_function":
                self._add(node, mesh)
        self.total = sum(self.flops.values())

    def _add(self, node: Node, mesh: Mesh) -> None:
        operands = tensor_operands(node)
        if not self.reached.isdisjoint(operands):
            self.reached.add(node)
        elif (weight := next((self.weights[x] for x in operands if x in self.weights), None)) is not None:
            self.weights[node] = weight
        if not is_conversion(node) and (count := flops(node)):
            ranks = math.prod(size for axis, size in mesh.cut_order.items() if _is_cut(node, axis))
            self.flops[node] = float(count * ranks)

    def whole(self, axis: str) -> list[tuple[str, float, str]]:
        """(what, FLOPs, why) of the calls that an axis does not shard."""
        return [(_subject(n), count, self._why(n, axis)) for n, count in self.flops.items() if not _is_cut(n, axis)]

    def _why(self, node: Node, axis: str) -> str:
        """Why an axis does not shard a call, as far as the graph shows."""
        operands = tensor_operands(node)
        for x in operands:
            if is_conversion(x) and conversion_of(x)[0] == axis and isinstance(conversion_of(x)[1], Shard):
                return f"an operand is {conversion_of(x)[1]}, which its rule does not support: it is gathered"
        if node.name in self.notes:
            return self.notes[node.name]
        weights = [self.weights[x] for x in operands if x in self.weights] if axis == "tp" else []
        for weight in weights:
            if not isinstance(self.plan.parameter(weight, axis).stored, Shard):
                return f"{weight}{_NOT_SHARDED}"
        if node not in self.reached:
            return "it depends on no input of the model"
        if axis == "tp" and not self.plan.options.sequence_parallel:
            return "between sharded weights; sequence_parallel=True shards activations there"
        return "no sharded value reaches it"


def _is_cut(node: Node, axis: str) -> bool:
    return any(isinstance(p, Shard) for x in (node, *tensor_operands(node)) for p in result_placements(x, axis))


def _subject(node: Node) -> str:
    """'blocks.0.attn: aten.linear'"""
    name = str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "")
    return f"{module_path(node) or 'the model'}: {name.removesuffix('.default')}"
