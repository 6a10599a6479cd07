"""scale_products: linear layers that the plan scales compute in eight bits.

Consumes    a global graph with placements, and a plan with ``products``.
Guarantees  such a layer's operands are scaled and rounded, forward and backward, to the same numbers as in one process:
            ranks that hold shards of an operand agree on its scale. Microbatches and token slices have scales of their
            own.
Leaves      other products; placements, shapes, biases. A partial operand is refused.

    y = linear(x, w, b)     -->     y = scaled_linear(x, w, b, "tensor", rows=["dp"], columns=["tp"])

A result that is Replicate on an axis has a gradient in addends there. They are summed before they are rounded.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from autopar.ir.conversions import is_conversion
from autopar.ir.graph import arguments, calls_of, described_at, global_shape, placement
from autopar.ir.mesh import IN_TIME
from autopar.ir.meta import names_of_parameters
from autopar.ir.placement import Partial, Replicate, Shard, scaled_blocks
from autopar.ops.delayed_scales import keys_of
from autopar.ops.scaled_products import BLOCK, scaled_linear, token_misfit
from autopar.planner.scaled_products import LINEAR, weight_of
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass


class ScaleProducts(Pass):
    """See the module's docstring."""

    name = "scale_products"
    requires = ("placements",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        assert ctx.plan is not None
        products, precision = ctx.plan.products, ctx.plan.options.precision
        named = dict[Node, str]()  # inputs by name
        names, axes = names_of_parameters(gm), [a for a in ctx.mesh.sizes if a not in IN_TIME]
        for node in calls_of(gm.graph, LINEAR) if products else ():
            weight = weight_of(node, names) or ""
            if products.get(weight, "wide"):
                continue
            _refuse_addends(node, axes)
            args = arguments(node)
            operands = args["input"], args["weight"], args["bias"]
            how = precision.scaling, precision.wide_weight_gradient
            node.target, node.kwargs = scaled_linear, {}
            node.args = (*operands, *how, *_shards(node, axes), *_pending(node, axes, ctx))
            if precision.scaling == "block":
                node.args += (_misfit(node, axes, ctx),)
            if precision.scaling == "delayed":
                first, *others = keys_of(weight)
                node.args += ("", [named.setdefault(_converted(args["input"]), first), *others])
        gm.recompile()
        return gm


def _converted(node: Node) -> Node:
    """The value that conversions have made this of: products share one input, and its scale."""
    while is_conversion(node):
        node = node.all_input_nodes[0]
    return node


def _refuse_addends(node: Node, axes: list[str]) -> None:
    """The addends of a sum must not be rounded before they are added. Raises ValueError."""
    for x in (arguments(node)["input"], arguments(node)["weight"]):
        for axis in axes:
            if isinstance(placement(x, axis), Partial):
                raise ValueError(
                    f"precision: a product in few bits needs whole operands, found {x.name} of {described_at(node)}, "
                    f"which is still to be summed over {axis!r}; name the module in precision.wide"
                )


def _misfit(node: Node, axes: list[str], ctx: Compilation) -> str:
    """Why the tokens of a layer make no blocks that are the same on every mesh; "" if they do. Raises ValueError for
    weights whose shards split blocks."""
    x, weight = node.args[:2]
    assert isinstance(x, Node) and isinstance(weight, Node)
    for operand, dim in ((weight, 0), (weight, 1), (x, x.meta["val"].dim() - 1)):
        if size := _split(operand, dim, axes, ctx):
            raise ValueError(
                f"precision: scaling='block' needs shards of whole blocks of {BLOCK}, found {size} of dim {dim} of "
                f"{operand.name} at {described_at(node)}; name the module in precision.wide, or use fewer ranks"
            )
    size = _split(x, max(x.meta["val"].dim() - 2, 0), axes, ctx)
    return token_misfit(f"{size} at {described_at(node)}") if size else ""


def _split(node: Node, dim: int, axes: list[str], ctx: Compilation) -> int:
    """The length of a shard of a dim, or of one of its blocks, that is no multiple of `BLOCK`; 0 if there is none."""
    size = global_shape(node)[dim]
    parts = [size]
    for axis in axes:
        p = placement(node, axis)
        if isinstance(p, Shard) and p.dim == dim:
            ranks = ctx.mesh.size(axis)
            parts += [abs(b) // ranks for b in scaled_blocks(p.blocks, size)] or [size // ranks]
            size //= ranks
    return next((part for part in parts if part % BLOCK), 0)


def _shards(node: Node, axes: list[str]) -> tuple[list[str], list[str], list[str]]:
    """The axes that shard the rows of a product, what it contracts, and its columns."""
    x, weight = node.args[:2]
    assert isinstance(x, Node) and isinstance(weight, Node)
    last = x.meta["val"].dim() - 1
    cut = {a: p.dim for a in axes if isinstance(p := placement(x, a), Shard)}
    of_weight = {a: p.dim for a in axes if isinstance(p := placement(weight, a), Shard)}
    rows = [a for a in axes if cut.get(a, last) != last]
    inner = [a for a in axes if cut.get(a) == last or of_weight.get(a) == 1]
    return rows, inner, [a for a in axes if of_weight.get(a) == 0]


def _pending(node: Node, axes: list[str], ctx: Compilation) -> tuple[list[str], list[int], list[int]]:
    """The axes over which the gradient of a result arrives in addends, and their sizes where its operands' gradients
    have to be addends, too."""
    pending = [a for a in axes if isinstance(placement(node, a), Replicate)]
    x, weight = (
        [ctx.mesh.size(a) for a in pending if isinstance(placement(operand, a), Replicate)]
        for operand in node.args[:2]
        if isinstance(operand, Node)
    )
    return pending, x, weight
