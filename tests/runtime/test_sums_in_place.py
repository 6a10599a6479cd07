"""A sum is written over an operand that nobody else takes, when a graph runs and in the walk of what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.ir.storages import storages
from autopar.runtime.exec.lowering import bind
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from tests.runtime.test_bind import graph_of
from tests.support.ranks import run_ranks

aten = torch.ops.aten


def written_over(groups: Groups, build: Callable[..., Any], shape: tuple[int, ...] = (4, 4)) -> list[bool]:
    """Of a graph that ends in a sum: whether it runs over an operand, and whether the walk says so."""
    gm = graph_of([(4, 4), shape], build)
    (total,) = (n for n in gm.graph.nodes if n.target in (aten.add.Tensor, aten.addmm.default))
    given = [torch.rand(4, 4, dtype=torch.float64), torch.rand(shape, dtype=torch.float64)]
    kept, (expected,), bound = [x.clone() for x in given], gm(*given), bind(gm, groups)
    (found,) = bound(list(given))
    assert torch.equal(found, expected) and all(torch.equal(x, y) for x, y in zip(given, kept, strict=True))
    return [".add_(" in bound.code or ".addmm_(" in bound.code, storages(gm, in_place=True)[total] != ((total, 0),)]


def sums() -> tuple[list[list[bool]], list[list[bool]]]:
    groups = Groups(init_mesh(tp=1))
    add, addmm, neg = aten.add.Tensor, aten.addmm.default, aten.neg.default
    over: list[Callable[..., Any]] = [
        lambda call, x, y: [call(add, call(neg, x), y)],
        lambda call, x, y: [call(add, x, call(neg, y))],
        lambda call, x, y: [call(addmm, call(neg, x), x, y)],
    ]
    beside: list[Callable[..., Any]] = [
        lambda call, x, y: [call(add, x, y)],
        lambda call, x, y: [call(addmm, x, x, y)],
        lambda call, x, y: [call(add, call(aten.t.default, call(neg, x)), y)],  # in another order in memory
        lambda call, x, y: [call(add, call(aten.view.default, x, [4, 4]), y)],
        lambda call, x, y: [call(aten.mul.Tensor, n := call(neg, x), call(add, n, y))],  # taken once more
    ]
    narrow = written_over(groups, lambda call, x, y: [call(add, call(neg, y), x)], (1, 4))
    return [written_over(groups, b) for b in over], [narrow, *(written_over(groups, b) for b in beside)]


def test_sums_are_written_over_temporaries() -> None:
    over, beside = run_ranks(1, sums)[0]
    assert over == [[True, True]] * 3 and beside == [[False, False]] * 6
