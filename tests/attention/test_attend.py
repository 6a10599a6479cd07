"""Attention block by block equals attention of the whole, whatever is cut, masked and shared between heads."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from autopar.attention.attend import Attend, Partials, stand_in
from autopar.attention.layouts import LAYOUTS
from autopar.attention.problem import Mask, Span
from tests.support.attend_cases import (
    CASES,
    NO_FACTS,
    VALUES,
    WIDTH,
    B,
    arguments,
    backward,
    close,
    forward,
    of_rank,
    reference,
    taken,
    whole,
)

HEADS = [(4, 4), (4, 2), (6, 1)]


CELLS = [*itertools.product(CASES, LAYOUTS, HEADS)]


def in_turn(name: str, layout: str, heads: tuple[int, int]) -> bool:
    return ([*CASES].index(name) + [*LAYOUTS].index(layout) + HEADS.index(heads)) % 2 == 0


def test_each_two_of_cases_layouts_and_heads_meet() -> None:
    some = [cell for cell in CELLS if in_turn(*cell)]
    for i, k in ((0, 1), (0, 2), (1, 2)):
        assert {(cell[i], cell[k]) for cell in some} == {(cell[i], cell[k]) for cell in CELLS}


@pytest.mark.parametrize(
    ("name", "layout", "heads"),
    [pytest.param(*cell, marks=() if in_turn(*cell) else pytest.mark.full) for cell in CELLS],
    ids=str,
)
def test_blocks_equal_the_whole(name: str, layout: str, heads: tuple[int, int]) -> None:
    for ranks, size in ((1, 22), (2, 44), (3, 42), (4, 40)):
        it = whole(CASES[name], heads, ranks, layout, size)
        out, lse, grads = reference(it)
        found, found_lse = forward(it)
        close(found, out)
        close(found_lse, lse)
        gradients = backward(it, found, found_lse)
        for left, right in zip(dataclasses.astuple(gradients), grads):
            close(left, right)


def test_sinks_are_added_at_home() -> None:
    """Blocks know none; the final log-sum-exp holds them, and with it the gradients of blocks are exact."""
    it = whole({"causal": True}, (4, 2), 3, "zigzag", 42)
    it.facts = dataclasses.replace(it.facts, sinks=torch.randn(4, dtype=torch.float64))
    out, lse, grads = reference(it)
    found, found_lse = forward(it)
    assert it.facts.sinks is not None
    final = torch.logaddexp(found_lse, it.facts.sinks[:, None])
    found = found * torch.exp(found_lse - final).unsqueeze(-1)
    close(found, out)
    close(final, lse)
    gradients = backward(it, found, final)
    for left, right in zip((gradients.q, gradients.k, gradients.v), grads):
        close(left, right)


def test_dropout_of_some_heads_and_examples() -> None:
    """Indices of batch and heads in the whole, as they are given where these are cut."""
    it = whole({"causal": True, "dropout": 0.4}, (4, 2), 2, "zigzag", 24)
    out, _, grads = reference(it)
    example, heads = torch.tensor([1]), torch.tensor([2, 3])
    part = dataclasses.replace(
        it,
        problem=dataclasses.replace(it.problem, batch=1, heads=2, kv_heads=1),
        facts=dataclasses.replace(it.facts, index=[example, heads], shape=[B, 4, 24, 24]),
        **{name: getattr(it, name)[1:, 2:] for name in ("q", "grad")},
        **{name: getattr(it, name)[1:, 1:] for name in ("k", "v")},
    )
    found, lse = forward(part)
    close(found, out[1:, 2:])
    gradients = backward(part, found, lse)
    close(gradients.q, grads[0][1:, 2:])
    close(gradients.k, grads[1][1:, 1:])


def test_columns_of_other_lengths_and_orders() -> None:
    """Cross attention, and rows against all columns at once, in the order of the sequence or of the ranks."""
    it = whole({"causal": True, "window": 11}, (4, 2), 3, "zigzag", 36)
    out, _, _ = reference(it)
    orders = [(Span(0, 36),), tuple(span for rank in range(3) for span in it.problem.columns(rank))]
    for rank, columns in ((rank, columns) for rank in range(3) for columns in orders):
        rows = it.problem.rows(rank)
        into = Partials.empty(taken(it.q, rows), VALUES)
        k, v = taken(it.k, columns), taken(it.v, columns)
        of_rank(it, rank).forward(taken(it.q, rows), k, v, rows, columns, into)
        close(into.out, taken(out, rows))
    cross = dataclasses.replace(it.problem, queries=12, mask=Mask())
    q = it.q[:, :, :12]
    into = Partials.empty(q[:, :, :4], VALUES)
    attend = Attend(cross, NO_FACTS, 0)
    attend.forward(q[:, :, :4], it.k, it.v, (Span(0, 4),), (Span(0, 36),), into)
    expected, _ = torch.ops.autopar.attention(q[:, :, :4], it.k, it.v, *arguments(NO_FACTS))
    close(into.out, expected)


def test_rows_without_keys() -> None:
    """Out zero, lse -inf, gradients zero, whatever comes before or after."""
    it = whole({"causal": True, "key_mask": True}, (4, 2), 3, "zigzag", 30)
    assert it.facts.key_mask is not None
    it.facts.key_mask[:] = False
    it.facts.key_mask[1, 20:] = True
    found, lse = forward(it)
    assert found[0].eq(0).all() and lse[0].eq(float("-inf")).all()
    assert found[1, :, :20].eq(0).all() and lse[1, :, 20:].isfinite().all()
    out, _, grads = reference(it)
    close(found, out)
    gradients = backward(it, found, lse)
    for left, right in zip((gradients.q, gradients.k, gradients.v), grads):
        close(left, right)
    assert gradients.q[0].eq(0).all() and gradients.k[:, :, :20].eq(0).all()


# --- numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["causal", "full"])
def test_error_does_not_grow_with_the_number_of_blocks(name: str, dtype: torch.dtype, most: float) -> None:
    """Outputs and gradients of inputs between -1 and 1, against float64 on the same (rounded) inputs."""
    errors: dict[int, tuple[float, ...]] = {}
    for ranks in (1, 4, 16):
        it = whole(CASES[name], (4, 2), ranks, "zigzag", 192, dtype)
        for field in ("q", "k", "v", "grad"):
            setattr(it, field, torch.tanh(getattr(it, field)))
        exact = dataclasses.replace(it, **{n: getattr(it, n).double() for n in ("q", "k", "v", "grad")})
        expected, _, grads = reference(exact)
        out, lse = forward(it)
        found = backward(it, out, lse.to(out.dtype))
        pairs = [(out, expected), *zip((found.q, found.k, found.v), grads)]
        errors[ranks] = tuple(float((a.double() - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)
        assert errors[ranks][0] <= most
        assert max(errors[ranks][1:]) <= 2 * most
    for one, many in zip(errors[1], errors[16]):
        assert many <= 2 * one, errors


def test_first_merge_is_a_copy_and_others_are_exact() -> None:
    torch.manual_seed(0)
    q = torch.zeros(1, 2, 6, WIDTH)
    into = Partials.empty(q, VALUES)
    assert into.out.dtype == into.lse.dtype == torch.float32 and into.lse.eq(float("-inf")).all()
    out, lse = torch.randn(1, 2, 3, VALUES), torch.randn(1, 2, 3) * 100
    into.merge(out, lse, 2)
    assert torch.equal(into.out[:, :, 2:5], out) and torch.equal(into.lse[:, :, 2:5], lse)
    assert into.untouched == [Span(0, 2), Span(5, 6)]
    into.merge(torch.zeros(1, 2, 6, VALUES), torch.full((1, 2, 6), float("-inf")))  # nothing comes
    assert torch.equal(into.out[:, :, 2:5], out) and torch.equal(into.lse[:, :, 2:5], lse)
    assert into.out[:, :, :2].eq(0).all() and into.lse[:, :, :2].eq(float("-inf")).all() and not into.untouched
    into.merge(out, lse, 0)  # rows 0 and 1 for the first time, row 2 once more
    assert torch.equal(into.out[:, :, :2], out[:, :, :2]) and torch.equal(into.lse[:, :, :2], lse[:, :, :2])
    weights = torch.softmax(torch.stack([lse[:, :, 0], lse[:, :, 2]]).double(), 0).unsqueeze(-1)
    close(into.out[:, :, 2], weights[0] * out[:, :, 0] + weights[1] * out[:, :, 2], 1e-6)


def test_stand_in() -> None:
    torch.manual_seed(0)
    grad = torch.randn(2, 3, 5, VALUES, dtype=torch.float64)
    grad[0, 0, 0] = 0
    grad[0, 0, 1] *= 1e-300
    grad[0, 0, 2] *= 1e300
    grad[0, 0, 3, 1:] = 0
    out = torch.randn_like(grad)
    delta = (grad * out).sum(-1)
    found = stand_in(grad, delta)
    assert found.isfinite().all() and found[0, 0, 0].eq(0).all()
    torch.testing.assert_close((grad * found).sum(-1), delta, rtol=1e-13, atol=0)


def test_backward_reads_no_more_than_delta() -> None:
    it = whole(CASES["causal"], (4, 2), 2, "zigzag", 24)
    out, lse, grads = reference(it)
    found = backward(it, stand_in(it.grad, (it.grad * out).sum(-1)), lse)
    for left, right in zip((found.q, found.k, found.v), grads):
        close(left, right)
