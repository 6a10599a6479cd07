"""scale_products: linear layers and experts that the plan scales compute in eight bits.

Consumes    a global graph with placements, and a plan with ``products``.
Guarantees  such a layer's operands are scaled and rounded, forward and backward, to the same numbers as in one process:
            ranks that hold shards of an operand agree on its scale. Microbatches and token slices have scales of their
            own.
Leaves      other products; placements, shapes, biases. A partial operand is refused.

    y = linear(x, w, b)             -->     y = scaled_linear(x, w, b, "tensor", rows=["dp"], columns=["tp"])
    y = grouped_mm(x, w, offsets)   -->     y = scaled_experts(x, w, offsets, "tensor", tokens=["dp"])

A result that is Replicate on an axis has a gradient in addends there. They are summed before they are rounded.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from autopar.ir.conversions import is_conversion
from autopar.ir.graph import arguments, calls_of, described_at, global_shape, is_call, placement
from autopar.ir.mesh import IN_TIME
from autopar.ir.meta import names_of_parameters
from autopar.ir.placement import Partial, Replicate, Shard, scaled_blocks
from autopar.ops.few_bits.delayed_scales import keys_of
from autopar.ops.few_bits.scaled_experts import scaled_experts
from autopar.ops.few_bits.scaled_products import BLOCK, scaled_linear, token_misfit
from autopar.planner.scaled_products import GROUPED, LINEAR, weight_of
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
        for node in calls_of(gm.graph, LINEAR, GROUPED) if products else ():
            weight = weight_of(node, names) or ""
            if products.get(weight, "wide"):
                continue
            _refuse_addends(node, axes)
            how = precision.scaling, precision.wide_weight_gradient, *_shards(node, axes), *_pending(node, axes, ctx)
            given = tuple(arguments(node).values())
            node.target = scaled_experts if is_call(node, GROUPED) else scaled_linear
            node.args, node.kwargs = (*given, *how), {}
            if precision.scaling == "block":
                _check_blocks(node, axes, ctx)
            if node.target is scaled_linear and precision.scaling == "block":
                node.args += (_misfit(node, axes, ctx),)
            if precision.scaling == "delayed":
                first, *others = keys_of(weight)
                node.args += ("", [named.setdefault(_converted(given[0]), first), *others])
        gm.recompile()
        return gm


def _converted(node: Node) -> Node:
    """The value that conversions have made this of: products share one input, and its scale."""
    while is_conversion(node):
        node = node.all_input_nodes[0]
    return node


def _refuse_addends(node: Node, axes: list[str]) -> None:
    """The addends of a sum must not be rounded before they are added. Raises ValueError."""
    for x in node.all_input_nodes[:2]:
        for axis in axes:
            if isinstance(placement(x, axis), Partial):
                raise ValueError(
                    f"precision: a product in few bits needs whole operands, found {x.name} of {described_at(node)}, "
                    f"which is still to be summed over {axis!r}; name the module in precision.wide"
                )


def _check_blocks(node: Node, axes: list[str], ctx: Compilation) -> None:
    """Raises ValueError for operands whose shards split blocks."""
    x, weight = node.args[:2]
    assert isinstance(x, Node) and isinstance(weight, Node)
    last = weight.meta["val"].dim() - 1
    for operand, dim in ((weight, last - 1), (weight, last), (x, x.meta["val"].dim() - 1)):
        if size := _split(operand, dim, axes, ctx):
            raise ValueError(
                f"precision: scaling='block' needs shards of whole blocks of {BLOCK}, found {size} of dim {dim} of "
                f"{operand.name} at {described_at(node)}; name the module in precision.wide, or use fewer ranks"
            )


def _misfit(node: Node, axes: list[str], ctx: Compilation) -> str:
    """Why the tokens of a layer make no blocks that are the same on every mesh; "" if they do."""
    x = node.args[0]
    assert isinstance(x, Node)
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
    """The axes that shard the rows of a product, what it contracts, and its columns. An axis that shards experts shards
    no expert's rows."""
    x, weight = node.args[:2]
    assert isinstance(x, Node) and isinstance(weight, Node)
    last, of_columns = x.meta["val"].dim() - 1, weight.meta["val"].dim() - 2
    of_inner = of_columns + 1
    if is_call(node, GROUPED) and arguments(node)["transposed"]:
        of_columns, of_inner = of_inner, of_columns
    cut = {a: p.dim for a in axes if isinstance(p := placement(x, a), Shard)}
    of_weight = {a: p.dim for a in axes if isinstance(p := placement(weight, a), Shard)}
    experts = [a for a in axes if of_weight.get(a, of_columns) not in (of_columns, of_inner)]
    rows = [a for a in axes if cut.get(a, last) != last and a not in experts]
    inner = [a for a in axes if cut.get(a) == last or of_weight.get(a) == of_inner]
    return rows, inner, [a for a in axes if of_weight.get(a) == of_columns]


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
