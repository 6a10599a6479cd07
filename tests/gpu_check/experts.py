"""Grouped products of experts, and dropout masks: the same as without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from autopar.ops.dropout import keep_mask
from tests.gpu_check.processes import Check, Machine
from tests.gpu_check.rows import Row, guarded, judged

ops = torch.ops.autopar
# Ends of the rows of four experts, of 16 rows: experts without rows, rows of no expert, nothing at all.
ENDS = ([4, 4, 12, 16], [0, 0, 0, 16], [0, 0, 0, 0], [3, 7, 8, 11], [16, 16, 16, 16])
SIZES = ((8, 24), (64, 32), (6, 10))  # the last: rows that are no multiple of 16 bytes
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS, EXPERTS = 16, 4


def expert_checks(machine: Machine) -> list[Check]:
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


# --- dropout ----------------------------------------------------------------------------------------------

SEEDS = (0, 5, -1, 2**40 + 17, -(2**63))
SHAPES: tuple[tuple[int, ...], ...] = ((), (7,), (33, 65), (2, 3, 17, 40), (4, 128, 512))
BITS = 24


def dropout_checks(machine: Machine) -> list[Check]:
    """All in one process."""
    return [Check("dropout", "bits of masks", masks)]


def masks(machine: Machine) -> Iterator[Row]:
    """Masks, whole and in pieces."""
    for shape in SHAPES:
        for seed in SEEDS:
            for site in (0, 3):
                case = f"shape {list(shape)}, seed {seed}, site {site}"
                yield from guarded(
                    "bits of masks", case, functools.partial(mask, case, shape, seed, site, machine.device)
                )


def mask(case: str, shape: tuple[int, ...], seed: int, site: int, device: str) -> Row:
    """The device's bits against the CPU's and, of a few elements, against the hash in whole numbers of Python. A rank
    with every second row makes just these; the operator keeps just what the mask says."""
    there = torch.tensor(seed, device=device)
    found = keep_mask(shape, there, 0.3, site, [], [])
    wrong = int((found.cpu() != keep_mask(shape, torch.tensor(seed), 0.3, site, [], [])).sum())
    flat = found.flatten().cpu()
    for at in range(0, flat.numel(), max(1, flat.numel() // 20)):
        wrong += bool(flat[at]) != kept(at, shape[-1] if shape else 1, seed, site, 0.3)
    kept_by_operator = ops.dropout(torch.ones(shape, device=device), there, 0.3, site, [], []) != 0
    wrong += int((kept_by_operator != found).sum())
    if len(shape) > 1:
        index = [torch.arange(n, device=device) for n in shape]
        index[0] = index[0][::2]
        part = keep_mask((len(index[0]), *shape[1:]), there, 0.3, site, index, list(shape))
        wrong += int((part != found[::2]).sum())
    return judged("bits of masks", case, float(wrong), 0.0, f"{wrong} wrong bits" if wrong else "")


def kept(at: int, columns: int, seed: int, site: int, p: float) -> bool:
    """The hash of `autopar.ops.dropout` for one element, in Python's own numbers."""
    words = 0xFFFFFFFF

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD & words
        x = (x ^ x >> 15) * 0xD35A2D97 & words
        return x ^ x >> 15

    key = mix((seed & words) + 0x3C6EF372 & words)
    key = mix(key ^ seed >> 32 & words)
    first = mix(key + (site * 0x9E3779B9 & 0x7FFFFFFF) & words)
    second = mix(first + 0x1B873593 & words)
    third = mix(second + 0x2545F491 & words)
    row = mix(mix(at // columns ^ first) + second & words)
    hashed = mix(row + mix(at % columns ^ third) & words)
    return hashed >> 32 - BITS >= round(p * (1 << BITS))
