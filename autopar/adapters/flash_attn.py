"""The flash-attn package (2.7 or later), which computes on tensors [B, S, H, D] and is imported when first used.

https://github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor


@functools.cache
def installed() -> bool:
    """Whether the package is installed and works. It is imported to find out, since other packages share its name, and
    builds for another torch do not load. Warns once if it does not work."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    try:
        version = str(importlib.import_module("flash_attn").__version__)
        _interface()
        right = (2, 7) <= tuple(int(number) for number in version.split(".")[:2]) < (3,)
        why = "" if right else f"found version {version}, needs 2.7 or later, but not 3"
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if why:
        warnings.warn(f"attention: the package flash_attn is installed, but cannot be used ({why})", stacklevel=2)
    return not why


@functools.cache
def _interface() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def window_sizes(causal: bool, window: int) -> dict[str, int]:
    """Window to the left and to the right of the diagonal; -1: unlimited."""
    reach = window - 1 if window else -1
    return {"window_size_left": reach, "window_size_right": 0 if causal else reach}


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, longest: int, scale: float, causal: bool, window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [B, Sq, Hq, D], k and v [B, Sk, Hk, D] -> out like q, lse [B, Hq, Sq].

    starts [documents + 1]: of documents in q [T, Hq, D], k and v [T, Hk, D] -> out like q, lse [Hq, T]."""
    known = {
        "dropout_p": 0.0, "softmax_scale": scale, "causal": causal, **window_sizes(causal, window), "softcap": softcap,
        "alibi_slopes": None, "return_softmax": False,
    }  # fmt: skip
    if starts is None:
        out, lse, *_ = _interface()._flash_attn_forward(q, k, v, **known)
    else:
        out, lse, *_ = _interface()._flash_attn_varlen_forward(q, k, v, starts, starts, longest, longest, **known)
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor | None, longest: int,
    scale: float, causal: bool, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v in their shapes, which are as in `flash_forward`."""
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    known = {
        "dropout_p": 0.0, "softmax_scale": scale, "causal": causal, **window_sizes(causal, window), "softcap": softcap,
        "alibi_slopes": None, "deterministic": torch.are_deterministic_algorithms_enabled(),
    }  # fmt: skip
    operands = (grad, q, k, v, out, lse, *grads)
    if starts is None:
        _interface()._flash_attn_backward(*operands, **known)
    else:
        _interface()._flash_attn_varlen_backward(*operands, starts, starts, longest, longest, **known)
    return grads[0], grads[1], grads[2]
