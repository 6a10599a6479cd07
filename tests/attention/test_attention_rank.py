"""Attention with other leading dims than batch and heads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.canonicalize.test_normalize import normalized, rand

MASKS_OF_FIVE = {
    "none": None,
    "windows": (3, 1, 6, 6),
    "heads": (2, 6, 6),
    "keys": (4, 1, 1, 1, 6),
    "all": (4, 3, 2, 6, 6),
}


@pytest.mark.parametrize("mask", MASKS_OF_FIVE)
def test_attention_of_rank_five(mask: str) -> None:
    inputs = {n: rand(4, 3, 2, 6, 8, seed=i, grad=True) for i, n in enumerate("qkv")}
    shape = MASKS_OF_FIVE[mask]
    inputs |= {"mask": rand(*shape, seed=4)} if shape else {}
    gm = normalized(lambda q, k, v, mask=None: F.scaled_dot_product_attention(q, k, v, mask), inputs)
    (found,) = [n for n in gm.graph.nodes if n.target is torch.ops.autopar.attention.default]
    assert found.args[0].meta["val"].shape == (12, 2, 6, 8)


def test_attention_over_broadcast_leading_dims() -> None:
    inputs = {"q": rand(4, 3, 2, 6, 8), "k": rand(1, 3, 2, 6, 8), "v": rand(4, 3, 2, 6, 8)}
    with pytest.raises(ValueError, match=r"needs equal leading dims of q, k and v, found .*\[1, 3, 2, 6, 8\].* expand"):
        normalized(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), inputs)
