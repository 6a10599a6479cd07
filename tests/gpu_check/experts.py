"""Grouped products of experts: the same as without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.gpu_check.processes import Check, Machine
from tests.gpu_check.rows import Row, guarded, judged

ops = torch.ops.autopar
# Ends of the rows of four experts, of 16 rows: experts without rows, rows of no expert, nothing at all.
ENDS = ([4, 4, 12, 16], [0, 0, 0, 16], [0, 0, 0, 0], [3, 7, 8, 11], [16, 16, 16, 16])
SIZES = ((8, 24), (64, 32), (6, 10))  # the last: rows that are no multiple of 16 bytes
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS, EXPERTS = 16, 4


def checks(machine: Machine) -> list[Check]:
    """All in one process."""
    return [Check("experts", "grouped products", grouped)]


def grouped(machine: Machine) -> Iterator[Row]:
    """Small whole numbers, whose sums every dtype holds: equal to the last bit."""
    for dtype in DTYPES:
        for sizes in SIZES:
            for ends in ENDS:
                case = f"{str(dtype).removeprefix('torch.')} {sizes[0]} -> {sizes[1]}, ends {ends}"
                yield from guarded(
                    "grouped products", case, functools.partial(products, case, dtype, sizes, ends, machine.device)
                )


def products(case: str, dtype: torch.dtype, sizes: tuple[int, int], ends: list[int], device: str) -> Row:
    """The five operators in both orders of the weight, with gradients."""
    inner, outer = sizes
    rows, grad, bias = numbers(ROWS, inner), numbers(ROWS, outer), numbers(EXPERTS, outer)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    put = functools.partial(Tensor.to, device=device, dtype=dtype)
    worst = 0.0
    for transposed in (False, True):
        weight = numbers(EXPERTS, *((inner, outer) if transposed else (outer, inner)))
        given = [put(x).requires_grad_() for x in (rows, weight, bias)]
        out = ops.grouped_bias(ops.grouped_mm(given[0], given[1], offsets, transposed), given[2], offsets)
        found = [out.detach(), *torch.autograd.grad(out, given, put(grad))]
        expected = by_hand(rows, weight if not transposed else weight.transpose(1, 2), bias, grad, ends)
        if transposed:
            expected[2] = expected[2].transpose(1, 2)
        worst = max([worst, *(difference(x, y) for x, y in zip(found, expected, strict=True))])
    return judged("grouped products", case, worst, 0.0)


def by_hand(rows: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, ends: list[int]) -> list[Tensor]:
    """out and the gradients of rows, weight [E, O, I] and bias, expert by expert."""
    out, to_rows = torch.zeros_like(grad), torch.zeros_like(rows)
    to_weight, to_bias = torch.zeros_like(weight), torch.zeros_like(bias)
    start = 0
    for e, stop in enumerate(ends):
        mine = slice(start, stop)
        out[mine] = rows[mine] @ weight[e].T + bias[e]
        to_rows[mine] = grad[mine] @ weight[e]
        to_weight[e], to_bias[e] = grad[mine].T @ rows[mine], grad[mine].sum(0)
        start = stop
    return [out, to_rows, to_weight, to_bias]


def numbers(*shape: int) -> Tensor:
    """Whole numbers from -2 to 2."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(sum(shape))).double()


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest; infinite where something is not finite."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    return float((found.cpu().double() - expected).abs().max())
