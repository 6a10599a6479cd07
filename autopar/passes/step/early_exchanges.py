"""early_exchanges: start the all-to-alls of tokens early, and wait for them late.

Consumes    a step graph (F or B) that sends tokens to experts on other ranks, by all-to-alls or by `ask_experts`.
Guarantees  only the ancestors of an exchange run before it. After it, up to the next exchange that depends on it,
            independent work comes first: shared experts, the router's backward, gradients of weights. It overlaps with
            the exchange.
Leaves      graphs without such exchanges; what is computed. A call moves across one exchange at most, so that no value
            is kept for longer than a layer.

    w = weight_grad(a, b); x = all_to_all_rows(c); y = f(x); z = g(d)
        -->
    x = all_to_all_rows(c); w = weight_grad(a, b); z = g(d); y = f(x)
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from autopar.ir.conversions import is_cast_input
from autopar.ir.graph import is_call, reach
from autopar.ops.traits import ASKS
from autopar.rewrite.checks import is_parameter_gather
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

ours = torch.ops.autopar


class EarlyExchanges(Pass):
    """Orders the calls around exchanges of tokens."""

    name = "early_exchanges"
    requires = ("step",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        exchanges = list(filter(_is_exchange, calls))  # their order stays
        if not any(is_call(node, ours.all_to_all_rows.default, *ASKS) for node in exchanges):
            return gm
        for node, before in zip(exchanges[::-1], [*exchanges[-2::-1], None], strict=True):
            _start_early(calls.index(node), calls.index(before) + 1 if before is not None else 0, calls)
        for node in exchanges:
            _wait_late(calls.index(node), calls)
        end = next(node for node in gm.graph.nodes if node.op == "output")
        for node in calls:
            end.prepend(node)
        gm.recompile()
        return gm


def _is_exchange(node: Node) -> bool:
    return is_call(node, ours.all_to_all_rows.default, ours.all_to_all.default, *ASKS)


def _start_early(at: int, first: int, calls: list[Node]) -> None:
    """Move an exchange up behind its ancestors among the calls from ``first`` on. Gathers of parameters, and their
    casts, stay before their users."""
    between = set(calls[first:at])
    made_of = set(reach([calls[at]], lambda x: between.intersection(x.all_input_nodes)))
    ahead = [x for x in calls[first:at] if x in made_of or is_parameter_gather(x) or is_cast_input(x)]
    calls[first : at + 1] = [*ahead, calls[at], *(x for x in calls[first:at] if x not in {*ahead})]


def _wait_late(at: int, calls: list[Node]) -> None:
    """Move the wait behind calls that do not depend on the exchange, up to the next exchange that does."""
    made, makes, others = {calls[at]}, list[Node](), list[Node]()
    for x in calls[at + 1 :]:
        if made.isdisjoint(x.all_input_nodes):
            others.append(x)
        elif _is_exchange(x):
            break
        else:
            made.add(x)
            makes.append(x)
    calls[at + 1 : at + 1 + len(others) + len(makes)] = [*others, *makes]
