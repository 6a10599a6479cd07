"""Packed documents: where they lie, and that nothing between them is computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.attention.attend import document_blocks, positions
from autopar.attention.problem import Mask, Span
from autopar.ops import documents as documents_module
from autopar.ops import kernels
from autopar.ops.documents import Documents, Run, documents_of
from tests.attention.test_blocks import CUTS, MASKS, brute, spans_between
from tests.support.attend_cases import CPU, NO_FACTS

S = 24
DOCUMENTS = torch.tensor([[0] * 5 + [1] + [2] * 11 + [3] * 7, [4] * 13 + [2] * 11])


@pytest.fixture
def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No document is so short that it is computed with its neighbours."""
    monkeypatch.setattr(documents_module, "SHORT", 1)


def test_runs_of_equal_numbers(each_alone: None) -> None:
    found = Documents.of([[0, 0, 1, 1, 1, 5]])
    assert found.runs == found.blocks == ((Run(0, 2), Run(2, 5), Run(5, 6)),)


def test_a_number_that_comes_back_joins_what_lies_between() -> None:
    found = Documents.of([[0, 7, 8, 7, 9, 9]])
    assert found.runs == ((Run(0, 1), Run(1, 4, mixed=True), Run(4, 6)),)


def test_short_neighbours_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "SHORT", 4)
    found = Documents.of([[0, 1, 2, 2, 2, 2, 2, 3, 4]])
    assert found.blocks == ((Run(0, 2, mixed=True), Run(2, 7), Run(7, 9, mixed=True)),)
    assert [len(run) for run in found.runs[0]] == [1, 1, 5, 1, 1]


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 9))
def test_nothing_attends_beyond_a_run(numbers: list[int], short: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "SHORT", short)
        found = Documents.of([numbers])
    for runs in (found.runs[0], found.blocks[0]):
        assert [run.start for run in runs] == [0, *(run.stop for run in runs)][:-1] and runs[-1].stop == len(numbers)
        for run in runs:
            inside, outside = numbers[run.start : run.stop], numbers[: run.start] + numbers[run.stop :]
            assert set(inside).isdisjoint(outside)
            assert run.mixed == (len(set(inside)) > 1)


def test_segments_are_read_once_until_they_change() -> None:
    segments = torch.zeros(2, S, dtype=torch.int64)
    first = documents_of(segments)
    assert first is not None and documents_of(segments) is first
    segments[:, 3:] = 1
    second = documents_of(segments)
    assert second is not None and second.runs[0] == (Run(0, 3), Run(3, S))
    with torch.inference_mode():
        untracked = torch.zeros(1, S, dtype=torch.int64)
        untracked[:, 5:] = 1
        found = documents_of(untracked)
        assert found is not None and found.runs[0] == (Run(0, 5), Run(5, S))
    assert documents_of(segments.to("meta")) is None and documents_of(None) is None


@settings(deadline=None)
@given(MASKS, CUTS, CUTS, st.lists(st.integers(0, 4)), st.lists(st.integers(0, 4)), CUTS)
def test_calls_cover_what_documents_allow_once(
    mask: Mask, rows: list[int], columns: list[int], row_order: list[int], column_order: list[int], sizes: list[int]
) -> None:
    held, others = spans_between(rows, row_order), spans_between(columns, column_order)
    numbers = [n for n, size in enumerate([*sizes, 32]) for _ in range(size)][:32]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "SHORT", 1)
        found = document_blocks(mask, held, others, Documents.of([numbers]))
    i, j, document = positions(held, CPU), positions(others, CPU), torch.tensor(numbers)
    allowed = brute(mask, Span(0, 32), Span(0, 32))[i][:, j] & (document[i].unsqueeze(-1) == document[j])
    covered = torch.zeros_like(allowed, dtype=torch.int64)
    for block in found:
        where = slice(block.row, block.row + block.height), slice(block.column, block.column + block.width)
        assert torch.equal(i[where[0]], positions(block.rows, CPU))
        assert torch.equal(j[where[1]], positions(block.columns, CPU))
        assert block.pairs(mask) == int(allowed[where].sum())
        covered[where] += allowed[where]
    assert torch.equal(covered, allowed.to(torch.int64))


# --- the operator on one rank ------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": 4},
    "window of all": {"window": S},
    "softcap": {"causal": True, "softcap": 2.0},
    "padding": {"causal": True, "key_mask": True},
    "bias of rows": {"causal": True, "bias": (1, 4, S, S)},
    "bias of columns": {"bias": (2, 1, 1, S)},
    "dropout": {"causal": True, "dropout": 0.3},
    "chunk": {"causal": True, "chunk": 5},
    "offset": {"causal": True, "offset": 8},
    "sinks": {"causal": True, "sinks": True},
}


def attention(case: dict[str, Any], segments: Tensor, whole: bool = False) -> list[Tensor]:
    """out, lse and gradients; ``whole``: as one call with a mask."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    known = dict(case)
    if "bias" in case:
        known["bias"] = random(*case["bias"])
    if "key_mask" in case:
        known["key_mask"] = torch.rand((2, S), generator=draw) > 0.3
    if "dropout" in case:
        known["seed"] = torch.tensor(5)
    if "sinks" in case:
        known["sinks"] = random(4)
    rows = S - case.get("offset", 0)
    q, grad, k, v = random(2, 4, rows, 8), random(2, 4, rows, 8), random(2, 2, S, 8), random(2, 2, S, 8)
    facts = dataclasses.replace(NO_FACTS, segments=segments, **known)
    if whole:
        allowed = dataclasses.replace(NO_FACTS, segments=segments, offset=facts.offset).allowed(rows, S, CPU)
        facts = dataclasses.replace(facts, segments=None, mask=allowed)
    out, lse = kernels.forward(q, k, v, facts)
    found = kernels.backward(grad, q, k, v, out, lse, facts, "bias" in case)
    return [out, lse, *(x for x in found if x is not None)]


@pytest.mark.parametrize("short", [1, 6])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_documents_alone_equal_the_whole(name: str, alike: bool, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "SHORT", short)
    segments = DOCUMENTS[:1].expand(2, -1) if alike else DOCUMENTS.clone()
    whole = attention(CASES[name], segments, whole=True)
    for left, right in zip(attention(CASES[name], segments), whole, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_calls_are_triangles_without_a_mask(each_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int, bool]] = []
    kernel = kernels.KERNELS["cpu_flash"]
    run = type(kernel).forward

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, facts: Any) -> tuple[Tensor, Tensor]:
        seen.append((q.shape[0], q.shape[2], k.shape[2], facts.only_causal and not facts.offset))
        return run(self, q, k, v, facts)

    monkeypatch.setattr(type(kernel), "forward", forward)
    attention({"causal": True}, DOCUMENTS[:1].expand(2, -1))
    assert seen == [(2, 5, 5, True), (2, 1, 1, True), (2, 11, 11, True), (2, 7, 7, True)]
    seen.clear()
    attention({"causal": True}, DOCUMENTS.clone())
    assert seen == [(1, n, n, True) for n in (5, 1, 11, 7, 13, 11)]
