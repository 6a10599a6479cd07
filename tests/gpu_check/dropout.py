"""Dropout: bits of masks, and the one kernel that makes and applies them on a GPU."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from autopar.ops.dropout import fused_for, keep_mask
from tests.gpu_check.clock import milliseconds
from tests.gpu_check.processes import Check, Machine
from tests.gpu_check.rows import NOT_APPLICABLE, OK, Row, guarded, judged

ops = torch.ops.autopar

SEEDS = (0, 5, -1, 2**40 + 17, -(2**63))
SHAPES: tuple[tuple[int, ...], ...] = ((), (7,), (33, 65), (2, 3, 17, 40), (4, 128, 512))
BITS = 24


def checks(machine: Machine) -> list[Check]:
    """Masks, and what is made of numbers with them."""
    return [Check("dropout", "bits of masks", masks), Check("dropout", "one kernel", one_kernel)]


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


# --- one kernel -------------------------------------------------------------------------------------------

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
WIDE = (8192, 8192)  # of the tensor that is timed


def one_kernel(machine: Machine) -> Iterator[Row]:
    """Whether it runs, results of the operator bit by bit, and its time."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        runs = fused_for(torch.ones((), device=machine.device)) is not None
    words = "; ".join(str(x.message) for x in said) or "kernels one by one, on a CPU"
    yield (
        Row("one kernel", "runs", OK, words="Triton runs it")
        if runs
        else Row("one kernel", "runs", NOT_APPLICABLE, words=words)
    )
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for how in ("in one piece", "transposed", "every second row"):
            case = f"{str(dtype).removeprefix('torch.')}, {how}"
            yield from guarded("results of dropout", case, functools.partial(results, case, dtype, how, machine.device))
    if machine.is_gpu:
        yield from guarded("time of dropout", "bfloat16", functools.partial(timed, machine.device))


def results(case: str, dtype: torch.dtype, how: str, device: str) -> Row:
    """Of numbers, forward and backward, against those of the CPU on a tensor in one piece."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    view = {"in one piece": x, "transposed": x.T, "every second row": x[::2]}[how]
    expected = ops.dropout(view.contiguous(), torch.tensor(7), 0.3, 2, [], [])
    there = view.to(device).requires_grad_()
    found = ops.dropout(there, torch.tensor(7, device=device), 0.3, 2, [], [])
    (grad,) = torch.autograd.grad(found, there, view.to(device))
    wrong = sum(int((bits(y.detach().cpu()) != bits(expected)).sum()) for y in (found, grad))
    return judged("results of dropout", case, float(wrong), 0.0, f"{wrong} wrong numbers" if wrong else "")


def bits(x: Tensor) -> Tensor:
    """Of floating-point numbers, as whole ones."""
    return x.contiguous().view(WORDS[x.element_size()])


def timed(device: str) -> Row:
    """Over that of a copy, which reads and writes as much."""
    x, seed = torch.ones(WIDE, dtype=torch.bfloat16, device=device), torch.tensor(7, device=device)
    out = torch.empty_like(x)
    calls = (lambda: ops.dropout(x, seed, 0.1, 0, [], []), lambda: out.copy_(x))
    took = [milliseconds(call, is_gpu=True) for call in calls]
    words = f"{took[0]:.3f} ms, a copy {took[1]:.3f} ms"
    return Row("time of dropout", f"bfloat16 {list(WIDE)}", OK, took[0] / took[1], "copies", words)
