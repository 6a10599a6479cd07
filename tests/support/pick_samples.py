"""Sample calls of operators that pick or write entries by indices, for `tests/support/rule_samples.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from autopar.testing.soundness import Sample, call
from tests.support.pointwise_samples import GENERATOR, integer, normal, truth

aten = torch.ops.aten


def picks() -> Iterator[Sample]:
    yield call(aten.index_select.default, normal(6, 12), 1, integer(6, high=12))
    yield call(aten.gather.default, normal(6, 12), 1, integer(6, 4, high=12))
    yield call(aten.gather.default, normal(6, 12), 0, integer(2, 12))
    yield call(aten.gather.default, normal(6, 12), 1, integer(4, 6, high=12))
    yield call(aten.index.Tensor, normal(6, 12), [None, integer(6, high=12)])
    yield call(aten.index.Tensor, normal(6, 6, 4), [integer(6), integer(6)])
    yield call(aten.index.Tensor, normal(6, 4, 6), [integer(2, 1), None, integer(6)])
    yield call(aten.index.Tensor, normal(6, 6), [integer(2, 6)])
    yield call(aten.scatter.src, normal(6, 12), 1, _distinct(6, 4, 12), normal(6, 4))
    yield call(aten.scatter.src, normal(6, 12), 0, _distinct(4, 4, 6).T.contiguous(), normal(6, 12), gradients=False)
    yield call(aten.scatter.src, normal(6, 12), 1, _distinct(4, 6, 12), normal(6, 6), gradients=False)
    yield call(aten.scatter.value, normal(6, 12), 1, _distinct(6, 4, 12), 2.0)
    yield call(aten.scatter_add.default, normal(6, 12), 1, integer(6, 4, high=12), normal(6, 4))
    for reduce in ("sum", "amax", "mean"):
        yield call(aten.scatter_reduce.two, normal(6, 12), 1, integer(6, 4, high=12), normal(6, 4), reduce)
    yield call(
        aten.scatter.reduce, normal(6, 12), 1, integer(6, 4, high=12), normal(6, 4), reduce="add", gradients=False
    )
    yield call(aten.scatter.value_reduce, normal(6, 12), 1, integer(6, 4, high=12), 2.0, reduce="add", gradients=False)
    yield call(aten.index_add.default, normal(6, 4), 0, integer(12), normal(12, 4))
    yield call(aten.index_add.default, normal(2, 6, 4), -2, integer(6), normal(2, 6, 4), alpha=0.5)
    yield call(aten.index_copy.default, normal(6, 4), 0, torch.tensor([5, 1, 0, 3]), normal(4, 4))
    yield call(aten.index_reduce.default, normal(6, 4), 0, integer(12), normal(12, 4), "mean", gradients=False)
    yield from _puts()
    yield call(aten.embedding.default, normal(12, 6), integer(2, 6, high=12))
    yield call(aten.embedding.default, normal(12, 6), integer(12, high=12), 3)
    yield call(aten.embedding.default, normal(12, 6), integer(12, high=4), -1, True)
    bags = normal(12, 6), integer(6, high=12), torch.tensor([0, 2])
    yield call(aten.embedding_bag.default, *bags)
    yield call(aten.embedding_bag.padding_idx, *bags, False, 0, False, None, False, 3)


def _puts() -> Iterator[Sample]:
    """Into one dim or two, side by side or apart; of every entry its own value, or one for several."""
    for accumulate in (False, True):
        yield call(aten.index_put.default, normal(12, 6), [torch.arange(6) * 2], normal(6, 6), accumulate)
        yield call(aten.index_put.default, normal(6, 12), [None, torch.tensor([5, 1])], normal(6, 1), accumulate)
        yield call(aten.index_put.default, normal(6, 12), [None, torch.tensor([5, 1])], normal(), accumulate)
        pair = torch.arange(6), torch.randperm(6, generator=GENERATOR)
        yield call(aten.index_put.default, normal(6, 6, 4), [*pair], normal(6, 4), accumulate)
        yield call(aten.index_put.default, normal(6, 4, 6), [pair[0], None, pair[1]], normal(6, 4), accumulate)
        yield call(aten.index_put.default, normal(24, 6), [torch.arange(24).reshape(4, 6)], normal(4, 6, 6), accumulate)
        yield call(aten.index_put.default, normal(2, 6), [truth(2)], normal(6), accumulate, gradients=False)
    yield call(aten.index_put.default, normal(4, 6), [integer(12, high=4)], normal(12, 6), True)
    yield call(aten.take.default, normal(2, 6), integer(4, 6, high=12))
    for accumulate in (False, True):
        yield call(aten.put.default, normal(2, 6), torch.tensor([7, 0, 3, 11]), normal(4), accumulate)


def _distinct(rows: int, columns: int, high: int) -> Tensor:
    return torch.stack([torch.randperm(high, generator=GENERATOR)[:columns] for _ in range(rows)])
