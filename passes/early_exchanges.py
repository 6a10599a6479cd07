"""early_exchanges: start exchanges of rows early, and wait for them late.

Consumes    a step graph (F or B) in which tokens go to experts on other ranks.
Guarantees  ahead of an exchange stands only what it is made of; behind it, up to the next exchange that is made of it,
            first what is not: shared experts, the router's backward, gradients of weights. They run beside it.
Leaves      graphs without exchanges of rows; what is computed. A call moves across one exchange at most, so that no
            value waits for longer than a layer.

    w = weight_grad(a, b); x = all_to_all_rows(c); y = f(x); z = g(d)
        -->
    x = all_to_all_rows(c); w = weight_grad(a, b); z = g(d); y = f(x)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from autopar.ir.conversions import is_cast_input
from autopar.ir.graph import ancestors, is_call, reach
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.tidy_checks import is_parameter_gather

ours = torch.ops.autopar


@dataclass(frozen=True)
class EarlyExchanges:
    """Orders the calls around exchanges of rows."""

    name: ClassVar[str] = "early_exchanges"
    requires: ClassVar[tuple[str, ...]] = ("step",)
    ensures: ClassVar[tuple[str, ...]] = ()

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        exchanges = [node for node in calls if is_call(node, ours.all_to_all_rows.default, ours.all_to_all.default)]
        if not any(is_call(node, ours.all_to_all_rows.default) for node in exchanges):
            return gm
        for node in reversed(exchanges):  # the last one first: nothing moves twice
            _start_early(node, calls, exchanges)
        for node in exchanges:
            _wait_late(node, calls, exchanges)
        end = next(node for node in gm.graph.nodes if node.op == "output")
        for node in calls:
            end.prepend(node)
        gm.recompile()
        return gm


def _start_early(exchange: Node, calls: list[Node], exchanges: list[Node]) -> None:
    """Behind what it is made of. Gathers of parameters, and their casts, stay ahead of what takes them."""
    at, made_of = calls.index(exchange), ancestors([exchange])
    first = max((calls.index(x) + 1 for x in exchanges if calls.index(x) < at), default=0)
    ahead = [x for x in calls[first:at] if x in made_of or is_parameter_gather(x) or is_cast_input(x)]
    calls[first : at + 1] = [*ahead, exchange, *(x for x in calls[first:at] if x not in {*ahead})]


def _wait_late(exchange: Node, calls: list[Node], exchanges: list[Node]) -> None:
    """Behind what is not made of it."""
    at, makes = calls.index(exchange), set(reach([exchange], lambda x: list(x.users)))
    last = min((calls.index(x) for x in exchanges if x in makes and x is not exchange), default=len(calls))
    behind = calls[at + 1 : last]
    calls[at + 1 : last] = [*(x for x in behind if x not in makes), *(x for x in behind if x in makes)]
