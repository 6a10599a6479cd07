"""Random operators become `autopar::dropout` and `autopar::random`: the graph has one seed input, and each call that
draws numbers has a site, its position in the model's code."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import (
    add_placeholder,
    arguments,
    describe,
    has_gradient,
    output_node,
    placeholders,
    run_fake,
    set_argument,
)
from autopar.ir.meta import extend_signature
from autopar.ir.signature import InputSpec
from autopar.ops.random_recipes import DrawMaker, NoRecipe, WeightConversion, recipe_for
from autopar.ops.traits import DROPOUTS, is_random
from autopar.rewrite.build import Build, calls, operand

aten = torch.ops.aten


def number_draws(gm: GraphModule) -> None:
    """native_dropout(x, 0.1, True)[0] --> autopar.dropout(x, seed, 0.1, site, [], [])
    native_dropout(x, 0.0, True)[0], native_dropout(x, 0.1, False)[0] --> x
    rand([4, 8]) --> autopar.random(empty([4, 8]), seed, "uniform", 0, 1, site, [], [], float32)

    Attention with dropout gets the seed and a site too. Raises ValueError for random operators without a recipe, where
    the count of numbers drawn may depend on values.
    """
    numbering = _Numbering(gm)
    for node in list(gm.graph.nodes):
        if calls(node, *DROPOUTS):
            numbering.dropout(node)
        elif calls(node, torch.ops.autopar.attention.default) and _unseeded(arguments(node)):
            set_argument(node, "seed", numbering.seed())
            set_argument(node, "site", numbering.site())
        elif node.op == "call_function" and (recipe := recipe_for(node.target)[0]) is not None:
            numbering.recipe(node, recipe)
        elif is_random(node.target):
            _refuse(node, "")


def hold_unused_draws(gm: GraphModule) -> int:
    """Make unused draws outputs, so that they are counted as in an eager run; returns how many. `release_draws` undoes
    it."""
    unused = [n for n in gm.graph.nodes if n.op == "call_function" and not n.users and draws_numbers(n)]
    out = output_node(gm)
    firsts = [n if isinstance(n.meta["val"], torch.Tensor) else Build(n.next)(operator.getitem, n, 0) for n in unused]
    out.args = ((*out.args[0], *firsts),)  # type: ignore[misc]
    return len(unused)


def release_draws(gm: GraphModule, count: int) -> None:
    """Undo `hold_unused_draws`."""
    out = output_node(gm)
    values = tuple(out.args[0])  # type: ignore[arg-type]
    out.args = (values[: len(values) - count],)


def draws_numbers(node: Node) -> bool:
    """Whether a call of the captured graph draws random numbers."""
    return is_random(node.target) or calls(node, *DROPOUTS)


class _Numbering:
    """The seed of a graph, created on first use, and the next site."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self._seed: Node | None = None
        self._next = 0

    def seed(self) -> Node:
        """The int64 scalar input "seed", the last input."""
        if self._seed is None:
            self._seed = add_placeholder(self.gm.graph, "seed", placeholders(self.gm)[-1])
            self._seed.meta["val"] = run_fake(self.gm.graph, torch.empty, ((),), {"dtype": torch.int64})
            extend_signature(self.gm, [InputSpec(self._seed.name, "seed", "seed")])
        return self._seed

    def site(self) -> int:
        """The site of a call."""
        self._next += 1
        return self._next - 1

    def dropout(self, node: Node) -> None:
        """A rate of 1 draws nothing, as in torch."""
        known = arguments(node)
        train = known["train"] if known["train"] is not None else True
        rate, source = float(known["p"]), operand(node)
        if train and rate > 0:
            site = self.site() if rate < 1 else 0
            source = Build(node)(torch.ops.autopar.dropout.default, source, self.seed(), rate, site, [], [])
        _replace_dropout(self.gm, node, source)

    def recipe(self, node: Node, recipe: WeightConversion) -> None:
        """Replace a call by its recipe."""
        if arguments(node).get("generator") is not None:
            _refuse(node, " with its own generator")
        build = Build(node)

        def draw(like: Node, kind: str, a: float, b: float, dtype: torch.dtype) -> Node:
            like = build(aten.detach.default, like) if has_gradient(like) else like
            numbers = torch.ops.autopar.random.default
            return build(numbers, like, self.seed(), kind, float(a), float(b), self.site(), [], [], dtype)

        def call(target: Any, *args: Any, **kwargs: Any) -> Node:
            args = tuple(build(aten.detach.default, x) if isinstance(x, Node) and has_gradient(x) else x for x in args)
            return build(target, *args, **kwargs)

        try:
            made = recipe(arguments(node), DrawMaker(call, draw, lambda x: x.meta["val"]))
        except NoRecipe as error:
            _refuse(node, f": {error}")
        node.replace_all_uses_with(made)
        self.gm.graph.erase_node(node)


def _unseeded(known: dict[str, Any]) -> bool:
    return bool(known["dropout"]) and known["seed"] is None


def _replace_dropout(gm: GraphModule, node: Node, value: Node) -> None:
    firsts: Sequence[Node] = [node] if calls(node, aten.dropout.default) else list(node.users)
    for first in firsts:
        assert first is node or first.args[1] == 0 or not first.users, "normalize: the mask of a dropout is used"
        if first is node or (calls(first, operator.getitem) and first.args[1] == 0):
            first.replace_all_uses_with(value)
        gm.graph.erase_node(first)
    if firsts != [node]:
        gm.graph.erase_node(node)


def _refuse(node: Node, why: str) -> None:
    raise ValueError(
        f"normalize: random numbers must not depend on how the graph is sharded, found {describe(node)}{why}, whose "
        "way of drawing them is unknown; use torch.rand, torch.randn, bernoulli, dropout or the like, or draw outside "
        "of the model and pass them in"
    )
