"""Whether a forward computes the same for every number of tokens, as requests of any length need.

    check_any_length(gm, shorter, 4096, 3, "input_ids", buffers)      ValueError for ``h * ids.shape[1]``

The graphs of two lengths must be equal but for sizes. What sizes do to tokens, types prove (`place_token_slices`); what
they do to values that depend on no tokens is computed (`length_values`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar.adapters.operators import OpOverload, name_of
from autopar.compile.length_values import other_value
from autopar.ir.graph import describe
from autopar.ir.meta import input_specs

_WAY_OUT = "so short requests would not get what it gives them; generate with the model itself"
_NUMBERS = ("Tensor", "number", "Scalar", "float")  # types of arguments that values are computed with
_POSITIONS = ("arange",)
_PARTS = ("alias", "slice")  # the whole of a buffer or a part of it


def short_of(total: int) -> int:
    """A small number of tokens for the second graph, even where ``total`` is odd."""
    return 3 if total % 2 == 0 else 4


def check_any_length(
    gm: GraphModule, shorter: GraphModule, total: int, short: int, tokens: str, buffers: Mapping[str, Tensor]
) -> None:
    """Raises ValueError, with the operator, if the graphs of these numbers of tokens differ in more than sizes.
    ``tokens``: the name of the ids; ``buffers``: values of buffers by name."""
    same: dict[Node, Node] = {}
    named = [{node: spec.name for node, spec in input_specs(g).items()} for g in (gm, shorter)]
    for a, b in itertools.zip_longest(_nodes(gm), _nodes(shorter)):
        other = a is None or b is None or not _alike(a, b, same)
        if other or (a.op == "placeholder" and named[0][a.name] != named[1][b.name]):
            raise ValueError(
                f"serve: the forward runs other operators for {short} tokens than for {total}, from "
                f"{describe(a or b)} on, {_WAY_OUT}"
            )
        same[a] = b
        for x, y in numbers(a, b):
            if x != y:
                raise ValueError(
                    f"serve: {describe(a)} computes with {x} for {total} tokens and with {y} for {short}, {_WAY_OUT}"
                )

    for name, x in gm.meta.get("constants", {}).items():
        if not _begins_alike(x, shorter.meta["constants"].get(name)):
            raise ValueError(f"serve: {name} has other values for {short} tokens than for {total}, {_WAY_OUT}")
    if (found := other_value(list(same.items()), gm, shorter, tokens, buffers)) is not None:
        raise ValueError(
            f"serve: {describe(found)} has other values for the first {short} tokens of {total} than for {short} "
            f"tokens alone, {_WAY_OUT}"
        )


def _begins_alike(x: Tensor, y: Tensor | None) -> bool:
    """Whether constants are equal as far as both go."""
    if y is None or x.dim() != y.dim():
        return False
    common = tuple(slice(0, min(m, n)) for m, n in zip(x.shape, y.shape))
    return x.is_meta or y.is_meta or torch.equal(x[common], y[common])


def _nodes(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if not _is(node, _PARTS)]


def _alike(a: Node, b: Node, same: dict[Node, Node]) -> bool:
    operands = [[_source(x) for x in node.all_input_nodes] for node in (a, b)]
    return (
        a.op == b.op
        and (a.target == b.target or a.op == "placeholder")
        and [same[x] for x in operands[0]] == operands[1]
    )


def _source(x: Node) -> Node:
    """What a value is a part of."""
    while _is(x, _PARTS):
        x = x.all_input_nodes[0]
    return x


def _is(node: Node, names: tuple[str, ...]) -> bool:
    return isinstance(node.target, OpOverload) and name_of(node.target).partition("::")[2] in names


def numbers(a: Node, b: Node) -> Iterator[tuple[Any, Any]]:
    """The numbers of two calls that values are computed with."""
    if isinstance(a.target, OpOverload) and not _is(a, _POSITIONS):
        for i, argument in enumerate(a.target._schema.arguments):
            if any(word in str(argument.type) for word in _NUMBERS) or argument.name == "diagonal":
                x, y = (n.args[i] if i < len(n.args) else n.kwargs.get(argument.name) for n in (a, b))
                if isinstance(x, (int, float, complex)) or isinstance(y, (int, float, complex)):
                    yield x, y
