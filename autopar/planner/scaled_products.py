"""Which products of a model run in eight bits (`Precision.product`), by weight, and why others do not.

Products of linear layers and grouped ones of experts, if sizes suit the kernels, but for

    the first           of the model, whose operand depends on no earlier product or embedding
    the last            whose result reaches outputs without a later product: heads
    routers             whose result decides which experts, or which rows, are chosen
    named ones          by ``Precision.wide``, and those of modules in another dtype, by ``Precision.keep``

Attention scores, norms, embeddings and convolutions stay wide, and experts with delayed scales. A weight with several
products is scaled in all of them or in none. Decided on the global graph: the same on every mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.fx import GraphModule, Node

from autopar.ir.compute_dtypes import torch_dtype
from autopar.ir.conversions import is_conversion
from autopar.ir.graph import ancestors, arguments, calls_of, global_shape, is_call, reach
from autopar.ir.meta import names_of_parameters
from autopar.ops.few_bits.scaled_products import MULTIPLE
from autopar.ops.traits import PERMUTED, PRODUCTS, is_choice
from autopar.precision import Precision

aten, ours = torch.ops.aten, torch.ops.autopar
LINEAR, GROUPED = aten.linear.default, ours.grouped_mm.default
_MIXES = PRODUCTS | {aten.embedding.default, ours.attention.default, aten.scaled_dot_product_attention.default}
_FOLLOWED = PERMUTED | {aten._to_copy.default}


def weight_of(product: Node, names: dict[str, str]) -> str | None:
    """The parameter that a linear layer or a grouped product multiplies by, cast, transposed or gathered; None for a
    computed weight."""
    node = arguments(product)["weight"]
    while node.target in _FOLLOWED or is_conversion(node):
        node = node.args[0]
    return names.get(node.name)


def plan_products(gm: GraphModule, precision: Precision) -> dict[str, str]:
    """Weight -> why its products stay wide, "" if they are scaled; for the weights of linear layers and
    of experts.

    Raises ValueError where ``wide`` names no module that the model calls.
    """
    if not precision.product:
        return {}
    _check_names(gm, precision)
    names, found = names_of_parameters(gm), dict[str, str]()
    for node in calls_of(gm.graph, LINEAR, GROUPED):
        name = weight_of(node, names)
        if name is not None:
            found[name] = found.get(name) or _why_wide(node, precision)
    return found


def product_notes(gm: GraphModule, precision: Precision) -> list[tuple[str, str]]:
    """Products without a weight of their own, and those that no kernel computes."""
    if not precision.product:
        return []
    names, notes = names_of_parameters(gm), list[tuple[str, str]]()
    computed = sum(weight_of(n, names) is None for n in calls_of(gm.graph, LINEAR))
    grouped = calls_of(gm.graph, GROUPED)
    joined = sum(weight_of(n, names) is None for n in grouped)
    if computed:
        notes.append(("precision", f"{computed} linear layers stay wide: their weights are computed"))
    if precision.scaling == "block":
        notes.append(("precision", "products scaled by block run as wide products of rounded operands on every device"))
    if joined:
        notes.append(("precision", f"{joined} grouped products of experts stay wide: their weights are computed"))
    if len(grouped) > joined and precision.scaling not in ("block", "delayed"):
        notes.append(
            ("precision", "grouped products of experts have a scale for each row, and on Hopper alone a kernel")
        )
    return notes


def _why_wide(node: Node, precision: Precision) -> str:
    outputs, inputs = global_shape(arguments(node)["weight"])[-2:]
    if named := next((name for name in precision.wide if _is_within(node, name)), None):
        return f"wide={named!r} names it"
    if node.meta["val"].dtype != torch_dtype(precision.compute):
        return f"its module computes in {str(node.meta['val'].dtype).removeprefix('torch.')}"
    if is_call(node, GROUPED) and precision.scaling == "delayed":
        return "experts: their scales are of rows, which no earlier step had"
    multiple = MULTIPLE[precision.scaling]
    if outputs % multiple or inputs % multiple:
        return f"{outputs} x {inputs} are no multiples of {multiple}"
    if not any(x.target in _MIXES for x in ancestors(node.all_input_nodes[:1])):
        return "the first product"
    met = list(reach([node], lambda n: () if n is not node and n.target in _MIXES else n.users))
    if any(is_choice(x.target) for x in met):
        return "a router: its result chooses"
    return "" if any(x.target in _MIXES for x in met if x is not node) else "the last product"


def _check_names(gm: GraphModule, precision: Precision) -> None:
    linear = calls_of(gm.graph, LINEAR, GROUPED)
    for name in precision.wide:
        if not any(_is_within(node, name) for node in linear):
            known = sorted({path.rpartition(".")[2] for node in linear for path, _ in _modules(node)} - {""})
            raise ValueError(
                f"precision: wide names no module with a linear layer, found {name!r}; give a path, the end of one, or "
                f"a class: {', '.join(known[:8])}"
            )


def _is_within(node: Node, name: str) -> bool:
    return any(name in (path, kind) or path.endswith(f".{name}") for path, kind in _modules(node))


def _modules(node: Node) -> Iterator[tuple[str, str]]:
    """(path, class) of the modules around a call."""
    stack: Iterable[tuple[str, object]] = (node.meta.get("nn_module_stack") or {}).values()
    for path, kind in stack:
        yield path, getattr(kind, "__name__", str(kind).rpartition(".")[2])
