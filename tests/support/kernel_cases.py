"""Cases of the kernels behind `autopar::attention`, and the comparison with plain products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ops import kernels
from autopar.ops.kernels import KERNELS
from autopar.ops.mask_spec import MaskSpec

B, HQ, HK, S, D = 2, 4, 2, 22, 8
CUDA = ("flash_attn", "cudnn", "cuda_flash", "cuda_efficient")


def facts(**changes: Any) -> MaskSpec:
    """None but these."""
    known: dict[str, Any] = {
        "bias": None, "key_mask": None, "segments": None, "sinks": None, "seed": None, "causal": False, "window": 0,
        "chunk": 0, "offset": 0, "scale": 0.35, "softcap": 0.0, "dropout": 0.0, "site": 0, "index": [], "shape": [],
    }  # fmt: skip
    return MaskSpec(**{**known, **changes})


def tensors(
    keys: int = S,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    width: int = D,
    value_width: int = 0,
    key_heads: int = HK,
) -> list[Tensor]:
    """q, k, v, grad."""
    torch.manual_seed(0)
    value = value_width or width
    shapes = (B, HQ, S, width), (B, key_heads, keys, width), (B, key_heads, keys, value), (B, HQ, S, value)
    return [torch.randn(shape, dtype=dtype).to(device) for shape in shapes]


def some_mask() -> Tensor:
    """With a row that leaves no key."""
    mask = torch.rand(B, 1, S, S) < 0.5
    mask[0, :, 3] = False
    return mask


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"causal": True},
    "window": lambda: {"causal": True, "window": 5},
    "two-sided window": lambda: {"window": 3},
    "chunk": lambda: {"chunk": 4},
    "softcap": lambda: {"softcap": 2.0, "causal": True},
    "bias": lambda: {"bias": torch.randn(1, HQ, S, S, dtype=torch.float64)},
    "key bias": lambda: {"bias": torch.randn(S, dtype=torch.float64), "causal": True},
    "padding": lambda: {"key_mask": torch.rand(B, S) < 0.5},
    "documents": lambda: {"segments": torch.arange(S).expand(B, S) // 5, "causal": True},
    "mask": lambda: {"mask": some_mask()},
    "sinks": lambda: {"sinks": torch.randn(HQ, dtype=torch.float64), "causal": True},
    "dropout": lambda: {"dropout": 0.3, "seed": torch.tensor(5)},
    "more keys": lambda: {"causal": True, "keys": S + 9},
    "later queries": lambda: {"offset": 9, "causal": True, "keys": S + 9},
    "queries before keys": lambda: {"offset": -9, "causal": True, "keys": S - 9},
    "odd width": lambda: {"causal": True, "width": 6},
    "narrower values": lambda: {"causal": True, "width": 12, "value_width": 5},
    "wider values": lambda: {"width": 7, "value_width": 20, "key_mask": torch.rand(B, S) < 0.5},
    "softcap of an odd width": lambda: {"softcap": 2.0, "causal": True, "width": 11, "value_width": 3},
    "one key head": lambda: {"causal": True, "key_heads": 1, "width": 10},
    "one key": lambda: {"keys": 1},
    "wide": lambda: {"width": 264, "causal": True},
    "192 with 128": lambda: {"width": 192, "value_width": 128, "causal": True},
    "between 192 and 224": lambda: {"width": 203, "causal": True},
}
SIZES = ("keys", "width", "value_width", "key_heads")


def case_of(case: str) -> tuple[list[Tensor], MaskSpec]:
    """Tensors and facts."""
    torch.manual_seed(1)
    made = CASES[case]()
    sizes = {name: made.pop(name) for name in SIZES if name in made}
    return tensors(**sizes), facts(**made)


def both_ways(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, known: MaskSpec) -> list[Tensor]:
    """out, lse and gradients."""
    out, lse = kernels.forward(q, k, v, known)
    results = [out, lse, *kernels.backward(grad, q, k, v, out, lse, known, False)[:3]]
    return [x for x in results if x is not None]


def compare(name: str, case: str) -> bool:
    """Whether a kernel computes a case; if so, it must equal the plain products."""
    (q, k, v, grad), known = case_of(case)
    with kernels.using("math"):
        expected = both_ways(q, k, v, grad, known)
    if not KERNELS[name].applies(q, k, v, known):
        with kernels.using(name), pytest.raises(ValueError, match=f"kernel '{name}' was asked for, but does not"):
            kernels.forward(q, k, v, known)
        return False
    with kernels.using(name):
        found = both_ways(q, k, v, grad, known)
    for left, right in zip(found, expected):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    return True
