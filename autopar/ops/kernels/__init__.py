"""Kernels of `autopar::attention`: a table from name to kernel; the first that applies is used.

    flash_attn, cudnn, cuda_flash, cuda_efficient    fused, on CUDA; in the order of the chip (`chips`)
    triton_flash                                     ours, on CUDA: for what those do not support
    cpu_flash                                        fused, on CPUs
    math                                             plain matrix products: everything

Packed documents are one call of a kernel that takes their offsets, or else separate calls (`by_document`), so that no
kernel computes pairs of different ones.

Sinks are merged afterwards, as one further partial result with value zero and log-sum-exp = sink:
out' = out * exp(lse - lse'), lse' = log(exp(lse) + exp(sink)). The backward needs only out' and lse'.

    with kernels.using("math"): ...      # tests and benchmarks: this one, or an error
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autopar.ops.kernels import by_document
from autopar.ops.kernels.chips import Chip, chip_of
from autopar.ops.kernels.cuda import CudaEfficient, CudaFlash, Cudnn, FlashAttn, Fused
from autopar.ops.kernels.kernel import HUGE, NEVER, Grads, Kernel, note_blocked_rows, sum_to, wide
from autopar.ops.kernels.plain import CpuFlash, Math, Meta
from autopar.ops.kernels.triton_flash import TritonFlash
from autopar.registry import Registry

if TYPE_CHECKING:
    from autopar.ops.mask_spec import MaskSpec

__all__ = [
    "KERNELS", "Kernel", "backward", "choose_kernel", "expected_kernel", "forward", "note_blocked_rows", "sum_to",
    "using", "with_sinks", "wide",
]  # fmt: skip

KERNELS: Registry[Kernel] = Registry("attention kernel")  # in the order of preference, those of a chip aside
for _kernel in (Meta(), FlashAttn(), Cudnn(), CudaFlash(), CudaEfficient(), TritonFlash(), CpuFlash(), Math()):
    KERNELS.add(_kernel.name, _kernel)

_forced: list[Kernel] = []  # not a context variable: backwards run on autograd's threads


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Within: only this kernel. Raises ValueError for an unknown name, and where it does not apply."""
    _forced.append(KERNELS[name])
    try:
        yield
    finally:
        _forced.pop()


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec, bias_gradient: bool = False) -> Kernel:
    """The kernel for these tensors and facts; with ``bias_gradient`` one that differentiates the bias."""
    if facts.lift is not None:
        return KERNELS["math"]
    for kernel in _forced[-1:] or _in_order(q.device):
        if (kernel.bias_gradient or not bias_gradient) and kernel.applies(q, k, v, facts):
            return kernel
    raise ValueError(
        f"attention: kernel {_forced[-1].name!r} was asked for, but does not support q {list(q.shape)} and k "
        f"{list(k.shape)} of {q.dtype} on {q.device.type} with these masks"
        f"{' and a gradient of the bias' if bias_gradient else ''}; leave the choice open or use 'math'"
    )


def _of_documents(q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> Kernel | None:
    """The first kernel that computes all packed documents in one call, if there are any."""
    if facts.segments is None or facts.lift is not None:
        return None
    return next((x for x in _forced[-1:] or _in_order(q.device) if x.takes_documents(q, k, v, facts)), None)


def _in_order(device: torch.device) -> Iterator[Kernel]:
    """The kernels, on a GPU in the order of its chip."""
    if device.type == "cuda":
        yield from (KERNELS[name] for name in chip_of(device).kernels)
    yield from (kernel for _, kernel in KERNELS.items())


def expected_kernel(chip: Chip, q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec, without: tuple[str, ...] = ()) -> str:
    """The name of the kernel that a GPU with this chip will use, by shapes, dtypes and facts: tensors need no data.
    ``without``: kernels that are not installed, or off."""
    for name in chip.kernels:
        kernel = KERNELS[name]
        if name not in without and isinstance(kernel, Fused) and kernel.takes(q, k, v, facts, chip):
            return name
    return "math"


def forward(q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq, Dv] in q's dtype or a wider one, and lse [B, Hq, Sq], sinks included."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    if kernel := _of_documents(q, k, v, facts):
        return with_sinks(*kernel.forward(q, k, v, facts), facts.sinks)
    if parts := by_document.parts(q, k, facts):
        out, lse = by_document.forward(q, k, v, parts, _forward)
        return with_sinks(out, lse, facts.sinks)
    return with_sinks(*_forward(q, k, v, facts), facts.sinks)


def _forward(q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
    return choose_kernel(q, k, v, facts).forward(q, k, v, facts)


def _is_blocked(lse: Tensor, facts: MaskSpec) -> bool:
    """Whether a bias blocks every key of a row by a large finite number: only `Math` can recompute the probabilities.
    Accelerators are not asked: that would synchronize."""
    if facts.bias is None or lse.device.type != "cpu":
        return False
    return bool(((lse <= HUGE) & (lse > NEVER)).any())


def _rows(x: Tensor) -> Tensor:
    """With contiguous rows: fused kernels assume stride 1 of the last dim."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """A result over all columns, merged with the sinks [Hq] as one more column with value zero."""
    if sinks is None:
        return out, lse
    merged = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * torch.exp(lse - merged).unsqueeze(-1).to(out.dtype), merged


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec, bias_gradient: bool
) -> Grads:
    """Gradients of q, k, v and, if wanted, of the bias, in the kernel's dtypes."""
    grad, q, k, v, out = _rows(grad), _rows(q), _rows(k), _rows(v), _rows(out)
    kernel = None if bias_gradient else _of_documents(q, k, v, facts)
    if kernel is not None:
        return kernel.backward(grad, q, k, v, out, lse, facts, bias_gradient)
    if parts := by_document.parts(q, k, facts):
        return by_document.backward(grad, q, k, v, out, lse, facts, bias_gradient, parts, _backward)
    return _backward(grad, q, k, v, out, lse, facts, bias_gradient)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, facts: MaskSpec, bias_gradient: bool
) -> Grads:
    kernel = choose_kernel(q, k, v, facts, bias_gradient)
    if _is_blocked(lse, facts):
        kernel = KERNELS["math"]
    return kernel.backward(grad, q, k, v, out, lse, facts, bias_gradient)
