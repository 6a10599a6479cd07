"""place_token_slices: placements on the axis "sl", whose shards are token slices that run one after the other.

Consumes    a canonical global graph; a mesh whose ``slice`` says which tokens the graphs will run.
Guarantees  every value that depends on parameters has a placement on "sl": sharded along its tokens wherever it has
            them. Only keys and values of causal attention are gathered.
Leaves      values that depend on no parameter (positions, rotary tables, masks, labels): they are Invariant, and
            converted where a value that depends on parameters uses them.
No-op       without a slice.

    h = embedding(w, ids)        -->   ids_s = convert(ids, "sl", I, S(1)); h = embedding(w, ids_s)      # sl: S(1)
    y = attention(q, k, v, ...)  -->   k_r = convert(k, "sl", S(2), R); ...; y = attention(q, k_r, v_r)  # sl: S(2)

Each slice is differentiated by itself: parameters are Replicate (the runtime adds the gradients of slices) and losses
Partial (it adds losses). An operator that needs other tokens is refused, so a graph that passes treats tokens
independently or causally, which its types prove op by op. Method: TeraPipe (Li et al., 2021), section 3.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from autopar.ir.conversions import convert
from autopar.ir.custom_backward import function_of
from autopar.ir.graph import (
    arguments,
    describe,
    has_gradient,
    insert_call,
    is_call,
    output_node,
    placement,
    replace_operand,
    replace_operands,
    set_placement,
    shape,
    tensor_operands,
)
from autopar.ir.meta import input_specs, signature_of
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATE, Invariant, Partial, Placement, Shard
from autopar.ops.gradient import GRAD_OUTPUT
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass
from autopar.rules import (
    Rule,
    RuleError,
    apply,
    has_rule,
    matches,
    missing_rule,
    operand_placements,
    rule_of,
    set_results,
)
from autopar.rules.sequence_parallel import spread_label

ATTENTION = torch.ops.autopar.attention.default
AXIS = "sl"
_WAY_OUT = "use a schedule without token slices"


class PlaceTokenSlices(Pass):
    """Gives every value a placement on the axis "sl" and inserts the conversions. Raises ValueError for a model whose
    tokens depend on later ones."""

    name = "place_token_slices"
    requires = ("functional",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        if ctx.mesh.slice is not None:
            _SliceSweep(gm, ctx).run()
            gm.recompile()
        return gm


class _SliceSweep:
    """One sweep over the graph, in execution order."""

    def __init__(self, gm: GraphModule, ctx: Compilation) -> None:
        self.gm, self.mesh = gm, ctx.mesh
        self.pieces = ctx.mesh.pieces(AXIS)
        self.tokens = ctx.mesh.slice.tokens if ctx.mesh.slice is not None else ""
        self.replicate_ops = ctx.plan.options.replicate_ops if ctx.plan is not None else ()
        self.inputs = ctx.plan.inputs if ctx.plan is not None else {}
        self.specs = input_specs(gm)
        self.made: set[Node] = set()  # parameters, and all that depends on them
        self.of_batch: set[Node] = set()  # what depends on the batch
        self.labels = self._labels()
        self.versions: dict[tuple[Node, Placement], Node] = {}

    def _labels(self) -> dict[Node, Shard]:
        """The token dim of every value that the tokens of attention's queries can be traced to or from."""
        labels: dict[Node, Shard] = {}
        for node in self.gm.graph.nodes:
            if is_call(node, ATTENTION) and arguments(node)["q"] not in labels:
                for x, shard in spread_label(arguments(node)["q"], Shard(2), self.mesh, AXIS).items():
                    labels.setdefault(x, shard)
        return labels

    def run(self) -> None:
        for node in list(self.gm.graph.nodes):
            if node.op == "placeholder":
                kind = self.specs[node.name].kind
                if kind == "parameter":
                    self.made.add(node)
                    set_placement(node, AXIS, REPLICATE)
                elif kind == "input":
                    self.of_batch.add(node)
                    if (where := self._input(self.specs[node.name].name)) is not None:
                        self.made.add(node)
                        set_placement(node, AXIS, where)
            elif node.op == "call_function":
                operands = tensor_operands(node)
                if any(x in self.of_batch for x in operands):
                    self.of_batch.add(node)
                if any(x in self.made for x in operands):
                    self.made.add(node)
                    self._visit(node, operands)
        self._finish_outputs()

    def _input(self, name: str) -> Placement | None:
        """Where the tokens of a slice lie in an input, if they need not be neighbours: as the plan says, and in the
        ids."""
        return self.inputs.get(name, {}).get(AXIS, Shard(1) if name == self.tokens else None)

    def _finish_outputs(self) -> None:
        out = output_node(self.gm)
        for value, spec in zip(list(out.args[0]), signature_of(self.gm).outputs, strict=True):  # type: ignore[arg-type]
            if value not in self.made:
                continue
            if spec.kind == "mutation":
                raise ValueError(
                    f"token_slices: {describe(value)} writes the buffer {spec.name}, once per slice instead of once "
                    f"per batch; {_WAY_OUT}"
                )
            if has_gradient(value) and not shape(value) and not isinstance(placement(value, AXIS), Partial):
                replace_operand(out, value, self._converted(value, PARTIAL, out))  # depends on parameters alone

    # --- one op -------------------------------------------------------------------------------------------

    def _visit(self, node: Node, operands: list[Node]) -> None:
        if node.target is operator.getitem:
            set_results(node, AXIS, operand_placements(node, AXIS))
            return
        if node.target is GRAD_OUTPUT:
            raise ValueError(
                f"token_slices: the autograd function {function_of(node)} has a custom backward, which would see the "
                f"gradients of one slice at a time; {_WAY_OUT}"
            )
        if not has_rule(node):
            raise ValueError(missing_rule(node, AXIS))
        rule = rule_of(node, AXIS, self.mesh, whole=self.replicate_ops)
        if all(dims is None for dims in rule.operands):  # it uses only the dtype of its operands
            self.made.discard(node)
            self.of_batch.discard(node)
            return
        needs, results = self._choose(node, rule, operands)
        pairs = zip(operands, needs, strict=True)
        replace_operands(node, [x if n is None or self._is(x, n) else self._converted(x, n, node) for x, n in pairs])
        set_results(node, AXIS, results)

    def _choose(self, node: Node, rule: Rule, operands: list[Node]) -> tuple[list[Placement | None], list[Placement]]:
        """(placements that the operands must have, placements of the results): sharded as some operand is, partial
        where the rule passes that on, sharded as the tokens of the result are, or replicated."""
        have = [placement(x, AXIS) for x in operands]
        shards = [(rule.operands[i], p) for i, p in enumerate(have) if isinstance(p, Shard)]
        why = ""
        pending = frozenset(i for i, p in enumerate(have) if isinstance(p, Partial) and rule.operands[i] is not None)
        entry = not shards and not pending and node in self.labels
        if entry:
            shards = [(rule.results[0], self.labels[node])]
        for dims, shard in shards:
            if dims is None:
                continue
            try:
                cut = rule.completed(rule.cut_of(dims, shard, self.pieces))
                needs, results = rule.required(cut), rule.produced(cut)
            except RuleError as error:
                why = why or str(error)
                continue
            bad = [x for x, need in zip(operands, needs, strict=True) if not self._can_be(x, need, node)]
            if entry and not any(isinstance(need, Shard) for need in needs):
                break  # an expansion of a parameter: all tokens get the same
            if not bad:
                return needs, results
            why = why or self._reason(bad[0])
        if entry and node in self.of_batch:  # the tokens begin here, but cannot be sliced here
            raise ValueError(_refusal(node, next(x for x in operands if x in self.of_batch), why))
        for kept in rule.linear if pending else ():
            needs = [None if d is None else PARTIAL if i in kept else REPLICATE for i, d in enumerate(rule.operands)]
            if pending <= kept and all(self._can_be(x, need, node) for x, need in zip(operands, needs, strict=True)):
                return needs, [PARTIAL for _ in rule.results]
        needs = [None if d is None else REPLICATE for d in rule.operands]
        bad = [x for x, need in zip(operands, needs, strict=True) if not self._can_be(x, need)]
        if bad:
            raise ValueError(_refusal(node, bad[0], why or self._reason(bad[0])))
        used = [REPLICATE if x in self.made else INVARIANT for x in operands]
        return needs, apply(rule, used, [has_gradient(x) for x in operands], self.pieces)

    # --- what a value can be ------------------------------------------------------------------------------

    def _is(self, x: Node, need: Placement) -> bool:
        return matches(placement(x, AXIS), need, has_gradient(x))

    def _can_be(self, x: Node, need: Placement | None, user: Node | None = None) -> bool:
        """Whether one slice can have the value so: from its own rows; keys and values also from earlier slices."""
        have = placement(x, AXIS)
        if need is None or self._is(x, need):
            return True
        if x not in self.made:
            return True  # known before the first slice runs
        if not isinstance(have, (Shard, Partial)):
            # each slice computes all rows and takes its own; no waste for parameters alone
            return isinstance(need, Partial) or (isinstance(need, Shard) and x not in self.of_batch)
        return have == Shard(2) and need == REPLICATE and user is not None and _keys_of(user, x)

    def _reason(self, x: Node) -> str:
        have = placement(x, AXIS)
        if isinstance(have, Partial):
            return f"{x.name} is a sum over all tokens"
        if isinstance(have, Shard):
            return f"{x.name} is sharded on its dim {have.dim}"
        return f"{x.name} is computed from all of them"

    def _converted(self, x: Node, need: Placement, before: Node) -> Node:
        """The value with another placement; inserted once, right before its first use."""
        if (x, need) in self.versions:
            return self.versions[x, need]
        have = placement(x, AXIS)
        if isinstance(need, Partial) and isinstance(have, Invariant):
            have = REPLICATE  # the same for a value without gradient
        args = (x, AXIS, str(have), str(need))
        new = insert_call(before, convert, args, name=f"{x.name}_sl")
        set_placement(new, AXIS, need)
        self.versions[x, need] = new
        return new


def _keys_of(node: Node, x: Node) -> bool:
    """Whether a causal attention takes the value as its keys or values and nothing else."""
    if not is_call(node, ATTENTION) or not arguments(node)["causal"]:
        return False
    args = arguments(node)
    return any(args[n] is x for n in ("k", "v")) and all(args[n] is not x for n in ("q", "bias", "sinks"))


def _refusal(node: Node, x: Node, why: str) -> str:
    return (
        f"token_slices: {describe(node)} needs all tokens of {x.name} at once ({why}), so this model cannot run slice "
        f"by slice; {_WAY_OUT}"
    )
