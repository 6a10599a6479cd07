"""Attention to keys in pages: each kernel against plain products in double precision, and what neighbours change."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.ops.kernels import paged
from autopar.ops.kernels.paged import PAGED, Paged
from tests.gpu_check.attention import ALLOWED, relative
from tests.gpu_check.clock import milliseconds
from tests.gpu_check.processes import Check, Machine
from tests.gpu_check.rows import NOT_APPLICABLE, OK, Row, guarded, judged
from tests.support.paged_cases import FEATURES, Request, Step, arguments, expected, requests

ops = torch.ops.autopar
SIZES = (((1, 0),), ((1, 300), (1, 7), (1, 511)), ((9, 0), (1, 300), (70, 500), (1, 0), (300, 0)))
WIDTHS = ({}, {"widths": (64, 64), "heads": (8, 2)}, {"widths": (128, 128), "window": 33}, {"widths": (256, 256)})
TIMED = ((64, 1, 2000), (1, 2000, 0))  # requests, tokens, old keys of each


def checks(machine: Machine) -> list[Check]:
    """A process for each kernel and dtype."""
    names = ("varlen", "gathered") if machine.is_gpu else ("rows", "gathered")
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if machine.is_gpu else (torch.float64, torch.bfloat16)
    return [
        Check("paged", f"{name} {str(dtype).removeprefix('torch.')}", functools.partial(one_kernel, name, dtype))
        for name in names
        for dtype in dtypes
    ]


def one_kernel(name: str, dtype: torch.dtype, machine: Machine) -> Iterator[Row]:
    """Results, the kernel that is taken, bits beside other requests, and times."""
    what = f"{name} {str(dtype).removeprefix('torch.')}"
    for feature in (*FEATURES, *WIDTHS):
        for sizes in SIZES[:2] if machine.quick else SIZES:
            for split_kv in (True, False):
                step = Step(requests(*sizes), "pages", 256, **feature, split_kv=split_kv, padding=3)
                label = f"{feature or 'plain'}, {sizes}, split_kv={split_kv}"
                yield from guarded(
                    what, label, functools.partial(right, what, label, name, step, dtype, machine.device)
                )
    for feature in ({}, {"window": 33}, *WIDTHS[1:]):
        yield from guarded(
            f"{what}: bits", str(feature), functools.partial(bits, what, name, feature, dtype, machine.device)
        )
    if machine.is_gpu:
        for size in TIMED:
            yield from guarded(
                f"{what}: time", str(size), functools.partial(timed, what, name, size, dtype, machine.device)
            )


def applies(name: str, given: dict[str, Any]) -> bool:
    """Whether a kernel supports the arguments."""
    return PAGED[name].applies(given["q"], Paged(**{field: given[field] for field in Paged._fields}))


def right(what: str, label: str, name: str, step: Step, dtype: torch.dtype, device: str) -> Row | None:
    """A step against the reference. The pools hold no numbers elsewhere, but in page 0, which padding reads."""
    given = arguments(step, dtype, device)
    for pool in ("keys", "values"):
        given[pool][0] = 0.5
    if not applies(name, given):
        return None
    with paged.using(name):
        out = ops.cached_attention(*given.values())
    found = out[:, :, : sum(r.new for r in step.requests)].cpu()
    if name == "varlen":  # where it supports a step, it is the one that is taken
        assert torch.equal(found, ops.cached_attention(*given.values())[:, :, : found.shape[2]].cpu())
    return judged(what, label, relative(found, expected(step)), ALLOWED[dtype])


def bits(what: str, name: str, feature: dict[str, Any], dtype: torch.dtype, device: str) -> Row | None:
    """A request alone, first, in the middle and last, on other pages, with split_kv=False: bitwise equal."""
    others, wrong = requests((1, 300), (5, 3), (70, 600)), 0
    for subject in (Request(1, 299, 50), Request(9, 0, 51), Request(33, 300, 52)):
        results = list[Tensor]()
        for company, at in (((), 0), (others, 0), (others, 2), (others, 3), (others[:1], 1), (others[:1], 0)):
            members = (*company[:at], subject, *company[at:])
            step = Step(members, "pages", 256, **feature, split_kv=False, filler=0.5, seed=at)
            given = arguments(step, dtype, device)
            if not applies(name, given):
                return None
            begin = sum(r.new for r in company[:at])
            with paged.using(name):
                results.append(ops.cached_attention(*given.values())[:, :, begin : begin + subject.new])
        wrong += sum(not torch.equal(x, results[0]) for x in results[1:])
    return judged(f"{what}: bits", str(feature), float(wrong), 0.0, f"{wrong} of 15 differ" if wrong else "")


def timed(what: str, name: str, size: tuple[int, int, int], dtype: torch.dtype, device: str) -> Row:
    """Of requests with 32 heads, 8 of keys, of 128 numbers."""
    count, new, old = size
    step = Step(requests(*[(new, old)] * count), "pages", 256, heads=(32, 8), widths=(128, 128), filler=0.5)
    given = arguments(step, dtype, device)
    label = f"{count} requests of {new} tokens after {old}"
    if not applies(name, given):
        return Row(f"{what}: time", label, NOT_APPLICABLE)
    with paged.using(name):
        took = milliseconds(lambda: ops.cached_attention(*given.values()), True)
    return Row(f"{what}: time", label, OK, took, "ms")
