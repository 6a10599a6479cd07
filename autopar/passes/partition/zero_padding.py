"""zero_padding: no row of padding reaches a sum.

Consumes    a global graph with placements, of which some are padded (`autopar.ir.placement.Shard.units`).
Guarantees  where an operator sums over a padded dim, in the forward or in the gradient of an operand that lacks it,
            every operand and the gradient of the result are zero in the padding.
Leaves      everything else: what is zero already (shards of weights, slices, what is computed linearly from them, and
            gradients that come through such weights) gets no node. A graph without padding does not change.

    y = sum(x, [1])           # x: S(1/7)       -->    x_0 = zero_padding(x, "tp", ...); y = sum(x_0, [1])
    y = add(x, bias)          # bias lacks S(1/7)      y = add(x, bias); y_0 = zero_padding(y, ...)   # of the gradient

Softmaxes, maxima and other operators that span a dim are never sharded on it; the loss over a sharded vocabulary knows
its padding (`autopar.ops.vocab_parallel`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from autopar.adapters.dispatch import without_modes
from autopar.ir.conversions import conversion_of, is_conversion
from autopar.ir.graph import (
    getitem_index,
    has_gradient,
    insert_call,
    is_call,
    placement,
    set_placement,
    tensor_operands,
)
from autopar.ir.meta import inherit
from autopar.ir.placement import Shard
from autopar.ops.padded_pieces import zero_padding
from autopar.ops.traits import FILLED, PRODUCTS
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass
from autopar.rules import Cut, Rule, has_rule, operand_placements, result_placements, rule_of
from autopar.rules.rule import Dims, factors_of

aten, ours = torch.ops.aten, torch.ops.autopar

# Zero at zero for the numbers that they usually have, with a finite derivative.
KEEP_ZERO = {
    aten.relu.default, aten.gelu.default, aten.silu.default, aten.tanh.default, aten.leaky_relu.default,
    aten.elu.default, aten.selu.default, aten.mish.default, aten.hardswish.default, aten.hardtanh.default,
    aten.relu6.default, aten.celu.default, aten.sin.default, aten.erf.default, aten.square.default,
}  # fmt: skip


MULTIPLY = PRODUCTS | {aten.mul.Tensor}  # nothing but sums of products of their operands


class ZeroPadding(Pass):
    """Inserts zeros into padding before it would be summed."""

    name = "zero_padding"
    requires = ("placements",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        for axis in (a for a in ctx.mesh.cut_order if a != "sl"):
            if any(map(_is_padded, _placements(gm, axis))):
                _Zeros(gm, ctx, axis).run()
        gm.recompile()
        return gm


def _placements(gm: GraphModule, axis: str) -> Iterator[object]:
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "call_function"):
            yield from result_placements(node, axis)


def _is_padded(p: object) -> bool:
    return isinstance(p, Shard) and p.units > 0 and not p.routed


@dataclass
class _Padded:
    """A call with padded operands or results: its rule, and which of them have padding."""

    node: Node
    rule: Rule
    cut: Cut
    operands: list[Node]
    given: list[bool]
    made: list[bool]

    def jointly(self, i: int) -> set[int]:
        """The operands with which it is linear in the i-th: the gradient of none of them depends on another."""
        return {i}.union(*(kept for kept in self.rule.linear if i in kept))


class _Zeros:
    """One axis."""

    def __init__(self, gm: GraphModule, ctx: Compilation, axis: str) -> None:
        self.gm, self.mesh, self.axis = gm, ctx.mesh, axis
        self.replicated = ctx.plan.options.replicate_ops if ctx.plan is not None else ()
        self.calls = {call.node: call for node in gm.graph.nodes if (call := self._padded(node)) is not None}
        self.zero: set[Node] = set()  # values with zeros in their padding
        self.gradient_is_zero: dict[Node, bool] = {}

    def run(self) -> None:
        nodes = list(self.gm.graph.nodes)
        for node in nodes:
            if _is_padded(self._at(node)) and self._is_zero(node):
                self.zero.add(node)
        for node in reversed(nodes):
            if _is_padded(self._at(node)):
                self.gradient_is_zero[node] = all(self._returns_zero(user, node) for user in node.users)
        for call in self.calls.values():
            self._insert(call)

    def _at(self, node: Node) -> object:
        several = node.op == "output" or isinstance(node.meta["val"], (list, tuple))
        return None if several else placement(node, self.axis)

    def _padded(self, node: Node) -> _Padded | None:
        if node.op != "call_function" or is_conversion(node) or getitem_index(node) is not None:
            return None
        placed = operand_placements(node, self.axis), result_placements(node, self.axis)
        if not any(map(_is_padded, [*placed[0], *placed[1]])) or not (has_rule(node) or node.target in FILLED):
            return None
        rule = rule_of(node, self.axis, self.mesh, whole=self.replicated)
        if any(isinstance(p, Shard) and p.routed for p in [*placed[0], *placed[1]]):
            return None  # no row goes to an expert that is padding
        ranks, operands = self.mesh.pieces(self.axis), tensor_operands(node)
        told: list[tuple[Dims, Shard]] = []
        for dims, p in [*zip(rule.operands, placed[0], strict=True), *zip(rule.results, placed[1], strict=True)]:
            if dims is not None and isinstance(p, Shard) and p.units:
                told.append((dims, p))
        if not told:  # only the shape of padded operands matters
            return None
        cut = rule.completed(rule.cut_of(*told[0], ranks))
        given = [dims is not None and bool(factors_of(dims) & cut.keys()) for dims in rule.operands]
        made = [bool(factors_of(dims) & cut.keys()) for dims in rule.results]
        return _Padded(node, rule, cut, operands, given, made)

    # --- what is zero already -------------------------------------------------------------------------------

    def _is_zero(self, node: Node) -> bool:
        if node.op == "placeholder" or node.target is zero_padding:
            return True
        if is_conversion(node):
            axis, _, _ = conversion_of(node)
            return axis == self.axis or node.args[0] in self.zero
        index = getitem_index(node)
        call = self.calls.get(node.args[0] if index is not None else node)  # type: ignore[arg-type]
        if call is None:
            return False
        if _is_zero_at_zero(node) or is_call(call.node, ours.attention.default):
            return self._all_zero(call) and not index
        return any(
            all(call.given[i] and call.operands[i] in self.zero for i in kept) and self._others_are_finite(call, kept)
            for kept in call.rule.linear
        )

    def _all_zero(self, call: _Padded) -> bool:
        return all(x in self.zero for x, given in zip(call.operands, call.given) if given and _is_float(x))

    def _others_are_finite(self, call: _Padded, kept: Collection[int]) -> bool:
        """Whether what a call multiplies some operands by is finite in the padding: zero does not become nan."""
        others = [x for i, (x, given) in enumerate(zip(call.operands, call.given)) if given and i not in kept]
        return all(not _is_float(x) or (call.node.target in MULTIPLY and x in self.zero) for x in others)

    def _returns_zero(self, user: Node, value: Node) -> bool:
        """Whether the gradient that comes from a user is zero in the padding of a value."""
        if not has_gradient(value) or user.op == "output":  # which is returned without padding
            return True
        if is_conversion(user):
            axis, _, _ = conversion_of(user)
            return axis == self.axis or self.gradient_is_zero.get(user, False)
        if getitem_index(user) is not None:
            return self.gradient_is_zero.get(user, False)
        call = self.calls.get(user)
        if call is None:
            return False
        at = [i for i, x in enumerate(call.operands) if x is value and call.rule.operands[i] is not None]
        if not all(call.made):
            return all(self._ends_in_zero(call, i) for i in at)
        results = [] if _lacking(call) else [made for made in self._results(call) if has_gradient(made)]
        if not all(self.gradient_is_zero.get(made, False) for made in results):
            return False
        if user.target in KEEP_ZERO or is_call(user, ours.attention.default):
            return self._all_zero(call)
        return all(self._scales_by_finite(call, i) for i in at)

    def _ends_in_zero(self, call: _Padded, i: int) -> bool:
        """Of a call that contracts the padded factor: its derivative is a product with other operands, which are zero
        (or become so), or it knows its padding."""
        if call.rule.absorbed & call.cut.keys() or _looks_up(call):
            return True
        if call.operands[i] not in self.zero:
            return True  # it goes through a `zero_padding`
        return call.node.target in PRODUCTS and any(given and j != i for j, given in enumerate(call.given))

    def _scales_by_finite(self, call: _Padded, i: int) -> bool:
        if not any(i in kept for kept in call.rule.linear):
            return False
        return self._others_are_finite(call, call.jointly(i))

    def _results(self, call: _Padded) -> list[Node]:
        """Results with padding."""
        if not isinstance(call.node.meta["val"], (list, tuple)):
            return [call.node]
        found = [(user, getitem_index(user)) for user in call.node.users]
        return [user for user, i in found if i is not None and call.made[i]]

    # --- what has to become zero ----------------------------------------------------------------------------

    def _insert(self, call: _Padded) -> None:
        if _looks_up(call) or call.node.target is zero_padding:
            return
        if not all(call.made) and not call.rule.absorbed & call.cut.keys():
            for i, given in enumerate(call.given):
                if given:
                    self._zero_operand(call, i)
            return
        lacking = _lacking(call)
        if not lacking:
            return
        for made in self._results(call):
            if has_gradient(made) and not self.gradient_is_zero.get(made, False):
                self._zero_gradient(made)
        together = set.intersection(*(call.jointly(i) for i in lacking))
        for i, given in enumerate(call.given):
            if given and i not in together and _is_float(call.operands[i]):
                self._zero_operand(call, i)

    def _zero_operand(self, call: _Padded, i: int) -> None:
        x = call.operands[i]
        divides = call.node.target is aten.div.Tensor and i == 1  # by one: zero would make nan of a gradient of zero
        if x not in self.zero or divides:
            new = self._made(x, call.node, forward=True, fill=float(divides))
            call.node.replace_input_with(x, new)
            call.operands = [new if y is x else y for y in call.operands]

    def _zero_gradient(self, x: Node) -> None:
        new = self._made(x, x.next, forward=False)
        x.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        for call in self.calls.values():
            call.operands = [new if y is x else y for y in call.operands]
        if x in self.zero:
            self.zero.add(new)

    def _made(self, x: Node, before: Node, forward: bool, fill: float = 0.0) -> Node:
        p = placement(x, self.axis)
        assert isinstance(p, Shard)
        args = (x, self.axis, 1, p.dim, list(p.blocks), p.units, forward, fill)
        new = insert_call(before, zero_padding, args, like=x, val=x.meta["val"], name=f"{x.name}_0")
        inherit(new, x, ["placements"])
        set_placement(new, self.axis, p)
        if forward and not fill:
            self.zero.add(new)
        return new


def _is_zero_at_zero(node: Node) -> bool:
    """``hardtanh(x, -1, 1)`` is, ``hardtanh(x, 0.5, 1)`` is not."""
    if node.target not in KEEP_ZERO:
        return False
    with without_modes():
        return float(node.target(torch.zeros(()), *node.args[1:], **node.kwargs)) == 0


def _is_float(x: Node) -> bool:
    dtype: torch.dtype = x.meta["val"].dtype
    return dtype.is_floating_point or dtype.is_complex


def _lacking(call: _Padded) -> list[int]:
    """The operands whose gradient is a sum over the padded dim of a result."""
    if not any(call.made):
        return []
    pairs = enumerate(zip(call.operands, call.rule.operands, strict=True))
    return [i for i, (x, dims) in pairs if dims is not None and not call.given[i] and has_gradient(x)]


def _looks_up(call: _Padded) -> bool:
    """Whether it reads rows of a table by their index: no index is that of a row of padding."""
    return is_call(call.node, aten.embedding.default) and not any(call.made)
