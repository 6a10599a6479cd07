"""Blocks of masks: what they prove is what the whole mask says, for sizes that do not divide."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from autopar.capture.front_end import capture
from autopar.ir.graph import outputs
from autopar.passes.canonicalize.constant_masks import LEAST
from autopar.passes.canonicalize.mask_blocks import hides_later_in_blocks, triangle_in_blocks

INF = float("inf")


def arange(n: int) -> tuple[Tensor, Tensor]:
    i = torch.arange(n)
    return i[:, None], i[None]


def lower(n: int) -> Tensor:
    i, j = arange(n)
    return j <= i


MASKS: dict[str, Callable[[int], Tensor]] = {
    "compared": lower,
    "strictly": lambda n: arange(n)[1] < arange(n)[0],
    "tril": lambda n: torch.ones(n, n).tril() == 1,
    "tril of bool": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "triu turned": lambda n: ~torch.ones(n, n, dtype=torch.bool).triu(1),
    "next": lambda n: torch.ones(n, n, dtype=torch.bool).tril(1),
    "window": lambda n: lower(n) & (arange(n)[0] - arange(n)[1] < 700),
    "two": lambda n: lower(n) | (arange(n)[1] == 3),
    "hole": lambda n: lower(n) & ~((arange(n)[0] == n - 1) & (arange(n)[1] == 5)),
    "transposed": lambda n: (arange(n)[0] <= arange(n)[1]).t(),
    "least": lambda n: torch.full((n, n), -1e9).triu(1),
    "filled": lambda n: torch.zeros(n, n).masked_fill(~lower(n), -INF),
    "where": lambda n: torch.where(lower(n), 0.0, -1e9)[None, None].expand(1, 2, n, n),
    "product": lambda n: (1.0 - lower(n).double()) * -1e9,
    "alibi": lambda n: torch.where(lower(n), (arange(n)[1] - arange(n)[0]) * 0.1, -INF),
    "moderate": lambda n: torch.where(lower(n), 0.0, -100.0),
    "sliced": lambda n: torch.ones(n + 7, n + 9).tril()[:n, :n] == 1,
    "moved": lambda n: torch.ones(n + 7, n + 9).tril()[1 : n + 1, :n] == 1,
    "own hidden": lambda n: torch.where(arange(n)[1] < arange(n)[0], 0.0, -INF),
}


class Makes(nn.Module):
    def __init__(self, make: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return self.make(x.shape[1])


def mask_of(make: Callable[[int], Tensor], n: int) -> tuple[GraphModule, Node]:
    """A graph, which must be kept, and its output."""
    gm = capture(Makes(make), {"x": torch.zeros(1, n, device="meta")}, train=False, grad_mode="no_grad")
    (mask,) = outputs(gm)
    return gm, mask


def small(node: Node) -> Any:
    """The value of a node with few entries."""
    if node.meta["val"].numel() > 2**18 or node.op != "call_function":
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), small)
    return node.target(*args, **kwargs)  # type: ignore[operator]


@pytest.mark.parametrize("n", [1500, 1025])
@pytest.mark.parametrize("name", MASKS)
def test_equals_the_whole(name: str, n: int) -> None:
    value, (_, mask) = MASKS[name](n), mask_of(MASKS[name], n)
    expected = torch.ones(n, n, dtype=torch.bool).tril()
    if value.dtype == torch.bool:
        assert (triangle_in_blocks(mask, LEAST, small) == -INF) == bool((value == expected).all())
        _, turned = mask_of(lambda n: ~MASKS[name](n), n)
        assert (triangle_in_blocks(turned, LEAST, small, keep=False) == -INF) == bool((value == expected).all())
        return
    above = value[..., ~expected]
    is_triangle = bool((value[..., expected] == 0).all() and (above <= LEAST).all())
    assert triangle_in_blocks(mask, LEAST, small) == (float(above.max()) if is_triangle else None)
    own = value.diagonal(dim1=-2, dim2=-1)
    hides = bool((above <= LEAST).all() and (own > LEAST / 2).all())
    assert hides_later_in_blocks(mask, LEAST, small) == hides


def test_long_masks_take_no_time() -> None:
    start, (gm, mask) = time.process_time(), mask_of(lambda n: ~torch.ones(n, n, dtype=torch.bool).triu(1), 2**17)
    assert len(gm.graph.nodes) and triangle_in_blocks(mask, LEAST, small) == -INF
    assert time.process_time() - start < 20
