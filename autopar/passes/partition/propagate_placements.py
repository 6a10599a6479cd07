"""propagate_placements: give every value a placement on every axis, and insert the conversions between them.

Consumes    a normalised global graph and a plan (placements of parameters, inputs, streams).
Guarantees  every value has a placement per axis; every op's operands fit its rule; each conversion stands once per
            value and placement, right before its first use; outputs are Invariant where they are scalars.
Leaves      shapes, which stay global: a conversion is the identity there, so the graph still runs in one process.

    linear = linear(x, w)            -->    w_r = convert(w, "dp", S(0), R)
                                            linear = linear(x, w_r)              # dp: S(0)

Axes are placed one after the other, inner (tp) before outer (dp); each sees shapes as the earlier ones left them. The
innermost, "sl", was placed before (`place_token_slices`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from autopar.ir.conversions import convert, is_cast_input, is_zeros, uncast
from autopar.ir.custom_backward import parts_of_token
from autopar.ir.expert_layers import mark_experts
from autopar.ir.graph import (
    describe,
    has_gradient,
    insert_call,
    nbytes,
    output_node,
    placement,
    replace_operands,
    set_placement,
    tensor_operands,
    values,
)
from autopar.ir.mesh import DATA
from autopar.ir.meta import inherit, input_specs, signature_of
from autopar.ir.placement import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Invariant,
    Partial,
    Placement,
    Replicate,
    Shard,
    conversion,
)
from autopar.ops.gradient import HOLE, OWN_BACKWARD, RESULT
from autopar.passes.partition.propagate_backward import Backwards, best_input, dual_of, source_of
from autopar.plan import Plan
from autopar.rewrite.compilation import Compilation
from autopar.rules import (
    RULES,
    Rule,
    RuleError,
    gives_other_results,
    has_rule,
    matches,
    missing_rule,
    operand_placements,
    rule_of,
    set_results,
    type_of,
)
from autopar.rules.sequence_parallel import stream_labels

# Axes that cut the batch or its tokens: weights are whole for use there, and activations decide. On tp and ep weights
# decide.
BATCH_AXES = (*DATA, "mb", "cp")
_PRICES = {"none": 0, "slice": 1e-3, "divide": 1e-3, "all_reduce": 2}  # of a byte that is converted; of others 1


@dataclass(frozen=True)
class PropagatePlacements:
    """Types every value on every axis and inserts the conversions."""

    name: ClassVar[str] = "propagate_placements"
    requires: ClassVar[tuple[str, ...]] = ("functional",)
    ensures: ClassVar[tuple[str, ...]] = ("placements", "planned_shards")

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        assert ctx.plan is not None
        for axis in (a for a in ctx.mesh.cut_order if a != "sl"):
            _PlacementSweep(gm, ctx, ctx.plan, axis).run()
        gm.recompile()
        return gm


@dataclass
class _Choice:
    """One way to run an op: what its operands must be (None: anything), what the results are, and what it costs."""

    needs: list[Placement | None]
    results: list[Placement]
    rank: int
    cost: float = 0.0


class _PlacementSweep:
    """One axis over the whole graph, in execution order."""

    def __init__(self, gm: GraphModule, ctx: Compilation, plan: Plan, axis: str) -> None:
        self.gm, self.plan, self.axis, self.mesh = gm, plan, axis, ctx.mesh
        self.ranks = ctx.mesh.size(axis)
        self.whole = plan.options.replicate_ops
        self.versions: dict[Node, dict[Placement, Node]] = {}
        self.weights: set[Node] = set()
        self.specs = input_specs(gm)
        self.labels = stream_labels(gm, plan.streams, ctx.mesh, axis)
        self.made: set[Node] = set()  # parameters, and what is made of them
        self.backwards = Backwards(gm.graph, axis, lambda node: rule_of(node, axis, ctx.mesh, whole=self.whole))

    def run(self) -> None:
        if self.axis == "cp":
            _deal(self.gm, self.plan)
        mark_experts(self.gm, self.plan.experts, self.axis)
        for node in list(self.gm.graph.nodes):
            if node.op == "placeholder":
                self._place_input(node)
            elif node.op == "call_function":
                self._visit(node)
        self._finish_outputs()

    # --- inputs and outputs -------------------------------------------------------------------------------

    def _place_input(self, node: Node) -> None:
        spec = self.specs[node.name]
        chosen: Placement = INVARIANT
        if spec.kind == "parameter":
            self.weights.add(node)
            self.made.add(node)
            chosen = self.plan.parameter(spec.name, self.axis).stored
        elif spec.kind == "input":
            chosen = self.plan.inputs.get(spec.name, {}).get(self.axis, INVARIANT)
        elif spec.kind in ("buffer", "constant"):
            self.weights.add(node)
        set_placement(node, self.axis, chosen)

    def _finish_outputs(self) -> None:
        """Scalars and pending sums leave as Invariant; tensors leave as they are cut."""
        out = output_node(self.gm)
        mutations = {i for i, o in enumerate(signature_of(self.gm).outputs) if o.kind == "mutation"}
        for i, value in enumerate(list(out.args[0])):  # type: ignore[arg-type]
            if not isinstance(value, Node):
                continue
            have = placement(value, self.axis)
            scalar = not value.meta["val"].dim()
            if isinstance(have, Replicate) and has_gradient(value) and scalar:
                value, have = self._converted(value, PARTIAL, out), PARTIAL
            if isinstance(have, Partial) or (i in mutations and not matches(have, INVARIANT, has_gradient(value))):
                value = self._converted(value, INVARIANT, out)
            out.update_arg(0, tuple(value if j == i else v for j, v in enumerate(out.args[0])))  # type: ignore[arg-type]

    # --- one op -------------------------------------------------------------------------------------------

    def _visit(self, node: Node) -> None:
        operands = tensor_operands(node)
        if operands and all(x in self.weights for x in operands):
            self.weights.add(node)
        if any(x in self.made for x in operands):
            self.made.add(node)
        if node.target is operator.getitem or (is_cast_input(node) and operands[0] in self.weights):
            set_results(node, self.axis, operand_placements(node, self.axis))  # a weight is cast as it is stored
            return
        if node.target in (HOLE, OWN_BACKWARD, RESULT):
            self._visit_backward(node)
            return
        if self.backwards.needs_whole_gradient(node):
            replace_operands(node, [self._converted(x, INVARIANT, node) for x in operands])
            set_results(node, self.axis, [INVARIANT for _ in values(node)])
            return
        if not has_rule(node) and str(node.target) not in self.whole:
            cut = any(not matches(placement(x, self.axis), INVARIANT, has_gradient(x)) for x in operands)
            if cut or gives_other_results(node):
                raise ValueError(missing_rule(node, self.axis))
            set_results(node, self.axis, [INVARIANT for _ in values(node)])
            return
        rule = rule_of(node, self.axis, self.mesh, whole=self.whole)
        choice = self._choose(node, rule, operands)
        self._refuse_silently_whole(node, operands, choice)
        pairs = [(x, placement(x, self.axis) if n is None else n) for x, n in zip(operands, choice.needs, strict=True)]
        fits = [matches(placement(x, self.axis), n, has_gradient(x)) for x, n in pairs]
        replace_operands(node, [x if fit else self._converted(x, n, node) for fit, (x, n) in zip(fits, pairs)])
        set_results(node, self.axis, choice.results)

    def _refuse_silently_whole(self, node: Node, operands: list[Node], choice: _Choice) -> None:
        """What a derived rule does not cut as the batch is cut runs whole only if the user says so."""
        if node.target in RULES or str(node.target) in self.whole or self.axis not in BATCH_AXES:
            return
        for x, need in zip(operands, choice.needs, strict=True):
            if (
                isinstance(placement(x, self.axis), Shard)
                and isinstance(need, (Invariant, Replicate))
                and x not in self.weights
            ):
                raise ValueError(missing_rule(node, self.axis))

    def _visit_backward(self, node: Node) -> None:
        """A part of a model's own backward: see `place_backwards`."""
        if node.target is HOLE:
            value: Node = node.args[0]  # type: ignore[assignment]
            set_placement(node, self.axis, self.backwards.hole(node, placement(value, self.axis), self._effective))
        elif node.target is OWN_BACKWARD:
            inputs, gradients, holes, name, zeros = parts_of_token(node)
            pairs = [self._with_gradient(x, g, node) for x, g in zip(inputs, gradients, strict=True)]
            node.args = ([x for x, _ in pairs], [g for _, g in pairs], holes, name, zeros)
        set_results(node, self.axis, type_of(node, self.axis, self.mesh))

    def _with_gradient(self, x: Node, gradient: Node, token: Node) -> tuple[Node, Node]:
        """An input of a function and its gradient, with placements that fit."""
        native, have = placement(x, self.axis), placement(gradient, self.axis)
        have = INVARIANT if isinstance(have, Replicate) else have

        def cost(src: Placement, dst: Placement) -> float:
            if self.axis == "mb" and src != dst:
                return float("inf")
            return self._price(gradient, source_of(src, dst), dst)

        chosen = best_input(have, native, self.versions.get(x, {}), cost)
        taken = x if chosen == native else self.versions[x][chosen]
        need = dual_of(chosen)
        source = source_of(have, need)
        return taken, self._converted(gradient, need, token, None if source == have else source)

    def _choose(self, node: Node, rule: Rule, operands: list[Node]) -> _Choice:
        """The best way to run the op: one that can be, by rank, then by the bytes of the conversions it needs."""
        have = [self._effective(x) for x in operands]
        choices = [self._costed(c, operands) for c in self._choices(node, rule, operands, have)]
        return min(choices, key=lambda c: (c.cost == float("inf"), c.rank, c.cost))

    def _choices(self, node: Node, rule: Rule, operands: list[Node], have: list[Placement]) -> Iterator[_Choice]:
        partial = frozenset(i for i, p in enumerate(have) if isinstance(p, Partial) and rule.operands[i] is not None)
        # parts of a loss that all microbatches compute alike, of parameters alone: divided, they are addends, too
        alike = {i for i, x in enumerate(operands) if self.axis == "mb" and have[i] == REPLICATE and has_gradient(x)}
        for kept in rule.linear:
            others = [operands[i] for i in partial - kept]  # a count under a sum: resolved, when not differentiated
            if not partial & kept or not kept <= partial | alike or any(map(has_gradient, others)):
                continue
            if self._passes_on(node, rule, operands, kept):
                needs: list[Placement | None] = [
                    None if d is None else (PARTIAL if i in kept else REPLICATE) for i, d in enumerate(rule.operands)
                ]
                yield _Choice(needs, [PARTIAL for _ in rule.results], rank=0)
        if (imposed := rule.imposed_cut) is not None:
            yield _Choice(rule.required(imposed), rule.produced(imposed), rank=0)
            return
        for i, x in enumerate(operands):
            p = self._resolved(x) if i in partial else have[i]
            dims = rule.operands[i]
            if dims is None or not isinstance(p, Shard):
                continue
            if self.axis in BATCH_AXES and x in self.weights and self._used(x) != p:
                continue
            try:
                cut = rule.completed(rule.cut_of(dims, p, self.ranks))
                yield _Choice(rule.required(cut), rule.produced(cut), rank=0 if x in self.weights else 2)
            except RuleError:
                continue
        if self._is_entry(node, operands):
            yield from self._entry(node, rule)
        yield self._whole(rule, operands, have)

    def _passes_on(self, node: Node, rule: Rule, operands: list[Node], kept: frozenset[int]) -> bool:
        """Whether pending sums stay pending. Over microbatches those that are differentiated can only become a loss,
        and others are summed before they meet anything: what is counted ahead cannot depend on what is."""
        if node in self.backwards.inside:
            return True
        if self.axis == "mb" and any(has_gradient(operands[i]) for i in kept):
            return True
        alone = len(kept) == sum(dims is not None for dims in rule.operands)
        return rule.keep_partial and (alone or self.axis != "mb")

    def _entry(self, node: Node, rule: Rule) -> Iterator[_Choice]:
        """Cut as the stream that starts here. A new dim of a parameter (expand) cannot be cut where it is made: then
        Replicate, which its users slice, so that the parameter's gradient is summed and not that of the stream."""
        try:
            cut = rule.completed(rule.cut_of(rule.results[0], self.labels[node], self.ranks))
        except RuleError:
            return
        needs = rule.required(cut)
        if any(isinstance(need, Shard) for need in needs):
            yield _Choice(needs, rule.produced(cut), rank=1)
        elif has_gradient(node):
            whole: list[Placement | None] = [None if d is None else REPLICATE for d in rule.operands]
            yield _Choice(whole, [REPLICATE for _ in rule.results], rank=1)

    def _whole(self, rule: Rule, operands: list[Node], have: list[Placement]) -> _Choice:
        """All operands whole: Invariant if all can be, else Replicate."""
        asked = any(self._used(x) == REPLICATE and self.axis == "tp" for x in operands)
        as_r = any(isinstance(p, Replicate) and has_gradient(x) for x, p in zip(operands, have, strict=True))
        target: Placement = REPLICATE if as_r or asked else INVARIANT
        needs = [None if d is None else target for d in rule.operands]
        flows = any(has_gradient(x) for x, d in zip(operands, rule.operands, strict=True) if d is not None)
        return _Choice(needs, [target if flows else INVARIANT for _ in rule.results], 1 if asked else 3)

    def _is_entry(self, node: Node, operands: list[Node]) -> bool:
        """Where a stream starts. On tp: a labelled value with a gradient, made of none. On cp: a labelled value made of
        parameters, and of nothing that is cut yet."""
        if node not in self.labels or isinstance(node.meta["val"], (list, tuple)):
            return False
        if self.axis == "cp":
            return node in self.made and not any(isinstance(placement(x, self.axis), Shard) for x in operands)
        if not has_gradient(node):
            return False
        return not any(x in self.labels and has_gradient(x) for x in operands)

    # --- placements and conversions of operands -----------------------------------------------------------

    def _used(self, x: Node) -> Placement | None:
        source = uncast(x)
        spec = self.specs.get(source.name) if source.op == "placeholder" else None
        return self.plan.parameter(spec.name, self.axis).used if spec is not None and spec.kind == "parameter" else None

    def _effective(self, x: Node) -> Placement:
        """What an operand counts as: a parameter as it is used, a pending sum as it was resolved before."""
        used = self._used(x)
        if used is not None and used != placement(x, self.axis):
            return used
        have = placement(x, self.axis)
        if self.axis == "tp" and x.name in self.plan.weight_pieces:
            return self.plan.weight_pieces[x.name]
        if isinstance(have, Partial):
            resolved = [p for p in self.versions.get(x, {}) if not isinstance(p, Partial)]
            return resolved[0] if resolved else have
        return have

    def _resolved(self, x: Node) -> Placement:
        """What a pending sum becomes when its user does not say: its stream's cut, or Invariant."""
        return self.labels.get(x, INVARIANT)

    def _costed(self, choice: _Choice, operands: list[Node]) -> _Choice:
        for x, need in zip(operands, choice.needs, strict=True):
            if need is None or matches(placement(x, self.axis), need, has_gradient(x)):
                continue
            if need not in self.versions.get(x, {}):
                choice.cost += min(self._price(x, p, need) for p in self._sources(x))
        return choice

    def _sources(self, x: Node) -> list[Placement]:
        return [placement(x, self.axis), *self.versions.get(x, {})]

    def _price(self, x: Node, src: Placement, dst: Placement) -> float:
        if isinstance(src, Replicate) and isinstance(dst, Invariant):
            return float("inf") if has_gradient(x) else 0.0
        if isinstance(src, Invariant) and isinstance(dst, Partial):  # whole values are nobody's own part of a sum
            return _PRICES["divide"] * nbytes(x) if is_zeros(x) else float("inf")
        if src != dst and any(isinstance(p, Shard) and p.routed for p in (src, dst)):
            return float("inf")
        return _PRICES.get(conversion(src, dst), 1) * nbytes(x)

    def _converted(self, x: Node, need: Placement, before: Node, source: Placement | None = None) -> Node:
        """The operand with another placement; made once, right before its first use. source: what it counts as."""
        versions = self.versions.setdefault(x, {})
        if need in versions:
            return versions[need]
        for made in () if source else versions:  # whole is whole where no gradient flows, Replicate or Invariant
            if matches(made, need, has_gradient(x)):
                return versions[made]
        if matches(placement(x, self.axis), need, has_gradient(x)):
            return x
        self.backwards.refuse_over_microbatches(x, before)
        src = source or min(self._sources(x), key=lambda p: self._price(x, p, need))
        if self._price(x, src, need) == float("inf"):
            raise ValueError(f"placements: {describe(before)} needs {x.name} as {need} on {self.axis!r}, it is {src}")
        if isinstance(src, Partial) and isinstance(need, Replicate) and not has_gradient(x):
            return self._converted(x, INVARIANT, before)
        if isinstance(src, Partial) and isinstance(need, Replicate):
            # the sum first, then its gradient's sum: the same exchanges, and other users share the first
            base, src = self._converted(x, INVARIANT, before), INVARIANT
        else:
            base = x if source or src == placement(x, self.axis) else versions[src]
        if isinstance(src, Invariant) and isinstance(need, Partial):
            src = REPLICATE  # zeros have no gradient, and are the same by either name
        args = (base, self.axis, str(src), str(need))
        new = insert_call(before, convert, args, name=f"{x.name}_{_suffix(need)}")
        inherit(new, base, ["placements"])
        set_placement(new, self.axis, need)
        if x in self.weights:
            self.weights.add(new)
        if x in self.labels:
            self.labels[new] = self.labels[x]
        self.versions.setdefault(x, {})[need] = new
        return new


def _deal(gm: GraphModule, plan: Plan) -> None:
    """Note on each attention that the plan cuts how its queries and keys are dealt: its rule asks for it."""
    for node in gm.graph.nodes:
        if node.name in plan.attention:
            chosen = plan.attention[node.name]
            node.meta["dealt"] = (chosen.query_blocks, chosen.key_blocks)


def _suffix(p: Placement) -> str:
    return {Shard: "s", Replicate: "r", Invariant: "i", Partial: "p"}[type(p)]
