"""Masks that depend on no input: the triangle j <= i becomes the flag *causal* instead of a tensor.

    le(unsqueeze(arange(8), 0), unsqueeze(arange(8), 1))      tril(ones(8, 8)) == 1
    where(le(..), 0.0, -inf)                                  masked_fill(zeros(8, 8), triu(ones(8, 8), 1), least)

They are evaluated once, during normalization: a graph has static shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from autopar.ir.graph import has_gradient, reach
from autopar.ir.meta import remembered
from autopar.ops.traits import is_random
from autopar.passes.canonicalize.mask_blocks import triangle_in_blocks
from autopar.rewrite.build import shape_of, value_of

LARGEST = 2**24  # entries of a mask: of larger ones, blocks are evaluated
_PRODUCTS = (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)
LEAST = torch.finfo(torch.float16).min / 2  # a bias below this gives probability 0


def triangle(mask: Node) -> float | None:
    """For a mask [.., n, m], bool (True = attend) or additive, that says j <= i and nothing else for all inputs: the
    largest number that it adds above the diagonal (-inf if it is bool). None for any other mask."""
    return remembered(mask, "triangle", _triangle)


def _triangle(mask: Node) -> float | None:
    shape = shape_of(mask)
    if len(shape) < 2 or min(shape[-2:]) < 2:
        return None
    if value_of(mask).numel() > LARGEST:
        return triangle_in_blocks(mask, LEAST, constant)
    found = constant(mask)
    if found is None:
        return None
    lower = torch.ones(shape[-2:], dtype=torch.bool).tril()
    if found.dtype == torch.bool:
        return float("-inf") if (found == lower).all() else None
    above = float(found.masked_fill(lower, float("-inf")).max())
    return above if above <= LEAST and (found.masked_fill(~lower, 0.0) == 0).all() else None


def filled_triangle(mask: Node) -> bool:
    """Whether a bool mask [.., n, m] says j > i and nothing else."""
    shape = shape_of(mask)
    if len(shape) < 2 or min(shape[-2:]) < 2:
        return False
    if value_of(mask).numel() > LARGEST:
        return triangle_in_blocks(mask, LEAST, constant, keep=False) is not None
    found = constant(mask)
    return found is not None and bool((found == torch.ones_like(found).triu(1)).all())


def may_hide(bias: Node) -> bool:
    """Whether a bias that is no constant may be a mask. Products, learned values and what is computed from them without
    conditions are assumed to be far above `LEAST`, as scores are."""
    for node in reach([bias], lambda node: () if node.target in _PRODUCTS else node.all_input_nodes):
        if node.target in _PRODUCTS or not isinstance(value := node.meta.get("val"), Tensor):
            continue
        if node.op == "placeholder":
            learned = node.meta.get("moderate", False) or (node.meta.get("kind") == "parameter" and has_gradient(node))
            if not learned and (value.is_floating_point() or value.dtype == torch.bool):
                return True
        elif value.dtype == torch.bool or any(x <= LEAST for x in _numbers(node)):
            found = constant(node)
            if found is None or not bool((found > LEAST / 2).all()):
                return True
    return False


def _numbers(node: Node) -> list[float]:
    return [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, (int, float))]


def constant(mask: Node) -> Tensor | None:
    """The value of a node that depends on no input; None for other nodes and for large values."""
    nodes = _behind(mask)
    if nodes is None:
        return None
    values: dict[Node, Any] = {}
    for node in nodes:
        if node.op == "placeholder":
            values[node] = node.meta["value"]
            continue
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    found = values[mask]
    return found if isinstance(found, Tensor) else None


def _behind(mask: Node) -> list[Node] | None:
    """All ancestors of the mask in order; None if one is an input, random, or large."""
    found: list[Node] = []
    for node in reach([mask]):
        value = node.meta.get("val")
        results = value if isinstance(value, (list, tuple)) else [value]
        small = all(isinstance(x, Tensor) and x.numel() <= LARGEST for x in results)
        if node.op == "placeholder" and "value" in node.meta:
            found.append(node)
            continue
        if node.op != "call_function" or not small or is_random(node.target):
            return None
        found.append(node)
    return sorted(found)
