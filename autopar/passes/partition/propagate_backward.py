"""Placements of a model's own backwards (`autopar.ops.gradient`) on one axis: part of `propagate_placements`.

A hole gets the placement of the gradient that it stands for, and what is computed from it is then placed like any other
value without gradient: a norm over a cut dim finds a pending sum, and a conversion is inserted. Two choices are left:

- the gradient of a whole value is whole, and the result Invariant; or a pending sum, and the result Replicate, where
  all inputs are that too and the backward is linear in it. So the gradients of weights that a function changed are
  summed with all others;
- an input is taken with that placement for which its gradient is least to convert.

Over microbatches nothing of a backward is converted: the others' gradients are not there yet.

An operator of others with a registered backward is one node, whose backward nobody sees. Where it is not linear, the
operator runs on whole values, Invariant: then the gradient is whole as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.fx import Graph, Node

from autopar.ir.conversions import is_conversion
from autopar.ir.custom_backward import CustomBackward, function_of, inside_of, is_linear, own_backwards
from autopar.ir.graph import describe
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATE, Invariant, Partial, Placement, Replicate, Shard
from autopar.rules import Rule
from autopar.rules.custom_backwards import has_nonlinear_backward


class Backwards:
    """Those of a graph on an axis."""

    def __init__(self, graph: Graph, axis: str, rule_of: Callable[[Node], Rule]) -> None:
        self.axis, self.rule_of = axis, rule_of
        self.inside = inside_of(graph)
        self.of_hole: dict[Node, CustomBackward] = {}
        for own in own_backwards(graph):
            self.of_hole |= dict.fromkeys(own.holes, own)
        self.summed: dict[int, bool] = {}

    def hole(self, node: Node, value: Placement, of: Callable[[Node], Placement]) -> Placement:
        """The placement of a hole. value: that of its value. of: what an input counts as."""
        if isinstance(value, (Shard, Partial)):
            return value if isinstance(value, Shard) else INVARIANT
        own = self.of_hole.get(node)
        if own is None:
            return INVARIANT
        if id(own) not in self.summed:
            whole = all(not isinstance(of(hole.args[0]), (Shard, Partial)) for hole in own.holes)  # type: ignore[arg-type]
            replicate = whole and all(isinstance(of(x), Replicate) for x in own.inputs)
            self.summed[id(own)] = self.axis == "mb" or (replicate and is_linear(own, self.rule_of))
        return PARTIAL if self.summed[id(own)] else INVARIANT

    def refuse_over_microbatches(self, x: Node, before: Node) -> None:
        """Raises ValueError where gradients of all microbatches would be needed in the backward of one."""
        if self.axis == "mb" and x in self.inside:
            while is_conversion(before):
                before = next(iter(before.users))
            raise ValueError(
                f"microbatches: the backward of the autograd function {function_of(x)} needs the gradients of all "
                f"microbatches at once at {describe(before)}, so cutting the batch would change the result; use "
                "microbatches=1"
            )

    def needs_whole_gradient(self, node: Node) -> bool:
        """Whether a call is of an operator whose own backward is not linear: the gradient that it takes must be that
        of all ranks. Raises ValueError over microbatches."""
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
    """The placement with which an input is taken. cost: of a conversion. The gradient of a converted input goes through
    the transposed conversion; where all is equal it does, together with the gradients of other uses."""

    def total(p: Placement) -> tuple[float, bool]:
        back = 0.0 if p == native else cost(dual_of(p), dual_of(native))
        return cost(gradient, dual_of(p)) + back, p == native

    return min([native, *versions], key=total)


def dual_of(p: Placement) -> Placement:
    """The placement of a gradient, as a value without gradient: whole is whole."""
    if isinstance(p, Shard):
        return p
    return PARTIAL if isinstance(p, Replicate) else INVARIANT


def source_of(p: Placement, need: Placement) -> Placement:
    """As what a whole value without gradient is converted: equal copies become addends as Replicate."""
    return REPLICATE if isinstance(p, Invariant) and isinstance(need, Partial) else p
