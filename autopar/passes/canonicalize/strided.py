"""Views into memory, spelled by what they read: windows that overlap, as models write them.

as_strided(x[2, 2, 8, 4], [2, 3, 8, 4], [64, 16, 4, 1])        windows of 8 rows, every 4 rows
    --> reshape(index_select(reshape(x, [2, 16, 4]), 1, rows), [2, 3, 8, 4])       rows: 0..7, 4..11, 8..15
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch.fx import Node

from autopar.ir.graph import arguments
from autopar.rewrite.build import Build, Rewrite, shape_of, value_of

aten = torch.ops.aten


def as_strided(node: Node, build: Build) -> Node | None:
    """Rows of what lies between the outer dims and the inner ones that are as they were, if those are one dim."""
    known = arguments(node)
    x, made = known["self"], list(zip(known["size"], known["stride"], strict=True))
    shape, offset = shape_of(x), value_of(x).storage_offset()
    own = list(zip(shape, value_of(x).stride(), strict=True))
    if known["storage_offset"] not in (None, offset) or not value_of(x).numel():
        return None
    most_outer, most_inner = _alike(made, own), _alike(made[::-1], own[::-1])
    for outer, inner in itertools.product(range(most_outer, -1, -1), range(most_inner, -1, -1)):
        if outer + inner >= len(shape) or outer + inner > len(made):
            continue
        middle, steps = own[outer : len(own) - inner], made[outer : len(made) - inner]
        unit, count = middle[-1][1], math.prod(n for n, _ in middle)
        one_dim = all(a[1] == b[0] * b[1] for a, b in itertools.pairwise(middle))
        last = sum((n - 1) * stride for n, stride in steps)
        if unit > 0 and one_dim and all(stride % unit == 0 for _, stride in steps) and last < count * unit:
            rows = build.reshape(x, (*shape[:outer], count, *shape[len(shape) - inner :]))
            chosen = _places(build, [(n, stride // unit) for n, stride in steps], value_of(x).device)
            return build.reshape(build(aten.index_select.default, rows, outer, chosen), shape_of(node))
    return None


def _alike(made: list[tuple[int, int]], own: list[tuple[int, int]]) -> int:
    """How many dims at the front have the size and the stride that they had."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(made, own, strict=False)))


def _places(build: Build, steps: list[tuple[int, int]], device: torch.device) -> Node:
    """The sums of one multiple of each stride, in order, flat."""
    total = build(aten.full.default, [1] * max(1, len(steps)), 0, dtype=torch.int64, device=device)
    for i, (n, stride) in enumerate(steps):
        counted = build(aten.mul.Tensor, build(aten.arange.default, n, device=device), stride)
        total = build(aten.add.Tensor, total, build.reshape(counted, [n if j == i else 1 for j in range(len(steps))]))
    return build.reshape(total, (math.prod(n for n, _ in steps),))


TABLE: dict[Any, Rewrite] = {aten.as_strided.default: as_strided}
