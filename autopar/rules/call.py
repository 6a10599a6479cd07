"""One call of an operator as the rules see it: named arguments, and shapes as one mesh axis sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.fx import Node

from autopar.ir.conversions import conversion_of, is_conversion
from autopar.ir.expert_layers import ExpertPlan, blocks_of_tokens
from autopar.ir.graph import arguments, tensor_operands
from autopar.ir.mesh import AXES, Mesh
from autopar.ir.placement import Pieces, Shard, repetitions
from autopar.ops.traits import FILLED
from autopar.rules.rule import Dims, Rule

Shape = tuple[int, ...]


@dataclass
class Call:
    """``shape_of`` gives an operand's shape before the present axis shards it, ``result_shapes`` those of the results.

    ``relaxed``: the planner's view, in which a bias is no obstacle (it is split off if the plan needs it).
    ``of_step``: in a graph of one rank, where operands may be partial.
    """

    node: Node
    shape_of: Callable[[Node], Shape]
    result_shapes: tuple[Shape, ...]
    axis: str = ""
    relaxed: bool = False
    of_step: bool = False
    mesh: Mesh | None = None
    sizes: dict[str, int] = field(default_factory=dict)

    @cached_property
    def args(self) -> dict[str, Any]:
        return arguments(self.node)

    @cached_property
    def operands(self) -> list[Node]:
        return tensor_operands(self.node)

    @cached_property
    def seen(self) -> Any:
        """What a rule may depend on besides shapes: how a conversion gets its operand, and into how many shards axes in
        between have split what repeats in its dims; where a filled tensor is needed; how tokens that are copied to
        experts are sharded, and whether a combine gets rows of this axis' own tokens (None: unknown)."""
        if self.node.target in FILLED:
            return self.node.meta.get("placements", {}).get(self.axis)
        if is_conversion(self.node):
            placed = self.node.args[0].meta.get("placements", {})  # type: ignore[union-attr]
            return placed.get(self.axis), self._repeated(placed)
        if (chosen := self.experts) is not None and chosen.sends_tokens and self.args.keys() & {"order", "expert"}:
            return blocks_of_tokens(self.node, self.axis)
        if "order" in self.args and isinstance(self.args["order"], Node):
            placed = self.args["order"].meta.get("placements", {})
            return isinstance(placed[self.axis], Shard) if self.axis in placed else None
        return None

    def _repeated(self, placed: Mapping[str, Any]) -> tuple[tuple[int, Pieces], ...]:
        """(dim, shards) of axes between this one and that of a conversion: each sequence is sharded, not the dim."""
        between = AXES[AXES.index(self.axis) + 1 : AXES.index(conversion_of(self.node)[0])]
        found = (
            (p.dim, axis) for axis in between if isinstance(p := placed.get(axis), Shard) and repetitions(p.blocks) > 1
        )
        return tuple((dim, self.mesh.pieces(axis)) for dim, axis in found if self.mesh is not None)

    @property
    def experts(self) -> ExpertPlan | None:
        """How the experts of a call are sharded on this axis, if they are."""
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
        """A new or known factor of a size; a size of 1 has none."""
        if size == 1:
            return ()
        known = self.sizes.setdefault(name, size)
        assert known == size, f"{self.node}: factor {name} has sizes {known} and {size}"
        return (name,)

    def rule(self, operands: Sequence[Dims | None], results: Sequence[Dims], **facts: Any) -> Rule:
        """The finished rule, with sizes filled in."""
        return Rule(tuple(operands), tuple(results), dict(self.sizes), **facts)


RuleFunction = Callable[[Call], Rule]
