"""Whether what a forward computes without the ids, such as positions and masks, is the same for every number of tokens.

    other_value(pairs, gm, shorter, "input_ids", buffers)     finds ``arange(n).flip(0)``, ``weight[-n:]``

It is computed for both lengths, with any numbers for the parameters: what it says of the first tokens must be equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autopar.ir.graph import arguments, outputs
from autopar.ir.meta import input_specs
from autopar.ops.traits import FILL_VALUES, is_random
from autopar.passes.canonicalize.constant_masks import LARGEST

aten = torch.ops.aten
_PARTS = (aten.slice.Tensor, aten.alias.default)
_KEEPS_SHIFTS = (  # a number that is added to a row of scores stays one
    aten.add.Tensor, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.where.ScalarOther,
    aten._to_copy.default, aten.alias.default, aten.slice.Tensor, aten.clone.default, aten.view.default,
    aten.expand.default, aten.unsqueeze.default,
)  # fmt: skip
_SOFTMAX = (aten.softmax.int, aten._softmax.default)
_SDPA = aten.scaled_dot_product_attention.default


def other_value(
    pairs: Sequence[tuple[Node, Node]],
    long: GraphModule,
    short: GraphModule,
    tokens: str,
    buffers: Mapping[str, Tensor],
) -> Node | None:
    """The first node of the long graph whose value depends on the number of tokens, and on no ids, and differs from the
    short graph's for the tokens of the latter. ``pairs``: the nodes that correspond; ``tokens``: the name of the ids;
    ``buffers``: values of buffers by name. What is too large is not computed."""
    ones, others = Values(long, tokens, buffers), Values(short, tokens, buffers)
    partner, changed = dict(pairs), set[Node]()
    ends = set(outputs(long))
    for a in long.graph.nodes:
        b = partner.get(a)
        if any(x in changed for x in a.all_input_nodes) or _other_sizes(a, b):
            changed.add(a)
        if b is None or (a.op == "call_function" and ones.known(a) and a not in ends):
            continue
        for x, y in zip(a.all_input_nodes, b.all_input_nodes):
            if x in changed and ones.known(x) and not same_for_tokens(a, x, ones.of(x), others.of(y)):
                return x
    return None


def _other_sizes(a: Node, b: Node | None) -> bool:
    if b is None or _numbers((a.args, a.kwargs)) != _numbers((b.args, b.kwargs)):
        return True
    x, y = a.meta.get("val"), b.meta.get("val")
    return isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape != y.shape


def _numbers(x: Any) -> list[Any]:
    if isinstance(x, Mapping):
        return _numbers(list(x.values()))
    if isinstance(x, (list, tuple)):
        return [number for item in x for number in _numbers(item)]
    return [x] if isinstance(x, (int, float)) else []


class Values:
    """The values of a graph's nodes that depend on no ids."""

    def __init__(self, gm: GraphModule, tokens: str, buffers: Mapping[str, Tensor]) -> None:
        self._specs, self._buffers = input_specs(gm), buffers
        self._constants: Mapping[str, Tensor] = gm.meta.get("constants", {})
        self._found: dict[Node, Any] = {}
        self._unknown = set[Node]()
        for node in gm.graph.nodes:
            if not self._can_compute(node, tokens):
                self._unknown.add(node)

    def known(self, node: Node) -> bool:
        return node not in self._unknown

    def of(self, node: Node) -> Any:
        """Its value; None if that is not known."""
        if node in self._unknown:
            return None
        if node not in self._found:
            self._found[node] = self._value(node)
        return self._found[node]

    def _can_compute(self, node: Node, tokens: str) -> bool:
        value = node.meta.get("val")
        if node.op == "placeholder":
            spec = self._specs[node.name]
            return spec.name != tokens and isinstance(value, Tensor)
        unknown = node.target not in FILL_VALUES and any(x in self._unknown for x in node.all_input_nodes)
        if node.op != "call_function" or is_random(node.target) or unknown:
            return False
        return node.target in _PARTS or not isinstance(value, Tensor) or value.numel() <= LARGEST

    def _value(self, node: Node) -> Any:
        if node.op == "placeholder":
            name = self._specs[node.name].name
            given = self._constants.get(name, self._buffers.get(name))
            return _numbers_like(name, node.meta["val"], given)
        operand = _like if node.target in FILL_VALUES else self.of
        args, kwargs = map_arg((node.args, node.kwargs), operand)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            with torch.no_grad():
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, IndexError, ValueError, TypeError):  # of numbers that are not the model's
            return None


def _like(x: Node) -> Any:
    """Any value of a node's shape and dtype."""
    value = x.meta["val"]
    return torch.zeros((), dtype=value.dtype).expand(value.shape)


def _numbers_like(name: str, like: Tensor, given: Tensor | None) -> Tensor | None:
    """A tensor's value, or else numbers that differ along all dims and depend on the name alone; along the first dim
    alone if they were too many."""
    if given is not None and not given.is_meta and given.shape == like.shape:
        return given.detach().to("cpu", like.dtype)
    if not like.dtype.is_floating_point:
        return None
    sizes = list(like.shape) if like.numel() <= LARGEST else [*like.shape[:1], *[1] * (like.dim() - 1)]
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.rand(sizes, generator=generator).to(like.dtype).expand(like.shape)


def same_for_tokens(user: Node, node: Node, x: Any, y: Any) -> bool:
    """Whether the short sequence's value is the beginning of the long one's, along all dims; or whether the scores to
    which it is added differ by a number per row, which a softmax does not see, as for an ALiBi that counts keys from
    the last one."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return True
    if x.dim() != y.dim() or x.dtype != y.dtype:
        return False
    common = tuple(slice(0, min(m, n)) for m, n in zip(x.shape, y.shape))
    x, y = x[common], y[common]
    if not (x.dtype.is_floating_point or x.is_complex()):
        return torch.equal(x, y)
    if torch.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True):
        return True
    finite = x.isfinite()
    if not x.dim() or x.shape[-1] < 2 or x.is_complex() or not torch.equal(finite, y.isfinite()):
        return False
    apart = torch.where(finite, x - y, float("nan"))
    by_row = torch.where(finite, apart - apart.nanmean(-1, keepdim=True), 0.0)
    return torch.allclose(by_row, torch.zeros_like(by_row), atol=1e-5) and _into_softmax(node, user)


def ends_in_softmax(node: Node) -> bool:
    """Whether a value leads to nothing but a softmax over its last dim, as a part of the scores."""
    return bool(node.users) and all(_into_softmax(node, user) for user in node.users)


def _into_softmax(node: Node, user: Node) -> bool:
    if user.target in _SOFTMAX:
        return user.args[1] in (-1, user.meta["val"].dim() - 1)
    if user.target is _SDPA:
        return arguments(user)["attn_mask"] is node
    return user.target in _KEEPS_SHIFTS and ends_in_softmax(user)
