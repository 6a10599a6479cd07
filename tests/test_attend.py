"""Attention block by block equals attention of the whole, whatever is cut, masked and shared between heads."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autopar.attention import LAYOUTS, Gradients, Mask, Problem, Span, Spans
from autopar.ops import attend as attend_module
from autopar.ops import kernels
from autopar.ops.attend import Attend, Partials, Work, positions, stand_in
from autopar.ops.attention import Facts
from autopar.ops.blocks import blocks_of

B, WIDTH, VALUES = 2, 8, 8
CPU = torch.device("cpu")
HEADS = [(4, 4), (4, 2), (6, 1)]

NO_FACTS = Facts(
    bias=None, key_mask=None, segments=None, sinks=None, seed=None, causal=False, window=0, chunk=0, offset=0,
    scale=0.35, softcap=0.0, dropout=0.0, site=3, index=[], shape=[],
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 7},
    "two-sided window": {"window": 5},
    "chunk": {"causal": True, "chunk": 9},
    "chunk and window": {"chunk": 16, "window": 3},
    "bias of rows": {"causal": True, "bias": "rows"},
    "bias of columns": {"bias": "columns"},
    "documents": {"causal": True, "segments": True},
    "padding": {"causal": True, "key_mask": True},
    "softcap": {"causal": True, "softcap": 2.0},
    "dropout": {"causal": True, "dropout": 0.3},
    "all": {
        "causal": True, "window": 20, "chunk": 30, "bias": "rows", "segments": True, "key_mask": True, "softcap": 3.0,
        "dropout": 0.2,
    },
}  # fmt: skip


@dataclasses.dataclass
class Whole:
    """One attention with everything it needs, uncut."""

    problem: Problem
    facts: Facts
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor


def whole(
    case: dict[str, Any], heads: tuple[int, int], ranks: int, layout: str, size: int, dtype: torch.dtype = torch.float64
) -> Whole:
    torch.manual_seed(0)
    made = {name: value for name, value in case.items() if name not in ("bias", "segments", "key_mask")}
    if "bias" in case:
        shape = (1, heads[0], size, size) if case["bias"] == "rows" else (B, 1, 1, size)
        made["bias"] = torch.randn(shape, dtype=dtype)
    if "segments" in case:
        made["segments"] = torch.randint(0, 2, (B, size)).cumsum(1) // 3
    if "key_mask" in case:
        made["key_mask"] = torch.rand(B, size) < 0.7
    if "dropout" in case:
        made["seed"] = torch.tensor(1234567)
    facts = dataclasses.replace(NO_FACTS, **made)
    problem = Problem(
        B, *heads, size, size, WIDTH, VALUES, dtype, ranks, Mask(facts.causal, facts.window, facts.chunk),
        LAYOUTS[layout], LAYOUTS[layout], case.get("bias", ""), "bias" in case, "segments" in case, "key_mask" in case,
        False, facts.softcap, facts.dropout,
    )  # fmt: skip
    q, grad = (torch.randn(B, heads[0], size, WIDTH, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(B, heads[1], size, WIDTH, dtype=dtype) for _ in range(2))
    return Whole(problem, facts, q, k, v, grad)


def taken(x: Tensor, spans: Spans, dim: int = 2) -> Tensor:
    return x.index_select(dim, positions(spans, CPU))


def of_rank(it: Whole, rank: int, observe: Callable[[Work], None] | None = None) -> Attend:
    bias = it.facts.bias
    if bias is not None and bias.shape[2] > 1:
        bias = taken(bias, it.problem.rows(rank))
    return Attend(it.problem, dataclasses.replace(it.facts, bias=bias), rank, observe)


def steps(it: Whole) -> Iterator[tuple[Attend, Spans, Spans]]:
    """Every rank's rows with every rank's columns, its own first."""
    ranks = it.problem.size
    for rank in range(ranks):
        attend = of_rank(it, rank)
        for step in range(ranks):
            yield attend, it.problem.rows(rank), it.problem.columns((rank - step) % ranks)


def forward(it: Whole) -> tuple[Tensor, Tensor]:
    """out and lse of all rows, block by block."""
    out, lse = torch.zeros_like(it.q, dtype=kernels.wide(it.q.dtype)), torch.zeros(it.q.shape[:3], dtype=torch.float64)
    found: dict[Spans, Partials] = {}
    for attend, rows, columns in steps(it):
        q = taken(it.q, rows)
        into = found.setdefault(rows, Partials.empty(q, VALUES))
        attend.forward(q, taken(it.k, columns), taken(it.v, columns), rows, columns, into)
    for rows, into in found.items():
        out.index_copy_(2, positions(rows, CPU), into.out)
        lse.index_copy_(2, positions(rows, CPU), into.lse.double())
    return out, lse


def backward(it: Whole, out: Tensor, lse: Tensor) -> Gradients:
    """Gradients of everything, block by block."""
    bias = torch.zeros_like(it.facts.bias) if it.facts.bias is not None else None
    total = Gradients(*(torch.zeros_like(x, dtype=out.dtype) for x in (it.q, it.k, it.v)), bias)
    for attend, rows, columns in steps(it):
        grad, q, my_out, my_lse = (taken(x, rows) for x in (it.grad, it.q, out, lse))
        k, v = taken(it.k, columns), taken(it.v, columns)
        own = attend.facts.bias
        zeros = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v))
        part = Gradients(*zeros, torch.zeros_like(own) if own is not None else None)
        attend.backward(grad, q, k, v, my_out, my_lse, rows, columns, part)
        total.q.index_add_(2, positions(rows, CPU), part.q)
        total.k.index_add_(2, positions(columns, CPU), part.k)
        total.v.index_add_(2, positions(columns, CPU), part.v)
        if bias is not None and part.bias is not None:
            bias += part.bias if bias.shape[2] == 1 else torch.zeros_like(bias).index_copy_(
                2, positions(rows, CPU), part.bias
            )  # fmt: skip
    return total


def arguments(facts: Facts) -> list[Any]:
    """Those of the operator."""
    return [getattr(facts, f.name) for f in dataclasses.fields(facts) if f.name != "mask"]


def reference(it: Whole) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    out, lse = torch.ops.autopar.attention(it.q, it.k, it.v, *arguments(it.facts))
    has_bias = it.facts.bias is not None
    grads = torch.ops.autopar.attention_backward(it.grad, it.q, it.k, it.v, out, lse, *arguments(it.facts), has_bias)
    return out, lse, grads[: 4 if has_bias else 3]


def close(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
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


# --- which calls, and how many ------------------------------------------------------------------------


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
            seen: list[Work] = []
            columns = it.problem.columns(other)
            tensors = taken(it.q, rows), taken(it.k, columns), taken(it.v, columns)
            into = Partials.empty(tensors[0], VALUES)
            of_rank(it, rank, seen.append).forward(*tensors, rows, columns, into)
            shape = (2 * half, half) if other < rank else (half, 2 * half) if other > rank else (2 * half, 2 * half)
            pairs = half * (2 * half + 1) if other == rank else 2 * half**2
            assert seen == [Work(*shape, pairs)]


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


def test_documents_that_do_not_meet_are_skipped() -> None:
    it = whole(CASES["documents"], (4, 2), 4, "contiguous", 32)
    it.facts = dataclasses.replace(it.facts, segments=(torch.arange(32) // 8).expand(B, -1))
    seen: list[Work] = []
    for rank in range(4):
        for other in range(4):
            rows, columns = it.problem.rows(rank), it.problem.columns(other)
            tensors = taken(it.q, rows), taken(it.k, columns), taken(it.v, columns)
            of_rank(it, rank, seen.append).forward(*tensors, rows, columns, Partials.empty(tensors[0], VALUES))
    assert seen == [Work(8, 8, 36)] * 4


@pytest.mark.parametrize("name", ["window", "chunk", "documents", "padding", "all"])
def test_big_masks_are_split_along_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = whole(CASES[name], (4, 2), 2, "zigzag", 44)
    out, _, grads = reference(it)
    monkeypatch.setattr(attend_module, "MOST_ENTRIES", 90)
    masks: list[int] = []
    kernel = kernels.forward

    def seen(q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> tuple[Tensor, Tensor]:
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
        counts: list[list[Work]] = []
        for device in ("cpu", "meta"):
            seen: list[Work] = []
            attend = of_rank(it, 1, seen.append)
            tensors = {f.name: getattr(attend.facts, f.name) for f in dataclasses.fields(Facts)}
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
