"""Which fused kernels of attention a GPU has, and in which order they are tried: data, by compute capability.

    from          chips                         order
    sm_120        RTX 50, RTX PRO               flash_attn, cuda_flash, cudnn, cuda_efficient, triton_flash
    sm_110        Thor                          flash_attn, cuda_flash, cudnn, cuda_efficient, triton_flash
    sm_100        B200, B300                    cudnn, flash_attn, cuda_flash, cuda_efficient, triton_flash
    sm_90         H100, H200                    cudnn, flash_attn, cuda_flash, cuda_efficient, triton_flash
    sm_80         A100, A10, L4, RTX 30, 40     flash_attn, cuda_flash, cudnn, cuda_efficient, triton_flash
    sm_50         V100, T4, ...                 cuda_efficient

`make gpu-check` times the order on the chip of this machine.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

CUDNN_FIRST = ("cudnn", "flash_attn", "cuda_flash", "cuda_efficient", "triton_flash")
FLASH_FIRST = ("flash_attn", "cuda_flash", "cudnn", "cuda_efficient", "triton_flash")

# torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: `check_prefer_cudnn_attention` (cuDNN first where
# the major version is 9 or 10), and the hardware checks (flash and cuDNN from sm_80, memory-efficient from sm_50).
ORDERS: tuple[tuple[tuple[int, int], tuple[str, ...]], ...] = (
    ((11, 0), FLASH_FIRST),
    ((9, 0), CUDNN_FIRST),
    ((8, 0), FLASH_FIRST),
    ((5, 0), ("cuda_efficient",)),
)
ROCM = ("flash_attn", "cuda_flash", "cuda_efficient")  # AMD's capabilities are other numbers, MIOpen is not
# cuDNN, and the blocks of our own kernel need more shared memory than it has

# There flash attention differentiates no widths from 193 to 224: `mha_bwd` of flash_api.cpp, and
# `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`.
LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
# Up to this version, 9.15.0, cuDNN is wrong at lengths that are not multiples of 128, and torch does not prefer it.
CUDNN_ERRS = 91500


@dataclass(frozen=True)
class Chip:
    """capability: (major, minor). cudnn: its version as torch has it, 91501 for 9.15.1; 0 without it."""

    capability: tuple[int, int] = (8, 0)
    cudnn: int = 0
    rocm: bool = False

    @functools.cached_property
    def kernels(self) -> tuple[str, ...]:
        """Fused kernels, in the order in which they are tried; plain products are the fallback."""
        if self.rocm:
            return ROCM
        order = next((names for least, names in ORDERS if self.capability >= least), ())
        if order == CUDNN_FIRST and self.cudnn <= CUDNN_ERRS:
            order = FLASH_FIRST
        return tuple(name for name in order if name != "cudnn" or self.cudnn)

    @property
    def has_bfloat16(self) -> bool:
        """Whether torch's memory-efficient kernel supports bfloat16."""
        return self.rocm or self.capability >= (8, 0)

    def multiplies_float8(self, by_row: bool) -> bool:
        """Whether `torch._scaled_mm` runs, with a scale per tensor or per row. (MI300 has other formats of float8.)"""
        return not self.rocm and self.capability >= ((9, 0) if by_row else (8, 9))


MODERN = Chip((9, 0), 92000)  # a kernel that it lacks, all lack


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """The chip of a GPU. Any other device (tensors without data in tests) counts as one with all kernels."""
    if device.type != "cuda":
        return Chip((9, 0), 99999)
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return Chip(torch.cuda.get_device_capability(device), cudnn or 0, torch.version.hip is not None)
