"""A compiled model as the tree of its modules: weights, how they are sharded, computation and communication of each.

    layers.{0..31}   LlamaDecoderLayer x32
      self_attn        LlamaAttention
        q_proj           Linear   weight: output features over tp

Equal layers are one entry with the sum of all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule

from autopar.cost.stage_costs import TimesOfGraphs
from autopar.cost.step_estimate import Exchanged, ModuleCost, module_costs
from autopar.ir.expert_layers import axis_of_experts
from autopar.ir.graph import compressed
from autopar.ir.placement import Shard
from autopar.ir.signature import ParameterSpec
from autopar.plan import ParameterPlan, Plan
from autopar.planner.computed_weights import spread
from autopar.steps.graphs import Compiled

LIKE = 0.2  # by how much of what they keep layers that are alike may differ: the first has its input, too


@dataclass(frozen=True)
class WeightRow:
    """A parameter: its global shape, how it is sharded and why, and the bytes of one rank's shard."""

    name: str
    spec: ParameterSpec
    cuts: tuple[str, ...]
    reasons: tuple[str, ...]
    bytes: int

    @property
    def alike(self) -> tuple[object, ...]:
        """What weights of equal layers have in common."""
        return self.name, self.spec.shape, self.spec.dtype, self.spec.requires_grad, self.cuts, self.bytes


@dataclass
class ModuleRow:
    """A module, or modules that are alike. paths: of all of them. kind: name of the class, "" where nothing of the
    module itself is called. own: its cost without that of the modules within it."""

    name: str
    paths: tuple[str, ...]
    kind: str = ""
    weights: list[WeightRow] = field(default_factory=list)
    own: ModuleCost = field(default_factory=ModuleCost)
    children: list[ModuleRow] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of modules in this entry."""
        return len(self.paths)

    def all(self) -> Iterator[ModuleRow]:
        """This module and all within it, depth first."""
        yield self
        for child in self.children:
            yield from child.all()

    @property
    def total(self) -> ModuleCost:
        """Its cost, submodules included."""
        return added([row.own for row in self.all()])

    @property
    def bytes(self) -> int:
        """Bytes of parameters on one rank that has them all, submodules included."""
        return sum(w.bytes for row in self.all() for w in row.weights)

    @property
    def elements(self) -> int:
        """Elements of the global parameters."""
        return sum(math.prod(w.spec.shape) * row.count for row in self.all() for w in row.weights)

    @property
    def alike(self) -> tuple[object, ...]:
        """What modules of one entry have in common. Times may differ by waits, calls by the contents of buckets."""
        moved = tuple(sorted((way, f"{x.bytes:.3g}") for way, x in self.own.exchanged.items()))
        within = tuple((child.name, child.alike) for child in self.children)
        return self.kind, tuple(w.alike for w in self.weights), moved, within


def added(costs: Iterable[ModuleCost]) -> ModuleCost:
    """The sum of several."""
    total = ModuleCost()
    for cost in costs:
        total.forward += cost.forward
        total.backward += cost.backward
        total.kept += cost.kept
        for way, x in cost.exchanged.items():
            total.exchanged[way] = total.exchanged.get(way, Exchanged()) + x
    return total


def by_kind(cost: ModuleCost) -> dict[tuple[str, str], Exchanged]:
    """(axis, kind) -> what is exchanged in both directions."""
    found: dict[tuple[str, str], Exchanged] = {}
    for (axis, kind, _), x in cost.exchanged.items():
        found[axis, kind] = found.get((axis, kind), Exchanged()) + x
    return found


# --- making it ---------------------------------------------------------------------------------------------------


def model_tree(compiled: Compiled, times: TimesOfGraphs) -> ModuleRow:
    """The tree of the whole model, in which equal layers are joined."""
    costs, kinds = module_costs(compiled, times), _kinds(compiled)
    root = ModuleRow("", ("",), kinds.get("", ""))
    rows = {"": root}
    for path in (*(_owner(spec.name) for spec in compiled.parameters), *kinds, *costs):
        _row(rows, path, kinds)
    for spec in compiled.parameters:
        row = rows[_owner(spec.name)]
        row.weights.append(_weight(spec, compiled, row.kind))
    for path, cost in costs.items():
        rows[path].own = cost
    return _folded(root)


def _row(rows: dict[str, ModuleRow], path: str, kinds: dict[str, str]) -> ModuleRow:
    if path not in rows:
        above, _, name = path.rpartition(".")
        rows[path] = ModuleRow(name, (path,), kinds.get(path, ""))
        _row(rows, above, kinds).children.append(rows[path])
    return rows[path]


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _weight(spec: ParameterSpec, compiled: Compiled, kind: str) -> WeightRow:
    plan = compiled.plan
    decisions = plan.parameters.get(spec.name, {})
    reasons = tuple(f"{axis}: {d.reason}" for axis, d in decisions.items() if d.reason and axis != "mb")
    name = spec.name.rpartition(".")[2]
    return WeightRow(name, spec, tuple(cuts_in_words(spec, plan, kind)), reasons, spec.nbytes(plan.mesh))


def _kinds(compiled: Compiled) -> dict[str, str]:
    """Path -> name of the class, of every module that is called, in the order in which they first are."""
    found: dict[str, str] = {}
    for gm in (compiled.local, *(part.forward.graph for part in compiled.pipeline.parts)):
        for path, kind in _calls(gm):
            found.setdefault(path, kind)
    return found


def _calls(gm: GraphModule) -> Iterator[tuple[str, str]]:
    for node in gm.graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            yield str(path), kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__


# --- layers that are alike ---------------------------------------------------------------------------------------


def _folded(row: ModuleRow) -> ModuleRow:
    """Join equal neighbours among its numbered children, and move the name of a plain list into theirs."""
    row.children = [_folded(child) for child in row.children]
    children: list[ModuleRow] = []
    for numbered, group in itertools.groupby(row.children, lambda child: child.name.isdigit()):
        found = list(group)
        runs = _runs(found) if numbered else [[child] for child in found]
        children += [_join(run) if len(run) > 1 else run[0] for run in runs]
    row.children = [inner for child in children for inner in _lifted(child)]
    return row


def _runs(rows: Sequence[ModuleRow]) -> list[list[ModuleRow]]:
    """Runs of equal neighbours that keep about as much for the backward: recomputation may differ between layers."""
    runs: list[list[ModuleRow]] = []
    for row in rows:
        first = runs[-1][0] if runs else None
        kept = (first.total.kept, row.total.kept) if first is not None else (0, 0)
        if first is not None and first.alike == row.alike and max(kept) - min(kept) <= LIKE * max(kept):
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _lifted(child: ModuleRow) -> Sequence[ModuleRow]:
    """A list of layers is no row of its own: 'layers' of '0' to '31' is 'layers.{0..31}'."""
    plain = not child.weights and not child.kind and child.children
    if plain and all(inner.name[:1] in "{0123456789" for inner in child.children):
        for inner in child.children:
            inner.name = f"{child.name}.{inner.name}"
        return child.children
    return [child]


def _join(rows: Sequence[ModuleRow]) -> ModuleRow:
    """Rows that are alike as one: costs are summed, weights are those of the first, with the bytes of all."""
    first = rows[0]
    name = compressed([row.name for row in rows])
    weights = [replace(w, bytes=sum(row.weights[i].bytes for row in rows)) for i, w in enumerate(first.weights)]
    children = [_join_children([row.children[i] for row in rows]) for i in range(len(first.children))]
    paths = tuple(path for row in rows for path in row.paths)
    return ModuleRow(name, paths, first.kind, weights, added([row.own for row in rows]), children)


def _join_children(rows: Sequence[ModuleRow]) -> ModuleRow:
    joined = _join(rows)
    joined.name = rows[0].name
    return joined


# Class of a module -> what the dims of its weight are. A vector has one entry per output.
_FEATURES = ("output features", "input features")
_CHANNELS = ("output channels", "input channels")
DIMS: Mapping[str, tuple[str, ...]] = {
    "Linear": _FEATURES,
    "Conv1D": (_FEATURES[1], _FEATURES[0]),  # a class of transformers, whose weight is transposed
    "Embedding": ("rows of the table (the vocabulary)", "columns of the table"),
    "EmbeddingBag": ("rows of the table (the vocabulary)", "columns of the table"),
    **{f"Conv{n}d": _CHANNELS for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": (_CHANNELS[1], _CHANNELS[0]) for n in (1, 2, 3)},
}


def cuts_in_words(spec: ParameterSpec, plan: Plan, kind: str) -> list[str]:
    """One text per axis that shards a parameter of a module of class ``kind``; none: every rank has all of it."""
    decisions = plan.parameters.get(spec.name, {})
    words = [_words(spec, plan, axis, decision, kind) for axis, decision in decisions.items() if axis != "mb"]
    return [text for text in words if text]


def _words(spec: ParameterSpec, plan: Plan, axis: str, decision: ParameterPlan, kind: str) -> str:
    stored = decision.stored
    if not isinstance(stored, Shard):
        return ""
    if decision.used == stored:
        by_expert = axis in ("ep", axis_of_experts(plan.experts)) and decision.reason != spread(axis)
        return f"{dim_in_words(spec, stored, kind, by_expert)} over {axis}"
    when = "once per step" if plan.options.gathers_once else "for each use"
    return f"in {plan.mesh.size(axis)} shards over {axis}, gathered {when}"


def dim_in_words(spec: ParameterSpec, cut: Shard, kind: str, by_expert: bool) -> str:
    """The meaning of the sharded dim. ``by_expert``: on an axis that experts are sharded on."""
    names = DIMS.get(kind, ())
    if cut.dim < len(names) and len(spec.shape) > 1:
        found = names[cut.dim]
    elif by_expert and cut.dim == 0:
        found = "experts"
    else:
        found = f"dim {cut.dim}" if len(spec.shape) > 1 else "elements"
    return f"{found}, each of {len(cut.blocks)} blocks" if len(cut.blocks) > 1 else found
