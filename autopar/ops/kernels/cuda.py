"""Fused attention on CUDA: the flash-attn package, and torch's cuDNN, flash and memory-efficient operators.

    kernel           dtypes        mask                                          widths (others are padded)   GQA
    flash_attn       half          causal, window, softcap; last on last         x8, q = v, <= 256            native
    cudnn            half          causal of a square                            x8, <= 128; 192 with 128     native
    cuda_flash       half          causal, window; last on last                  x8, q = v, <= 256            native
    cuda_efficient   half, fp32    anything as an additive mask, its gradient    x8 half, x4 fp32             expanded

The first and the third also compute packed documents in one call, by their offsets ("varlen").

"Last on last": the kernel's triangle aligns the last query with the last key. Each docstring says what its
operator needs; which of them a chip has, and the order, is in `autopar.ops.kernels.chips`.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.adapters import flash_attn
from autopar.ops.kernels import by_document
from autopar.ops.kernels.chips import CUDNN_ERRS, LITTLE_SHARED_MEMORY, Chip, chip_of
from autopar.ops.kernels.kernel import (
    HALF,
    NEVER,
    Grads,
    Kernel,
    empty_rows,
    expand_heads,
    four_dims,
    has_size,
    sum_to,
    unexpand,
    wide,
)

if TYPE_CHECKING:
    from autopar.ops.mask_spec import MaskSpec

_aten = torch.ops.aten


def _on_cuda(q: Tensor) -> bool:
    return q.is_cuda  # tests on the CPU say that it is


def _up(width: int, unit: int) -> int:
    return -(-width // unit) * unit


class Fused(Kernel):
    """A GPU kernel. Subclasses say what they support, and compute it."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = HALF

    def applies(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> bool:
        return _on_cuda(q) and self.is_on() and self.takes(q, k, v, facts, chip_of(q.device))

    def is_on(self) -> bool:
        """Whether it is installed, and not turned off by the user."""
        return True

    def takes(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec, chip: Chip) -> bool:
        """Whether a chip can compute this with it, by shapes, dtypes and facts alone."""
        plain = self.name in chip.kernels and q.dtype in self.dtypes and not facts.dropout and has_size(q, k, v)
        return plain and self.widths(q, v, chip) is not None and self.masks(q, k, facts, chip)

    @abstractmethod
    def widths(self, q: Tensor, v: Tensor, chip: Chip) -> tuple[int, int] | None:
        """Widths of queries and of values, at least the given ones; None if there are none."""

    @abstractmethod
    def masks(self, q: Tensor, k: Tensor, facts: MaskSpec, chip: Chip) -> bool:
        """Whether it supports this mask at these lengths."""


class Padded(Fused):
    """Unsupported widths are padded with zeros, which change no score and no gradient: the scale is an argument, that
    of the true width."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
        width, value = self._widths(q, v)
        out, lse = self.run(_fit(q, width), _fit(k, width), _fit(v, value), facts)
        return out[..., : v.shape[-1]], lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec, bias: bool
    ) -> Grads:
        width, value = self._widths(q, v)
        grad, out = _fit(grad.to(q.dtype), value), _fit(out.to(q.dtype), value)
        *grads, to_bias = self.run_backward(grad, _fit(q, width), _fit(k, width), _fit(v, value), out, lse, facts, bias)
        to_q, to_k, to_v = (g[..., : x.shape[-1]] for g, x in zip(grads, (q, k, v)))
        return to_q, to_k, to_v, to_bias

    def _widths(self, q: Tensor, v: Tensor) -> tuple[int, int]:
        found = self.widths(q, v, chip_of(q.device))
        assert found is not None, f"attention: {self.name} was given widths {q.shape[-1]} and {v.shape[-1]}"
        return found

    @abstractmethod
    def run(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
        """`forward` at supported widths."""

    @abstractmethod
    def run_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec, bias: bool
    ) -> Grads:
        """`backward` at supported widths."""


def _fit(x: Tensor, width: int) -> Tensor:
    """Padded to a width, with rows at multiples of 16 bytes, as vector loads need them."""
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    unit = 16 // x.element_size() or 1
    places = (x.storage_offset(), *(s for s, n in zip(x.stride()[:-1], x.shape) if n > 1))
    return x if all(place % unit == 0 for place in places) else x.contiguous()


def _flash_widths(q: Tensor, v: Tensor, chip: Chip) -> tuple[int, int] | None:
    """One width for all, up to 256."""
    width = _up(max(q.shape[-1], v.shape[-1]), 8)
    if 192 < width <= 224 and not chip.rocm and chip.capability in LITTLE_SHARED_MEMORY:
        width = 232  # runs as 256
    return (width, width) if width <= 256 else None


def _flash_masks(q: Tensor, k: Tensor, facts: MaskSpec) -> bool:
    """Only the triangle and windows, aligned at the last query and the last key: so no row lacks keys."""
    last_on_last = facts.offset == k.shape[2] - q.shape[2] >= 0
    placed = last_on_last or not (facts.causal or facts.window)
    return placed and facts.by_position_alone and not facts.chunk


class Flash(Padded):
    """Flash attention, of tensors [B, S, H, D], or [T, H, D] with the documents of all examples one after the other."""

    def takes_documents(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> bool:
        alone = dataclasses.replace(facts, segments=None)
        return self.applies(q, k, v, alone) and by_document.offsets(q, k, facts) is not None

    def widths(self, q: Tensor, v: Tensor, chip: Chip) -> tuple[int, int] | None:
        return _flash_widths(q, v, chip)

    def masks(self, q: Tensor, k: Tensor, facts: MaskSpec, chip: Chip) -> bool:
        return _flash_masks(q, k, facts)

    def run(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
        found = by_document.offsets(q, k, facts)
        out, lse = self.attend(_tokens(q, found), _tokens(k, found), _tokens(v, found), facts, found)
        return _heads(out, q), lse if found is None else _by_example(lse, q)

    def run_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec, bias: bool
    ) -> Grads:
        found = by_document.offsets(q, k, facts)
        lse = (lse if found is None else lse.transpose(0, 1).flatten(1)).contiguous()
        of_q, of_k, of_v = (_tokens(x, found) for x in (q, k, v))
        grads = self.differentiate(_tokens(grad, found), of_q, of_k, of_v, _tokens(out, found), lse, facts, found)
        to_q, to_k, to_v = (_heads(g, x) for g, x in zip(grads, (q, k, v), strict=True))
        return to_q, to_k, to_v, None

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec, found: by_document.Offsets | None
    ) -> tuple[Tensor, Tensor]:
        """out like q, and lse [B, H, S], or [H, T] of documents."""

    @abstractmethod
    def differentiate(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec,
        found: by_document.Offsets | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of q, k and v in their shapes; lse is contiguous."""


def _tokens(x: Tensor, found: by_document.Offsets | None) -> Tensor:
    """[B, H, S, D] -> [B, S, H, D], or [B S, H, D] for documents."""
    turned = x.transpose(1, 2)
    return turned if found is None else turned.flatten(0, 1)


def _heads(x: Tensor, like: Tensor) -> Tensor:
    """The same, back to [B, H, S, D]."""
    return x.view(like.shape[0], like.shape[2], *x.shape[-2:]).transpose(1, 2)


def _by_example(lse: Tensor, like: Tensor) -> Tensor:
    """[H, B S] -> [B, H, S]"""
    return lse.unflatten(1, (like.shape[0], like.shape[2])).transpose(0, 1)


class FlashAttn(Flash):
    """The ``flash-attn`` package (extra ``flash``), if it is installed: tensors [B, S, H, D], softcap, and windows
    |i - j| < w as (w - 1, w - 1) around the diagonal that ends at the last key."""

    name = "flash_attn"

    def is_on(self) -> bool:
        return flash_attn.installed()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec, found: by_document.Offsets | None
    ) -> tuple[Tensor, Tensor]:
        return flash_attn.flash_forward(q, k, v, *_documents(found), **_mask(facts))

    def differentiate(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec,
        found: by_document.Offsets | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return flash_attn.flash_backward(grad, q, k, v, out, lse, *_documents(found), **_mask(facts))


def _documents(found: by_document.Offsets | None) -> tuple[Tensor | None, int]:
    return (None, 0) if found is None else (found.starts, found.longest)


def _mask(facts: MaskSpec) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in ("scale", "causal", "window", "softcap")}


class Cudnn(Padded):
    """`_scaled_dot_product_cudnn_attention`: the causal flag needs equally many queries and keys, and more than one;
    lse is passed as [B, H, S, 1]. Its sums have no fixed order."""

    name = "cudnn"

    def is_on(self) -> bool:
        return torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()

    def widths(self, q: Tensor, v: Tensor, chip: Chip) -> tuple[int, int] | None:
        width, value = _up(q.shape[-1], 8), _up(v.shape[-1], 8)
        latent = (width, value) == (192, 128) and (9, 0) <= chip.capability < (11, 0) and chip.cudnn >= 91100
        return (width, value) if latent or max(width, value) <= 128 else None

    def masks(self, q: Tensor, k: Tensor, facts: MaskSpec, chip: Chip) -> bool:
        square = q.shape[2] == k.shape[2] and not facts.offset
        lengths = k.shape[2] > 1 and (chip.cudnn > CUDNN_ERRS or q.shape[2] % 128 == k.shape[2] % 128 == 0)
        return lengths and facts.only_causal and not facts.softcap and (square or not facts.causal)

    def run(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, facts.causal, False, scale=facts.scale
        )[:2]
        return out, lse.reshape(q.shape[:3])

    def run_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec, bias: bool
    ) -> Grads:
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        to_q, to_k, to_v = _aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1).contiguous(), seed, seed, None, None, None, q.shape[2], k.shape[2],
            0.0, facts.causal, scale=facts.scale,
        )  # fmt: skip
        return to_q, to_k, to_v, None


class CudaFlash(Flash):
    """`_flash_attention_forward`, torch's copy of the package without its softcap: the same layout and windows."""

    name = "cuda_flash"

    def is_on(self) -> bool:
        return torch.backends.cuda.flash_sdp_enabled()

    def masks(self, q: Tensor, k: Tensor, facts: MaskSpec, chip: Chip) -> bool:
        return super().masks(q, k, facts, chip) and not facts.softcap

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec, found: by_document.Offsets | None
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, *_both_sides(q, k, found), 0.0, facts.causal, False, scale=facts.scale,
            **flash_attn.window_sizes(facts.causal, facts.window),
        )  # fmt: skip
        return out, lse

    def differentiate(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec,
        found: by_document.Offsets | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        no_rng = torch.empty(2, dtype=torch.uint64, device=q.device)
        grads: tuple[Tensor, Tensor, Tensor] = _aten._flash_attention_backward(
            grad, q, k, v, out, lse, *_both_sides(q, k, found), 0.0, facts.causal, no_rng, no_rng.new_empty(()),
            scale=facts.scale, **flash_attn.window_sizes(facts.causal, facts.window),
        )  # fmt: skip
        return grads


def _both_sides(
    q: Tensor, k: Tensor, found: by_document.Offsets | None
) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Offsets of queries and of keys, and the lengths of the longest ones."""
    if found is None:
        return None, None, q.shape[1], k.shape[1]
    return found.starts, found.starts, found.longest, found.longest


class CudaEfficient(Padded):
    """`_scaled_dot_product_efficient_attention`: its causal triangle begins at the first key. It needs a key head for
    each query head. An additive mask has q's dtype and all four dims, and a row stride that is a multiple of 16
    entries. lse is padded to the next multiple of 32 with inf, which makes the padded rows zero in the backward. The
    gradient of a mask has all four dims, too."""

    name = "cuda_efficient"
    bias_gradient = True
    dtypes = (*HALF, torch.float32)

    def is_on(self) -> bool:
        return torch.backends.cuda.mem_efficient_sdp_enabled()

    def widths(self, q: Tensor, v: Tensor, chip: Chip) -> tuple[int, int] | None:
        if q.dtype == torch.bfloat16 and not chip.has_bfloat16:
            return None
        if chip.rocm:
            return _flash_widths(q, v, chip)
        unit = 8 if q.dtype in HALF else 4
        return _up(q.shape[-1], unit), _up(v.shape[-1], unit)

    def masks(self, q: Tensor, k: Tensor, facts: MaskSpec, chip: Chip) -> bool:
        return not facts.softcap

    def run(self, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
        mask, causal = _aligned_mask(q, k, facts)
        k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
        out, lse = _aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, True, 0.0, causal, scale=facts.scale
        )[:2]  # fmt: skip
        lse = lse[..., : q.shape[2]]
        if mask is None:
            return out, lse
        empty = empty_rows(mask, lse)
        return out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, NEVER)

    def run_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec, bias: bool
    ) -> Grads:
        heads = k.shape[1]
        mask, causal = _aligned_mask(q, k, facts)
        k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
        out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the operator ignores the stride of its rows
        lse = lse.masked_fill(lse == NEVER, float("inf"))  # exp(-inf - inf) = 0 in rows where nothing is allowed
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        to_q, to_k, to_v, to_mask = _aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, mask, out, lse, seed, seed, 0.0, [True, True, True, bias], causal, scale=facts.scale
        )
        to_bias = sum_to(to_mask.to(wide(q.dtype)), facts.bias) if bias and facts.bias is not None else None
        return to_q, unexpand(to_k, heads), unexpand(to_v, heads), to_bias


def _aligned_mask(q: Tensor, k: Tensor, facts: MaskSpec) -> tuple[Tensor | None, bool]:
    """(additive mask [B, Hq, Sq, Sk] whose rows begin at multiples of 16 entries or None, the causal flag)."""
    if facts.only_causal and not (facts.causal and facts.offset):
        return None, facts.causal
    mask = four_dims(facts.additive_mask(q, k.shape[2]))
    keys = k.shape[2]
    mask = mask.expand(*mask.shape[:3], keys)
    mask = F.pad(mask, (0, -keys % 16))[..., :keys] if keys % 16 else mask.contiguous()
    return mask.expand(*q.shape[:3], keys), False
