"""fused_loss_backward: F computes the gradients of a chunked loss while the logits of a chunk exist.

Consumes    a joint graph in which chunks are marked (`autopar.passes.stage.chunk_losses`).
Guarantees  what the backward of a chunk computes from a single loss gradient t, and linearly in t, F computes for
            t = 1, chunk by chunk, and sums up; the backward multiplies by t. Nothing of a chunk is recomputed.
Leaves      chunks whose gradient depends on several losses, on a vector of losses, or on the value of the loss;
            gradients in float16, which would underflow without the loss scale; operators not linear in the gradient.

    F: x1, l1, x2, l2         B: x2, dx2, x1, dx1, dh = cat(dx1, dx2), dw
        -->
    F: x2, l2, e2, x1, l1, e1, eh = cat(e1, e2), ew         B: dh = eh * t, dw = ew * t

Linearity is read off the types of step graphs (`autopar.rules.local_type_rules`): an operator that maps partial values
to partial values is linear.
Source: Liger Kernel (Hsu et al. 2024, section 3.2), within one operator; here it is a rewrite of any such graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from autopar.adapters.fx.graph_nodes import copied_node
from autopar.ir.graph import ancestors, is_call, output_node, placeholders, reach, tensor_operands
from autopar.ir.meta import TRACE, inherit
from autopar.ops.traits import is_view
from autopar.rules.local_type_rules import held_results
from autopar.rules.local_types import ADDENDS, WHOLE

aten = torch.ops.aten
_JOINS = (aten.add.Tensor, aten.addmm.default, aten.cat.default)
_AXIS = "gradient"  # not an axis of the mesh: values that are linear in the gradient are partial on it


def fuse_loss_backward(gm: GraphModule, tangents: Sequence[Node]) -> None:
    """See the module's docstring. The nodes that F computes this way are marked ``early``."""
    chunks = {n for n in gm.graph.nodes if "chunk" in n.meta and n not in tangents}
    found: list[Node] = []
    for t in tangents if chunks else ():
        region = _Region(gm, t, tangents, chunks)
        if region.may_be_early:
            found += region.rewrite()
    if found:
        _reorder(gm, tangents, chunks, found)
        gm.recompile()


class _Region:
    """The nodes between a loss and the gradients of its chunks' inputs. early: gradients of chunks, and their sums;
    lead: the nodes from the loss to them."""

    def __init__(self, gm: GraphModule, t: Node, tangents: Sequence[Node], chunks: set[Node]) -> None:
        self.graph, self.t, self.chunks = gm.graph, t, chunks
        self.dependent = _behind(gm, tangents)
        behind = [n for n in _behind(gm, [t]) if n is not t]
        calls = {n.meta["call"] for n in chunks if "call" in n.meta}
        self.linear: dict[Node, None] = {t: None}
        for node in behind:
            if self._is_linear(node):
                self.linear[node] = None
        self.starts = dict.fromkeys(
            n for n in behind if n.meta.get("call", -1) in calls or not chunks.isdisjoint(n.all_input_nodes)
        )
        self.early: dict[Node, None] = {}
        for node in self.linear:
            given = [x for x in node.all_input_nodes if x in self.linear]
            joined = given and all(x in self.early for x in given) and (is_call(node, *_JOINS) or is_view(node.target))
            if node in self.starts or joined:
                self.early[node] = None
        leading = ancestors(self.early) & set(self.linear)
        self.lead = [n for n in self.linear if n in leading and n not in self.early and n is not t]

    def _is_linear(self, node: Node) -> bool:
        if any(x in self.dependent and x not in self.linear for x in node.all_input_nodes):
            return False
        given = [ADDENDS if x in self.linear else WHOLE for x in tensor_operands(node)]
        made = given[:1] if is_call(node, operator.getitem) else held_results(node, _AXIS, 2, given)
        return all(held == ADDENDS for held in made)

    @property
    def may_be_early(self) -> bool:
        """Whether the backward of all chunks of this loss can be computed before the loss gradient is known."""
        like = self.t.meta["val"]
        if like.dim() or not self.early or not all(n in self.early for n in self.starts):
            return False
        if any(n.meta["val"].dtype == torch.float16 for n in self.early):
            return False
        return self.chunks.isdisjoint(ancestors(self.lead))  # else all chunks would be alive before the first gradient

    def rewrite(self) -> list[Node]:
        """The nodes that F now computes."""
        first = next(iter([*self.lead, *self.early]))
        like = self.t.meta["val"]
        with self.graph.inserting_before(first):
            one = self.graph.call_function(aten.full.default, ([], 1.0), {"dtype": like.dtype, "device": like.device})
        one.meta["val"] = like
        one.meta["call"] = next(iter(self.early)).meta["call"]
        copies = {self.t: one}
        for node in self.lead:
            with self.graph.inserting_before(first):
                copies[node] = copied_node(self.graph, node, lambda n: copies.get(n, n))
        for node in self.early:
            for x in [x for x in node.all_input_nodes if x in copies]:
                node.replace_input_with(x, copies[x])
        for node in self.early:
            users = [u for u in node.users if u not in self.early]
            if users:
                self._scaled(node, users)
        made = [*copies.values(), *self.early]
        for node in made:
            node.meta["early"] = True
        return made

    def _scaled(self, node: Node, users: Sequence[Node]) -> None:
        """Multiply by the gradient of the loss, for these users."""
        with self.graph.inserting_after(node):
            scaled = self.graph.call_function(aten.mul.Tensor, (node, self.t))
        inherit(scaled, node, (*TRACE, "call", "val"))
        for user in users:
            user.replace_input_with(node, scaled)


def _behind(gm: GraphModule, tangents: Sequence[Node]) -> dict[Node, None]:
    """The tangents and all that depends on them, in order."""
    found = dict.fromkeys(tangents)
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(x in found for x in node.all_input_nodes):
            found[node] = None
    return found


def _reorder(gm: GraphModule, tangents: Sequence[Node], chunks: set[Node], early: Sequence[Node]) -> None:
    """The forward without chunks; each chunk right before its gradients; the users of losses; the backward."""
    late, wanted, dependent = _behind(gm, list(chunks)), dict.fromkeys(early), _behind(gm, tangents)
    order: dict[Node, None] = dict.fromkeys(placeholders(gm))
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    order |= dict.fromkeys(n for n in nodes if not (n in late or n in wanted or n in dependent))
    place = {n: i for i, n in enumerate(nodes)}

    def missing(node: Node) -> list[Node]:
        return [x for x in node.all_input_nodes if x not in order]

    for node in sorted(early, key=place.__getitem__):
        order |= dict.fromkeys(sorted(reach([node], missing), key=place.__getitem__))
    order |= dict.fromkeys(n for n in nodes if n not in dependent)
    order |= dict.fromkeys(nodes)
    end = output_node(gm)
    for node in order:
        if node.op == "call_function":
            end.prepend(node)
