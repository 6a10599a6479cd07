"""Which kernel attention takes on this machine, and whether it is the fastest of those that apply."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.ops import kernels
from autopar.ops.kernels import KERNELS
from autopar.ops.kernels.chips import chip_of
from autopar.ops.mask_spec import MaskSpec
from tests.gpu_check.attention_cases import NO_FACTS
from tests.gpu_check.clock import milliseconds
from tests.gpu_check.processes import Machine
from tests.gpu_check.rows import OK, Row, guarded

WHAT = "kernel that is taken"
# Of models as they are trained: width of queries and of values, query heads, key heads, and the mask.
PROBLEMS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "llama 8B": (128, 128, 32, 8, {"causal": True}),
    "gpt2": (64, 64, 12, 12, {"causal": True}),
    "gemma 2 (softcap)": (256, 256, 8, 4, {"causal": True, "softcap": 50.0}),
    "mistral (window)": (128, 128, 32, 8, {"causal": True, "window": 1024}),
    "deepseek (192 with 128)": (192, 128, 16, 16, {"causal": True}),
    "phi 2 (width 80)": (80, 80, 32, 32, {"causal": True}),
    "bert (padding)": (64, 64, 12, 12, {}),
}
TIMED = ("flash_attn", "cudnn", "cuda_flash", "cuda_efficient", "triton_flash", "cpu_flash", "math")


def order(machine: Machine) -> Iterator[Row]:
    """A row for the chip, and one for each problem."""
    if machine.is_gpu:
        chip = chip_of(torch.device(machine.device))
        yield Row(WHAT, "order", OK, words=f"{', '.join(chip.kernels)}, math on {chip}")
    for name in PROBLEMS:
        yield from guarded(WHAT, name, functools.partial(taken, name, machine))


def taken(name: str, machine: Machine) -> Row:
    """Forward and backward in half precision; the figure is the time over that of the fastest."""
    q, k, v, grad, known = problem(name, machine)
    chosen = kernels.choose_kernel(q, k, v, known).name
    took = {}
    for other in TIMED:
        if other == chosen or (other != "math" and KERNELS[other].applies(q, k, v, known)):  # all scores may not fit
            with kernels.using(other):
                took[other] = milliseconds(functools.partial(both_ways, q, k, v, grad, known), machine.is_gpu)
    times = ", ".join(f"{other} {time:.2f} ms" for other, time in sorted(took.items(), key=lambda item: item[1]))
    return Row(WHAT, name, OK, took[chosen] / min(took.values()), "of the fastest", f"{chosen}; {times}")


def problem(name: str, machine: Machine) -> tuple[Tensor, Tensor, Tensor, Tensor, MaskSpec]:
    """q, k, v, grad and facts: long on a GPU, short on a CPU."""
    width, values, heads, key_heads, mask = PROBLEMS[name]
    batch, length = (2, 2048) if machine.is_gpu else (1, 16)
    sizes = ((heads, width), (key_heads, width), (key_heads, values), (heads, values))
    made = [torch.randn(batch, n, length, d, dtype=torch.bfloat16, device=machine.device) for n, d in sizes]
    if not mask:
        ends = torch.linspace(length // 2, length, batch, device=machine.device)[:, None]
        mask = {"key_mask": torch.arange(length, device=machine.device) < ends}
    return (*made, MaskSpec(**{**NO_FACTS, "scale": width**-0.5, **mask}))  # type: ignore[return-value]


def both_ways(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, known: MaskSpec) -> None:
    """As in a step."""
    out, lse = kernels.forward(q, k, v, known)
    kernels.backward(grad, q, k, v, out.to(q.dtype), lse, known, False)
