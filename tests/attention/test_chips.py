"""Which kernel of attention a chip takes: its order, what falls to which, and what is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.ops import kernels
from autopar.ops.kernels import KERNELS, expected_kernel
from autopar.ops.kernels.chips import ORDERS, Chip, chip_of
from tests.support.kernel_cases import CUDA, SIZES, facts, tensors

A10G, A100, H100 = Chip((8, 6), 92000), Chip((8, 0), 92000), Chip((9, 0), 92000)
HALF = torch.bfloat16


def taken(chip: Chip, without: tuple[str, ...] = (), dtype: torch.dtype = HALF, **known: Any) -> str:
    """The kernel that a chip is expected to take."""
    sizes = {name: known.pop(name) for name in SIZES if name in known}
    q, k, v, _ = tensors(dtype=dtype, device="meta", **sizes)
    return expected_kernel(chip, q, k, v, facts(**known), without)


def test_order_of_chips() -> None:
    """What comes first, with and without the package; what torch takes first is its own sdp_utils.cpp."""
    package = ("flash_attn",)
    first = {chip: (taken(chip, causal=True), taken(chip, package, causal=True)) for chip in (A10G, A100, H100)}
    assert first[A10G] == first[A100] == ("flash_attn", "cuda_flash") and first[H100] == ("cudnn", "cudnn")
    assert taken(Chip((9, 0)), package, causal=True) == "cuda_flash", "without cuDNN"
    assert "cudnn" not in Chip((9, 0)).kernels and Chip((9, 0), 91500).kernels == A100.kernels, "an old cuDNN"
    assert [taken(Chip(c, 92000), package) for c in ((10, 0), (10, 3), (11, 0), (12, 0), (12, 1))] == [
        "cudnn", "cudnn", "cuda_flash", "cuda_flash", "cuda_flash",
    ]  # fmt: skip
    volta = Chip((7, 0), 92000)
    assert taken(volta, dtype=torch.float16) == "cuda_efficient" and taken(volta) == "math", "no bfloat16"
    assert taken(Chip((3, 7)), dtype=torch.float16) == "math"
    assert taken(Chip((9, 4), 30000, rocm=True)) == "flash_attn" and "cudnn" not in Chip((9, 4), 3, rocm=True).kernels
    assert [least for least, _ in ORDERS] == sorted((least for least, _ in ORDERS), reverse=True)
    assert {name for _, names in ORDERS for name in names} == {*CUDA, "triton_flash"}


def test_what_falls_to_which() -> None:
    assert taken(H100, causal=True, window=3) == "flash_attn" == taken(H100, softcap=30.0, causal=True)
    assert taken(H100, ("flash_attn",), causal=True, window=3) == "cuda_flash"
    assert taken(H100, ("flash_attn",), causal=True, chunk=3) == "cuda_efficient"
    assert taken(H100, ("flash_attn",), softcap=30.0) == "triton_flash" == taken(A100, softcap=3.0, dtype=torch.float32)
    assert taken(H100, softcap=30.0, width=264) == "math" == taken(H100, dropout=0.1)
    assert taken(H100, softcap=30.0, bias=torch.empty(16, 16, device="meta")) == "math"
    assert (
        taken(H100, softcap=30.0, chunk=4) == "triton_flash" and taken(H100, softcap=3.0, chunk=4, offset=-1) == "math"
    )
    assert taken(Chip((7, 5), 92000), softcap=30.0, dtype=torch.float16) == "math"
    assert taken(H100, dtype=torch.float32) == "cuda_efficient" and taken(H100, dtype=torch.float64) == "math"
    assert taken(H100, width=300) == "cuda_efficient" and taken(H100, width=160, causal=True) == "flash_attn"
    assert (
        taken(H100, width=192, value_width=128) == "cudnn" and taken(A100, width=192, value_width=128) == "flash_attn"
    )
    assert taken(Chip((9, 0), 91500), ("flash_attn",), causal=True) == "cuda_flash"


def test_the_order_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU the chip says it; what is registered comes behind."""
    monkeypatch.setattr(kernels, "chip_of", lambda device: A100)
    names = [kernel.name for kernel in kernels._in_order(torch.device("cuda", 0))]
    assert tuple(names[:5]) == A100.kernels and names[5:] == list(KERNELS)
    assert [kernel.name for kernel in kernels._in_order(torch.device("cpu"))] == list(KERNELS)
    for version, found in ((92000, 92000), (None, 0)):
        chip_of.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert chip_of(torch.device("cuda", 0)) == Chip((8, 9), found)
    chip_of.cache_clear()
