"""Dropout becomes `autopar::dropout`: one seed input for the whole graph, a number (site) for each call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import add_placeholder, arguments, describe, placeholders, run_fake, set_argument
from autopar.ir.meta import extend_signature
from autopar.ir.signature import InputSpec
from autopar.ops.traits import DROPOUTS, is_random
from autopar.rewrite.build import Build, calls, operand

aten = torch.ops.aten


def number_dropouts(gm: GraphModule) -> None:
    """native_dropout(x, 0.1, True)[0] --> autopar.dropout(x, seed, 0.1, site, [], [])
    native_dropout(x, 0.0, True)[0], native_dropout(x, 0.1, False)[0] --> x

    Attention with dropout gets the seed and its number, too. Raises ValueError for other random operators: their
    numbers would depend on how the graph is cut.
    """
    seed: Node | None = None
    site = 0
    for node in list(gm.graph.nodes):
        if calls(node, *DROPOUTS):
            known = arguments(node)
            train = known["train"] if known["train"] is not None else True
            rate = float(known["p"])
            source = operand(node)
            if train and rate > 0:
                seed = seed or _add_seed(gm)
                source = Build(node)(torch.ops.autopar.dropout.default, source, seed, rate, site, [], [])
                site += 1
            _replace(gm, node, source)
        elif calls(node, torch.ops.autopar.attention.default) and _unseeded(arguments(node)):
            seed = seed or _add_seed(gm)
            set_argument(node, "seed", seed)
            set_argument(node, "site", site)
            site += 1
        else:
            _refuse_random(node)


def _unseeded(known: dict[str, Any]) -> bool:
    return bool(known["dropout"]) and known["seed"] is None


def _replace(gm: GraphModule, node: Node, value: Node) -> None:
    firsts: Sequence[Node] = [node] if calls(node, aten.dropout.default) else list(node.users)
    for first in firsts:
        assert first is node or first.args[1] == 0 or not first.users, "normalize: the mask of a dropout is used"
        if first is node or (calls(first, operator.getitem) and first.args[1] == 0):
            first.replace_all_uses_with(value)
        gm.graph.erase_node(first)
    if firsts != [node]:
        gm.graph.erase_node(node)


def _add_seed(gm: GraphModule) -> Node:
    """The int64 scalar input "seed", behind the other inputs."""
    node = add_placeholder(gm.graph, "seed", placeholders(gm)[-1])
    node.meta["val"] = run_fake(gm.graph, torch.empty, ((),), {"dtype": torch.int64})
    extend_signature(gm, [InputSpec(node.name, "seed", "seed")])
    return node


def _refuse_random(node: Node) -> None:
    if is_random(node.target) and node.users:
        raise ValueError(
            f"normalize: random numbers must not depend on how the graph is cut, found {describe(node)}; use "
            "torch.nn.functional.dropout, set the rate to 0, or capture with train=False"
        )
