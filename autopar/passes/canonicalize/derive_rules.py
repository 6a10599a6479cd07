"""derive_rules: sharding rules for operators that the table does not have.

Consumes    a canonical global graph.
Guarantees  each call of an operator without a rule is annotated: with a rule derived by trials
            (`autopar.rules.infer_rule`); or as computed from parameters, buffers and constants alone, and so replicated
            at a cost that does not grow with the batch; or with the reason why there is neither, for the error.
Leaves      the graph as it is.
No-op       where all operators have rules.

    y = kthvalue(x, 2, -1)    -->    the same; derived: (a .) -> (a), (a)
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from autopar.ir.graph import mark_gradients, tensor_operands
from autopar.ir.meta import input_specs
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass
from autopar.rules import RULES
from autopar.rules.derived import MADE_OF_PARAMETERS, NoRule
from autopar.rules.infer_rule import derive


class DeriveRules(Pass):
    """See the module's docstring."""

    name = "derive_rules"
    requires = ("functional",)

    def apply(self, gm: GraphModule, ctx: Compilation | None = None) -> GraphModule:
        unknown = [n for n in gm.graph.nodes if n.op == "call_function" and n.target not in RULES]
        if unknown:
            mark_gradients(gm, [name for name, spec in input_specs(gm).items() if spec.requires_grad])
            of_batch = _of_batch(gm)
            for node in unknown:
                found = derive(node)
                given = isinstance(found, NoRule) and found.repeats and node not in of_batch and tensor_operands(node)
                node.meta["derived"] = MADE_OF_PARAMETERS if given else found
        return gm


def _of_batch(gm: GraphModule) -> set[Node]:
    """Nodes that depend on an input of the model, or on a seed."""
    specs = input_specs(gm)
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            found |= {node} if specs[node.name].kind not in ("parameter", "buffer", "constant") else set()
        elif not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
