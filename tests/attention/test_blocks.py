"""Which calls of a kernel bring rows and columns together: each allowed pair once, each zigzag step in one call."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.attention import attend as attend_module
from autopar.attention.attend import Gradients, KernelCall, Partials, blocks_of, positions
from autopar.attention.problem import Mask, Span, Spans
from autopar.ops import documents, kernels
from autopar.ops.mask_spec import MaskSpec
from tests.support.attend_cases import (
    CASES,
    CPU,
    VALUES,
    B,
    backward,
    close,
    forward,
    of_rank,
    reference,
    taken,
    whole,
)


def brute(mask: Mask, rows: Span, columns: Span) -> Tensor:
    i = torch.arange(rows.start, rows.stop).unsqueeze(-1)
    j = torch.arange(columns.start, columns.stop)
    allowed = torch.ones(len(rows), len(columns), dtype=torch.bool)
    if mask.causal:
        allowed &= j <= i
    if mask.window:
        allowed &= (i - j).abs() < mask.window
    if mask.chunk:
        allowed &= i // mask.chunk == j // mask.chunk
    return allowed


MASKS = st.builds(Mask, st.booleans(), st.sampled_from([0, 1, 2, 3, 5, 9]), st.sampled_from([0, 1, 2, 5, 8]))
SPANS = st.builds(lambda start, size: Span(start, start + size), st.integers(0, 20), st.integers(0, 9))


@settings(deadline=None)
@given(MASKS, SPANS, SPANS, st.booleans())
def test_mask_of_a_block(mask: Mask, rows: Span, columns: Span, square: bool) -> None:
    columns = rows if square else columns
    allowed = brute(mask, rows, columns)
    assert mask.pairs(rows, columns) == int(allowed.sum())
    status = mask.allows(rows, columns)
    triangle = rows == columns and mask.causal and torch.equal(allowed, torch.ones_like(allowed).tril())
    if not allowed.any():
        assert status == "none"
    elif triangle:
        assert status == "causal"
    else:
        assert status == ("all" if allowed.all() else "some")


CUTS = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def spans_between(sizes: list[int], order: list[int]) -> Spans:
    """Consecutive spans of these sizes; those whose number is drawn, in the order in which it is drawn."""
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    spans = [Span(a, b) for a, b in itertools.pairwise(ends)]
    return tuple(spans[n] for n in dict.fromkeys(order) if n < len(spans)) or (spans[0],)


@settings(deadline=None)
@given(MASKS, CUTS, CUTS, st.lists(st.integers(0, 4)), st.lists(st.integers(0, 4)))
def test_calls_cover_what_is_allowed_once(
    mask: Mask, row_sizes: list[int], column_sizes: list[int], row_order: list[int], column_order: list[int]
) -> None:
    rows, columns = spans_between(row_sizes, row_order), spans_between(column_sizes, column_order)
    i, j = positions(rows, CPU), positions(columns, CPU)
    top = Span(0, 32)
    allowed = brute(mask, top, top)[i][:, j]
    covered = torch.zeros_like(allowed, dtype=torch.int64)
    for block in blocks_of(mask, rows, columns):
        where = slice(block.row, block.row + block.height), slice(block.column, block.column + block.width)
        assert torch.equal(i[where[0]], positions(block.rows, CPU))
        assert torch.equal(j[where[1]], positions(block.columns, CPU))
        part = allowed[where]
        if block.kind != "some":
            assert torch.equal(part, torch.ones_like(part) if block.kind == "all" else torch.ones_like(part).tril())
        assert block.pairs(mask) == int(part.sum()) > 0
        covered[where] += part
    assert torch.equal(covered, allowed.to(torch.int64))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("case", ["causal", "documents", "padding"])
def test_zigzag_steps_are_one_call_of_equal_work(case: str, ranks: int) -> None:
    """The three cases: own, all rows with the front half of earlier ranks' columns, second half with later ones'."""
    half = 5
    it = whole(CASES[case], (4, 2), ranks, "zigzag", 2 * half * ranks)
    if it.facts.segments is not None:
        it.facts.segments[:] = 7  # all meet
    for rank in range(ranks):
        rows = it.problem.rows(rank)
        for other in range(ranks):
            seen: list[KernelCall] = []
            columns = it.problem.columns(other)
            tensors = taken(it.q, rows), taken(it.k, columns), taken(it.v, columns)
            into = Partials.empty(tensors[0], VALUES)
            of_rank(it, rank, seen.append).forward(*tensors, rows, columns, into)
            shape = (2 * half, half) if other < rank else (half, 2 * half) if other > rank else (2 * half, 2 * half)
            pairs = half * (2 * half + 1) if other == rank else 2 * half**2
            assert seen == [KernelCall(*shape, pairs, it.problem.heads, examples=B)]


def test_calls_of_a_contiguous_window() -> None:
    """Only what the window reaches is computed; a triangle that the window does not touch needs no mask."""
    mask = Mask(causal=True, window=4)
    rows = (Span(8, 16),)
    (block,) = blocks_of(mask, rows, (Span(0, 8),))
    assert (block.rows, block.columns, block.column) == ((Span(8, 11),), (Span(5, 8),), 5)
    assert not blocks_of(mask, (Span(16, 24),), (Span(0, 8),))
    (block,) = blocks_of(mask, rows, (Span(0, 24),))
    assert (block.rows, block.columns) == (rows, (Span(5, 16),))
    assert [b.kind for b in blocks_of(Mask(True, 8), rows, (Span(8, 16),))] == ["causal"]


def test_calls_of_rows_with_all_columns() -> None:
    """Columns are cut where the diagonal begins and ends, so that no mask is needed."""
    (before, square) = blocks_of(Mask(causal=True), (Span(8, 16),), (Span(0, 24),))
    assert (before.kind, before.columns) == ("all", (Span(0, 8),))
    assert (square.kind, square.columns, square.column) == ("causal", (Span(8, 16),), 8)


def test_documents_that_do_not_meet_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "SHORT", 1)
    it = whole(CASES["documents"], (4, 2), 4, "contiguous", 32)
    it.facts = dataclasses.replace(it.facts, segments=(torch.arange(32) // 8).expand(B, -1))
    seen: list[KernelCall] = []
    for rank in range(4):
        for other in range(4):
            rows, columns = it.problem.rows(rank), it.problem.columns(other)
            tensors = taken(it.q, rows), taken(it.k, columns), taken(it.v, columns)
            of_rank(it, rank, seen.append).forward(*tensors, rows, columns, Partials.empty(tensors[0], VALUES))
    assert seen == [KernelCall(8, 8, 36, it.problem.heads, examples=B)] * 4


@pytest.mark.parametrize("name", ["window", "chunk", "documents", "padding", "all"])
def test_big_masks_are_split_along_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = whole(CASES[name], (4, 2), 2, "zigzag", 44)
    out, _, grads = reference(it)
    monkeypatch.setattr(attend_module, "MOST_ENTRIES", 90)
    masks: list[int] = []
    kernel = kernels.forward

    def seen(q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
        allowed = facts.allowed(q.shape[2], k.shape[2], q.device)
        if allowed is not None and not facts.only_causal:
            masks.append(allowed.numel())
        return kernel(q, k, v, facts)

    monkeypatch.setattr(kernels, "forward", seen)
    found, lse = forward(it)
    assert len(masks) > 4 and max(masks) <= 90
    close(found, out)
    close(backward(it, found, lse).k, grads[1])


def test_shapes_alone_are_counted_alike() -> None:
    """On the meta device: the same calls, and results of the right shapes."""
    for name in ("causal", "window", "padding", "dropout", "bias of rows"):
        it = whole(CASES[name], (4, 2), 3, "zigzag", 42, torch.bfloat16)
        if it.facts.key_mask is not None:
            it.facts.key_mask[:] = True
        rows, columns = it.problem.rows(1), it.problem.columns(0)
        counts: list[list[KernelCall]] = []
        for device in ("cpu", "meta"):
            seen: list[KernelCall] = []
            attend = of_rank(it, 1, seen.append)
            tensors = {f.name: getattr(attend.facts, f.name) for f in dataclasses.fields(MaskSpec)}
            moved = {n: x.to(device) for n, x in tensors.items() if isinstance(x, Tensor)}
            attend.facts = dataclasses.replace(attend.facts, **moved)
            q, grad, k, v = (
                taken(x, spans).to(device)
                for x, spans in ((it.q, rows), (it.grad, rows), (it.k, columns), (it.v, columns))
            )
            into = Partials.empty(q, VALUES)
            attend.forward(q, k, v, rows, columns, into)
            bias = attend.facts.bias
            sums = Gradients(*(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)), bias)
            attend.backward(grad, q, k, v, into.out, into.lse, rows, columns, sums)
            assert into.out.dtype == torch.float32 and into.out.shape == (*q.shape[:3], VALUES)
            counts.append(seen)
        assert counts[0] == counts[1] and [work.backward for work in counts[0]] == [False, True]
