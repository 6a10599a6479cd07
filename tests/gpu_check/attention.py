"""Attention kernels: each that applies against plain math, alone and as a part of a larger attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from autopar.ops import kernels
from autopar.ops.kernels.kernel import Grads
from tests.gpu_check import attention_order
from tests.gpu_check.attention_cases import EVERYWHERE, Case, cases, facts, plain_math, tensors
from tests.gpu_check.processes import Check, Machine
from tests.gpu_check.rows import Row, guarded, judged

# Of the largest value of a tensor, or of 1. A gradient is a difference of numbers that are rounded to the dtype.
ALLOWED = {torch.float64: 1e-11, torch.float32: 5e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
CUDA = ("flash_attn", "cudnn", "cuda_flash", "cuda_efficient", "triton_flash")
SECONDS = {"triton_flash": 600.0}  # it is compiled for each width and mask
PARTED = EVERYWHERE[:2]
PARTS = ("out", "lse", "q", "k", "v", "bias")


def checks(machine: Machine) -> list[Check]:
    """A process for each kernel and dtype; and one for what is taken."""
    names = (*CUDA, "math") if machine.is_gpu else ("cpu_flash", "math")
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if machine.is_gpu else (torch.float64, torch.bfloat16)
    every = [
        Check(
            "kernels", _title(name, dtype), functools.partial(one_kernel, name, dtype), seconds=SECONDS.get(name, 150.0)
        )
        for name in names
        for dtype in dtypes
    ]
    return [*every, Check("kernels", attention_order.WHAT, attention_order.order, seconds=150.0)]


def _title(name: str, dtype: torch.dtype) -> str:
    return f"{name} {str(dtype).removeprefix('torch.')}"


def one_kernel(name: str, dtype: torch.dtype, machine: Machine) -> Iterator[Row]:
    """Every case; then as a part of a larger attention."""
    chosen = list(cases(not machine.is_gpu, machine.quick))
    for case in chosen:
        yield from guarded(_title(name, dtype), str(case), functools.partial(alone, name, case, dtype, machine.device))
    for case in chosen:
        if case.mask in PARTED:
            label = f"two parts merged: {case}"
            yield from guarded(_title(name, dtype), label, functools.partial(halves, name, case, dtype, machine.device))


def alone(name: str, case: Case, dtype: torch.dtype, device: str) -> Row | None:
    """One attention, both ways."""
    q, k, v, grad = tensors(case, case.keys, dtype, device)
    known = facts(case, dtype, device)
    kernel = kernels.KERNELS[name]
    if not (kernel.applies(q, k, v, known) or kernel.takes_documents(q, k, v, known)):
        return None
    differentiated = known.bias is not None and kernel.bias_gradient
    with kernels.using(name):
        out, lse = kernels.forward(q, k, v, known)
        found = [out, lse, *some(kernels.backward(grad, q, k, v, out, lse, known, differentiated))]
    expected = plain_math(q, k, v, grad, known)[: len(found)]
    return compared(_title(name, dtype), str(case), found, expected, dtype)


def halves(name: str, case: Case, dtype: torch.dtype, device: str) -> Row | None:
    """Keys in two parts, merged by their log-sum-exps. Each part's backward is given the merged out and log-sum-exp, so
    that its own would be wrong. Causal as in a ring: the queries stand behind the first part, beside the second."""
    q, k, v, grad = tensors(case, 2 * case.length, dtype, device)
    beside = facts(case, dtype, device)
    before = dataclasses.replace(beside, causal=False)
    parts = [(k[:, :, s], v[:, :, s], f) for s, f in zip(_slices(case.length), (before, beside))]
    if not all(kernels.KERNELS[name].applies(q, a, b, known) for a, b, known in parts):
        return None
    with kernels.using(name):
        results = [kernels.forward(q, *part) for part in parts]
        lse = torch.logsumexp(torch.stack([part for _, part in results]), 0)
        out = sum_of([x.to(lse.dtype) * torch.exp(part - lse).unsqueeze(-1) for x, part in results]).to(q.dtype)
        grads = [some(kernels.backward(grad, q, a, b, out, lse, known, False)) for a, b, known in parts]
    to_q, to_k, to_v = zip(*grads)
    found = [out, lse, sum_of([x.to(lse.dtype) for x in to_q]), torch.cat(to_k, 2), torch.cat(to_v, 2)]
    whole = dataclasses.replace(beside, offset=case.length)
    label = f"two parts merged: {case}"
    return compared(_title(name, dtype), label, found, plain_math(q, k, v, grad, whole), dtype)


def _slices(length: int) -> tuple[slice, slice]:
    return slice(0, length), slice(length, 2 * length)


def sum_of(parts: list[Tensor]) -> Tensor:
    """The sum of at least one."""
    return torch.stack(parts).sum(0)


def some(grads: Grads) -> list[Tensor]:
    """Gradients, that of the bias if there is one."""
    return [x for x in grads if x is not None]


def compared(what: str, case: str, found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> Row:
    """The worst part, over what is allowed."""
    assert len(found) == len(expected) >= 5
    errors = [relative(x, y) for x, y in zip(found, expected)]
    worst = max(range(len(found)), key=lambda i: float("inf") if errors[i] != errors[i] else errors[i])
    return judged(what, f"{PARTS[worst]} of {case}", errors[worst], ALLOWED[dtype])


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; infinities stand where they should."""
    found = found.double()
    if found.shape != expected.shape or not torch.equal(found.isinf(), expected.isinf()):
        return float("inf")
    finite = ~expected.isinf()
    difference = (found - expected)[finite].abs()
    return float(difference.max() / max(1.0, float(expected[finite].abs().max()))) if difference.numel() else 0.0
