"""propagate_placements: give every value a placement on every axis, and insert the conversions between them.

Consumes    a canonical global graph and a plan (placements of parameters, inputs, streams).
Guarantees  every value has a placement per axis; the operands of every op fit its rule; there is one conversion per
            value and placement, right before its first use; scalar outputs are Invariant.
Leaves      shapes, which stay global: there a conversion is the identity, so the graph still runs in one process.

    linear = linear(x, w)            -->    w_r = convert(w, "dp", S(0), R)
                                            linear = linear(x, w_r)              # dp: S(0)

Axes are placed one after the other, inner (tp) before outer (dp); each sees shapes as the earlier ones left them. The
innermost, "sl", is placed by an earlier pass (`place_token_slices`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from autopar.ir.conversions import convert, is_cast_input, is_conversion, is_zeros, uncast
from autopar.ir.custom_backward import (
    CustomBackward,
    function_of,
    inside_of,
    is_linear,
    own_backward_arguments,
    own_backwards,
)
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
from autopar.ops.gradient import GRAD_OUTPUT, OWN_BACKWARD, RESULT
from autopar.plan import Plan
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass
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
from autopar.rules.channel_regions import Region, Tokens, channel_region, seeds_of
from autopar.rules.infer_rule import has_nonlinear_backward
from autopar.rules.sequence_parallel import stream_labels
from autopar.rules.shared_rows import row_labels, sharded_already

# Axes that shard the batch or its tokens: weights are unsharded for use there, and activations decide. On tp and ep
# weights decide.
BATCH_AXES = (*DATA, "mb", "cp")
_PRICES = {
    "none": 0,
    "slice": 1e-3,
    "divide": 1e-3,
    "all_reduce": 2,
}  # per byte; other conversions cost 1


class PropagatePlacements(Pass):
    """Gives every value a placement on every axis and inserts the conversions."""

    name = "propagate_placements"
    requires = ("functional",)
    ensures = ("placements", "planned_shards")

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
        self.rows = self._shared_rows()  # values of regions whose rows the ranks share
        tokens = Tokens(gm, self.labels, ctx.mesh, axis)
        seeds = seeds_of(gm, plan.streams, ctx.mesh, axis)
        self.region = channel_region(tokens, seeds) if seeds else Region()  # what mixes tokens
        self.labels |= self.rows
        self.made: set[Node] = set()  # parameters, and all that depends on them
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

    def _shared_rows(self) -> dict[Node, Shard]:
        streams = [s for s in self.plan.streams if s.rows and s.axis == self.axis]
        barred = sharded_already(self.gm, self.plan, self.axis, self.labels) if streams else ()
        found: dict[Node, Shard] = {}
        for stream in streams:
            for node, label in row_labels(self.gm, stream, self.mesh, self.axis, barred).items():
                found.setdefault(node, label)
        return found

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
        """Scalars and partial values leave as Invariant, new values of state as it is stored; other tensors leave as
        they are sharded."""
        out = output_node(self.gm)
        specs = enumerate(signature_of(self.gm).outputs)
        mutations = {i: self.plan.parameter(o.name, self.axis).stored for i, o in specs if o.kind == "mutation"}
        for i, value in enumerate(list(out.args[0])):  # type: ignore[arg-type]
            if not isinstance(value, Node):
                continue
            have = placement(value, self.axis)
            scalar = not value.meta["val"].dim()
            if isinstance(have, Replicate) and has_gradient(value) and scalar:
                value, have = self._converted(value, PARTIAL, out), PARTIAL
            need = mutations.get(i, INVARIANT)
            if isinstance(have, Partial) or (i in mutations and not matches(have, need, has_gradient(value))):
                value = self._converted(value, need, out)
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
        if node.target in (GRAD_OUTPUT, OWN_BACKWARD, RESULT):
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
        """Refuse to replicate what should be sharded with the batch but whose derived rule forbids it, unless the user
        asked for it."""
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
        """A call of a custom backward: see `Backwards`."""
        if node.target is GRAD_OUTPUT:
            value: Node = node.args[0]  # type: ignore[assignment]
            found = self.backwards.grad_output(node, placement(value, self.axis), self._effective)
            set_placement(node, self.axis, found)
        elif node.target is OWN_BACKWARD:
            inputs, gradients, grad_outputs, name, zeros = own_backward_arguments(node)
            pairs = [self._with_gradient(x, g, node) for x, g in zip(inputs, gradients, strict=True)]
            node.args = ([x for x, _ in pairs], [g for _, g in pairs], grad_outputs, name, zeros)
        set_results(node, self.axis, type_of(node, self.axis, self.mesh))

    def _with_gradient(self, x: Node, gradient: Node, token: Node) -> tuple[Node, Node]:
        """An input of a function and its gradient, with matching placements."""
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
        """The best way to run the op: among the possible ones by rank, then by the bytes of their conversions."""
        have = [self._effective(x) for x in operands]
        choices = [self._costed(c, operands) for c in self._choices(node, rule, operands, have)]
        return min(choices, key=lambda c: (c.cost == float("inf"), c.rank, c.cost))

    def _choices(self, node: Node, rule: Rule, operands: list[Node], have: list[Placement]) -> Iterator[_Choice]:
        partial = frozenset(i for i, p in enumerate(have) if isinstance(p, Partial) and rule.operands[i] is not None)
        # terms of a loss of parameters alone: each microbatch computes the same, which becomes an addend by division
        alike = {i for i, x in enumerate(operands) if self.axis == "mb" and have[i] == REPLICATE and has_gradient(x)}
        for kept in rule.linear:
            others = [operands[i] for i in partial - kept]  # all-reduced if not differentiated: a count
            if not partial & kept or not kept <= partial | alike or any(map(has_gradient, others)):
                continue
            if self._passes_on(node, rule, operands, kept):
                needs: list[Placement | None] = [
                    None if d is None else (PARTIAL if i in kept else REPLICATE) for i, d in enumerate(rule.operands)
                ]
                yield _Choice(needs, [PARTIAL for _ in rule.results], rank=0)
        if (imposed := rule.imposed_cut or self.region.cut(node, rule, self.ranks)) is not None:
            yield _Choice(rule.required(imposed), rule.produced(imposed), rank=0)
            return
        if node in self.region.repeats:
            yield _Choice(
                [None if d is None else REPLICATE for d in rule.operands], [REPLICATE for _ in rule.results], 0
            )
            return
        for i, x in enumerate(operands):
            p = self.labels.get(x, INVARIANT) if i in partial else have[i]
            dims = rule.operands[i]
            if dims is None or not isinstance(p, Shard):
                continue
            if self.axis in BATCH_AXES and x in self.weights and self._used(x) != p:
                continue
            try:
                cut = rule.completed(rule.cut_of(dims, p, self.ranks))
                if x in self.rows and node not in self.rows and any(isinstance(r, Shard) for r in rule.produced(cut)):
                    continue  # shared rows stay within their region
                yield _Choice(rule.required(cut), rule.produced(cut), rank=0 if x in self.weights else 2)
            except RuleError:
                continue
        if self._is_entry(node, operands):
            yield from self._entry(node, rule)
        yield self._whole(rule, operands, have)

    def _passes_on(self, node: Node, rule: Rule, operands: list[Node], kept: frozenset[int]) -> bool:
        """Whether partial operands give a partial result. Over microbatches, differentiated ones can only end in a
        loss, and others are summed before they meet anything else, since statistics that a pre-pass sums cannot depend
        on unsummed values."""
        if node in self.backwards.inside:
            return True
        if self.axis == "mb" and any(has_gradient(operands[i]) for i in kept):
            return True
        alone = len(kept) == sum(dims is not None for dims in rule.operands)
        return rule.keep_partial and (alone or self.axis != "mb")

    def _entry(self, node: Node, rule: Rule) -> Iterator[_Choice]:
        """Sharded as the stream that starts here. A new dim of a parameter (expand) cannot be sharded where it appears:
        it becomes Replicate, which its users slice, so that the parameter's gradient is summed and not the stream's."""
        try:
            cut = rule.completed(rule.cut_of(rule.results[0], self.labels[node], self.ranks))
        except RuleError:
            return
        needs = rule.required(cut)
        if any(isinstance(need, Shard) for need in needs):
            yield _Choice(needs, rule.produced(cut), rank=0 if node in self.rows else 1)
        elif has_gradient(node):
            whole: list[Placement | None] = [None if d is None else REPLICATE for d in rule.operands]
            yield _Choice(whole, [REPLICATE for _ in rule.results], rank=1)

    def _whole(self, rule: Rule, operands: list[Node], have: list[Placement]) -> _Choice:
        """All operands replicated: Invariant if all can be, else Replicate."""
        asked = any(self._used(x) == REPLICATE and self.axis == "tp" for x in operands)
        as_r = any(isinstance(p, Replicate) and has_gradient(x) for x, p in zip(operands, have, strict=True))
        target: Placement = REPLICATE if as_r or asked else INVARIANT
        needs = [None if d is None else target for d in rule.operands]
        flows = any(has_gradient(x) for x, d in zip(operands, rule.operands, strict=True) if d is not None)
        return _Choice(needs, [target if flows else INVARIANT for _ in rule.results], 1 if asked else 3)

    def _is_entry(self, node: Node, operands: list[Node]) -> bool:
        """Whether a stream starts here. On tp: a labelled value with a gradient whose operands have no label. On cp: a
        labelled value that depends on parameters, and on nothing sharded so far; as for shared rows on any axis."""
        if node not in self.labels or isinstance(node.meta["val"], (list, tuple)):
            return False
        if self.axis == "cp" or node in self.rows:
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
        """The placement that counts for an operand: a parameter as it is used, a partial value as it was reduced."""
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
        if isinstance(src, Invariant) and isinstance(dst, Partial):  # a replicated value is not an addend
            return _PRICES["divide"] * nbytes(x) if is_zeros(x) else float("inf")
        if src != dst and any(isinstance(p, Shard) and p.routed for p in (src, dst)):
            return float("inf")
        return _PRICES.get(conversion(src, dst), 1) * nbytes(x)

    def _converted(self, x: Node, need: Placement, before: Node, source: Placement | None = None) -> Node:
        """The operand with another placement; inserted once, right before its first use. source: what it counts as."""
        versions = self.versions.setdefault(x, {})
        if need in versions:
            return versions[need]
        for made in () if source else versions:  # without gradient, Replicate and Invariant are the same
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
            # all-reduce first, then that of the gradient: the same collectives, and other users share the first
            base, src = self._converted(x, INVARIANT, before), INVARIANT
        else:
            base = x if source or src == placement(x, self.axis) else versions[src]
        if isinstance(src, Invariant) and isinstance(need, Partial):
            src = REPLICATE  # zeros have no gradient, and Replicate and Invariant are the same for them
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
    """Annotate each attention that the plan shards with the token layout of its queries and keys, for its rule."""
    for node in gm.graph.nodes:
        if node.name in plan.attention:
            chosen = plan.attention[node.name]
            node.meta["dealt"] = (chosen.query_blocks, chosen.key_blocks)


def _suffix(p: Placement) -> str:
    return {Shard: "s", Replicate: "r", Invariant: "i", Partial: "p"}[type(p)]


# --- placements of custom backwards --------------------------------------------------------------------


class Backwards:
    """Placements of custom backwards (`autopar.ops.gradient`) on one axis.

    A grad_output gets the placement of the gradient that it stands for; what is computed from it is then placed like
    any other value without gradient. Two choices remain. The gradient of a replicated value is either replicated, which
    makes the result Invariant, or partial, which makes the result Replicate and requires Replicate inputs and a
    backward that is linear in the gradient. And each input gets the placement for which its gradient is cheapest to
    convert.

    Over microbatches nothing in a backward is converted, since the other microbatches' gradients do not exist yet. A
    custom operator whose registered backward is not linear runs on Invariant values: then the gradient is replicated.
    """

    def __init__(self, graph: Graph, axis: str, rule_of: Callable[[Node], Rule]) -> None:
        self.axis, self.rule_of = axis, rule_of
        self.inside = inside_of(graph)
        self.of_grad_output: dict[Node, CustomBackward] = {}
        for own in own_backwards(graph):
            self.of_grad_output |= dict.fromkeys(own.grad_outputs, own)
        self.summed: dict[int, bool] = {}

    def grad_output(self, node: Node, value: Placement, of: Callable[[Node], Placement]) -> Placement:
        """The placement of a grad_output. value: that of its value. of: the placement that counts for an input."""
        if isinstance(value, (Shard, Partial)):
            return value if isinstance(value, Shard) else INVARIANT
        own = self.of_grad_output.get(node)
        if own is None:
            return INVARIANT
        if id(own) not in self.summed:
            whole = all(not isinstance(of(grad_output.args[0]), (Shard, Partial)) for grad_output in own.grad_outputs)  # type: ignore[arg-type]
            replicate = whole and all(isinstance(of(x), Replicate) for x in own.inputs)
            self.summed[id(own)] = self.axis == "mb" or (replicate and is_linear(own, self.rule_of))
        return PARTIAL if self.summed[id(own)] else INVARIANT

    def refuse_over_microbatches(self, x: Node, before: Node) -> None:
        """Raises ValueError where the backward of one microbatch would need the gradients of all of them."""
        if self.axis == "mb" and x in self.inside:
            while is_conversion(before):
                before = next(iter(before.users))
            raise ValueError(
                f"microbatches: the backward of the autograd function {function_of(x)} needs the gradients of all "
                f"microbatches at once at {describe(before)}, so splitting the batch would change the result; use "
                "microbatches=1"
            )

    def needs_whole_gradient(self, node: Node) -> bool:
        """Whether a call is of an operator whose registered backward is not linear: its gradient must be replicated.
        Raises ValueError over microbatches."""
        if not has_nonlinear_backward(node):
            return False
        if self.axis == "mb":
            raise ValueError(
                f"microbatches: the backward that is registered for {node.target} is not linear in the gradient, so "
                f"it needs that of all microbatches at once at {describe(node)}; use microbatches=1"
            )
        return True


def best_input(
    gradient: Placement,
    native: Placement,
    versions: Mapping[Placement, Node],
    cost: Callable[[Placement, Placement], float],
) -> Placement:
    """The placement to convert an input to. cost: of a conversion. The gradient of a converted input goes through the
    transposed conversion. Ties favour the conversion, which then shares the gradients of other uses."""

    def total(p: Placement) -> tuple[float, bool]:
        back = 0.0 if p == native else cost(dual_of(p), dual_of(native))
        return cost(gradient, dual_of(p)) + back, p == native

    return min([native, *versions], key=total)


def dual_of(p: Placement) -> Placement:
    """The placement of a gradient, for a value without gradient of its own: Replicate and Invariant are the same."""
    if isinstance(p, Shard):
        return p
    return PARTIAL if isinstance(p, Replicate) else INVARIANT


def source_of(p: Placement, need: Placement) -> Placement:
    """The placement from which a replicated value without gradient is converted: copies become addends as Replicate."""
    return REPLICATE if isinstance(p, Invariant) and isinstance(need, Partial) else p
