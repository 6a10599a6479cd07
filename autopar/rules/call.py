"""One call of an operator as the rules see it: named arguments, and shapes as one mesh axis sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.fx import Node

from autopar.ir.conversions import is_conversion
from autopar.ir.expert_layers import ExpertPlan, blocks_of_tokens
from autopar.ir.graph import arguments, tensor_operands
from autopar.ir.placement import Shard
from autopar.rules.rule import Dims, Rule

Shape = tuple[int, ...]


@dataclass
class Call:
    """``shape_of`` gives an operand's shape before the axis at hand cuts it, ``result_shapes`` that of the results.

    ``relaxed``: the planner's view, in which a bias is no obstacle (it is split off once the plan needs it).
    ``of_step``: in a graph of one rank, where addends may be given.
    """

    node: Node
    shape_of: Callable[[Node], Shape]
    result_shapes: tuple[Shape, ...]
    axis: str = ""
    relaxed: bool = False
    of_step: bool = False
    sizes: dict[str, int] = field(default_factory=dict)

    @cached_property
    def args(self) -> dict[str, Any]:
        return arguments(self.node)

    @cached_property
    def operands(self) -> list[Node]:
        return tensor_operands(self.node)

    @cached_property
    def seen(self) -> Any:
        """What a rule may ask for beside shapes: how an exchange gets what it converts, how tokens are cut whose copies
        go to experts, and whether a combine gets rows of this axis' own tokens (None: nobody has said)."""
        if is_conversion(self.node):
            return self.node.args[0].meta.get("placements", {}).get(self.axis)  # type: ignore[union-attr]
        if (chosen := self.experts) is not None and chosen.by_copies and self.args.keys() & {"order", "expert"}:
            return blocks_of_tokens(self.node, self.axis)
        if "order" in self.args and isinstance(self.args["order"], Node):
            placed = self.args["order"].meta.get("placements", {})
            return isinstance(placed[self.axis], Shard) if self.axis in placed else None
        return None

    @property
    def experts(self) -> ExpertPlan | None:
        """How the experts that a call asks for are cut on this axis, if they are."""
        found: ExpertPlan | None = self.node.meta.get("experts")
        return found if found is not None and found.axis == self.axis else None

    @property
    def result(self) -> Shape:
        return self.result_shapes[0]

    def shape(self, name: str) -> Shape:
        """Shape of a tensor argument."""
        return self.shape_of(self.args[name])

    def dim(self, name: str = "dim") -> int:
        """An argument that names a dim, counted from the front."""
        return int(self.args[name]) % max(len(self.shape("self")), 1)

    def factor(self, name: str, size: int) -> tuple[str, ...]:
        """Introduce (or meet again) a factor; a size of 1 has none."""
        if size == 1:
            return ()
        known = self.sizes.setdefault(name, size)
        assert known == size, f"{self.node}: factor {name} has sizes {known} and {size}"
        return (name,)

    def rule(self, operands: Sequence[Dims | None], results: Sequence[Dims], **facts: Any) -> Rule:
        """The finished rule, with sizes filled in."""
        return Rule(tuple(operands), tuple(results), dict(self.sizes), **facts)


RuleFunction = Callable[[Call], Rule]
