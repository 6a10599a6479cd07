"""early_gradients: the gradients of losses in chunks are made by F, while the logits of a chunk are there.

Consumes    a joint graph, of which chunks are noted (`autopar.passes.stage.chunk_losses`).
Guarantees  what a chunk's backward makes of one loss t alone, and is linear in it, F makes for t = 1, chunk by chunk,
            and adds up; the backward multiplies by t. Nothing of a chunk is made again.
Leaves      chunks whose gradient several losses, or a vector of them, or the value of the loss itself decide; gradients
            in float16, which hold no loss without its scale; operators that are not linear in the gradient.

    F: x1, l1, x2, l2         B: x2, dx2, x1, dx1, dh = cat(dx1, dx2), dw
        -->
    F: x2, l2, e2, x1, l1, e1, eh = cat(e1, e2), ew         B: dh = eh * t, dw = ew * t

What is linear in a gradient makes addends of addends: the types of step graphs (`autopar.rules.local_type_rules`) say
so.
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
_AXIS = "gradient"  # of no mesh: what is linear carries addends over it


def early_gradients(gm: GraphModule, tangents: Sequence[Node]) -> None:
    """See the module's docstring. What F makes so is noted (``early``)."""
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
    """Between a loss and the gradients of what its chunks take. early: gradients of chunks, and their sums; lead: what
    leads from the loss to them."""

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
        """Whether all that the chunks' backwards make of this loss can be made before anybody knows its gradient."""
        like = self.t.meta["val"]
        if like.dim() or not self.early or not all(n in self.early for n in self.starts):
            return False
        if any(n.meta["val"].dtype == torch.float16 for n in self.early):
            return False
        return self.chunks.isdisjoint(ancestors(self.lead))  # else all of them would be there before the first gradient

    def rewrite(self) -> list[Node]:
        """What F makes now."""
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
        """By the loss's gradient, for who takes it."""
        with self.graph.inserting_after(node):
            scaled = self.graph.call_function(aten.mul.Tensor, (node, self.t))
        inherit(scaled, node, (*TRACE, "call", "val"))
        for user in users:
            user.replace_input_with(node, scaled)


def _behind(gm: GraphModule, tangents: Sequence[Node]) -> dict[Node, None]:
    """What depends on them, in order, with them."""
    found = dict.fromkeys(tangents)
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(x in found for x in node.all_input_nodes):
            found[node] = None
    return found


def _reorder(gm: GraphModule, tangents: Sequence[Node], chunks: set[Node], early: Sequence[Node]) -> None:
    """The forward without chunks; each chunk right before its gradients; what takes losses; the backward."""
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
