"""Every algorithm over ranks gives what the operator gives on the whole: out, log-sum-exp and all gradients."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.exchanges import Expected, Sent
from autopar.attention.layouts import CONTIGUOUS, ZIGZAG, Blocks
from autopar.attention.problem import Mask, Problem
from autopar.ops.mask_spec import MaskSpec
from autopar.testing.attention_ranks import (
    AttentionFound,
    Case,
    Group,
    attend_and_differentiate,
    attend_over_ranks,
    differentiate_over_ranks,
    on_the_whole,
)

NAMES = list(ALGORITHMS)
HEADS = [(4, 4), (4, 2), (6, 1), (8, 2)]
MASKS = {
    "causal": Mask(causal=True),
    "full": Mask(),
    "window": Mask(causal=True, window=5),
    "both sides": Mask(window=4),
    "chunk": Mask(causal=True, chunk=7),
}
LAYOUTS = {"contiguous": CONTIGUOUS, "zigzag": ZIGZAG}


def problem(size: int, mask: Mask = MASKS["causal"], layout: Blocks = ZIGZAG, **changes: Any) -> Problem:
    """Small, with 3 tokens in each chunk of a zigzag: odd pieces."""
    tokens = 6 * size
    fields: dict[str, Any] = dict(batch=2, heads=4, kv_heads=2, queries=tokens, keys=tokens, width=4, value_width=4)
    fields |= dict(dtype=torch.float64, size=size, mask=mask, query_blocks=layout, key_blocks=layout)
    return Problem(**(fields | changes))


@cache
def whole(p: Problem) -> tuple[Case, AttentionFound]:
    """A case and what it gives on the whole."""
    case = Case.of(p)
    return case, on_the_whole(case)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest one, relative to the largest value; infinite where only one of them is -inf."""
    same = torch.where(found == expected, 0.0, (found.double() - expected.double()).abs())
    return float(same.max() / expected[expected.isfinite()].abs().max())


def check(forward: str, backward: str, p: Problem, tolerance: float = 1e-12) -> AttentionFound:
    case, expected = whole(p)
    found = attend_and_differentiate(forward, backward, case)
    worst = [difference(a, b) for a, b in zip(found.tensors(), expected.tensors(), strict=True)]
    assert max(worst) < tolerance, f"{forward}, {backward}: {p}: out, lse, q, k, v, bias differ by {worst}"
    return found


WORKS = [
    (name, size, heads)
    for name in NAMES
    for size in (2, 3, 4, 8)
    for heads in HEADS
    if not ALGORITHMS[name].refusal(problem(size, heads=heads[0], kv_heads=heads[1]))
]


# --- every algorithm, number of ranks, heads, mask and layout ---------------------------------------------


PAIRS = [(mask, layout) for mask in MASKS for layout in LAYOUTS]
IN_TURN = {
    (*cell, PAIRS[(i + k) % len(PAIRS)])
    for k, heads in enumerate(HEADS)
    for i, cell in enumerate(cell for cell in WORKS if cell[2] == heads)
}
IN_TURN |= {(name, 4, (4, 2), pair) for name in NAMES for pair in PAIRS}


def check_masks(name: str, size: int, heads: tuple[int, int], pairs: list[tuple[str, str]]) -> None:
    for mask, layout in pairs:
        check(name, name, problem(size, MASKS[mask], LAYOUTS[layout], heads=heads[0], kv_heads=heads[1]))


@pytest.mark.parametrize(("name", "size", "heads"), WORKS)
def test_masks_and_layouts(name: str, size: int, heads: tuple[int, int]) -> None:
    """All masks in both layouts for one number of ranks and heads; for the others they take turns."""
    check_masks(name, size, heads, [pair for pair in PAIRS if (name, size, heads, pair) in IN_TURN])


@pytest.mark.full
@pytest.mark.parametrize(("name", "size", "heads"), WORKS)
def test_all_masks_and_layouts(name: str, size: int, heads: tuple[int, int]) -> None:
    check_masks(name, size, heads, PAIRS)


def test_masks_and_layouts_meet_each_algorithm_number_of_ranks_and_heads() -> None:
    assert {(name, pair) for name, _, _, pair in IN_TURN} == {(name, pair) for name in NAMES for pair in PAIRS}
    assert {(size, pair) for _, size, _, pair in IN_TURN} == {(size, pair) for size in (2, 3, 4, 8) for pair in PAIRS}
    assert {(heads, pair) for _, _, heads, pair in IN_TURN} == {(heads, pair) for heads in HEADS for pair in PAIRS}
    assert {cell[:3] for cell in IN_TURN} == set(WORKS)


VARIANTS: dict[str, dict[str, Any]] = {
    "packed": dict(segments=True),
    "packed, full": dict(segments=True, mask=Mask()),
    "packed, window": dict(segments=True, mask=Mask(causal=True, window=5)),
    "softcap": dict(softcap=2.0),
    "bias of rows": dict(bias="rows"),
    "gradient of a bias of rows": dict(bias="rows", bias_gradient=True),
    "bias of columns": dict(bias="columns"),
    "gradient of a bias of columns": dict(bias="columns", bias_gradient=True, mask=Mask()),
    "an example without keys": dict(key_mask=True),
    "dropout": dict(dropout=0.3),
    "sinks": dict(sinks=True),
    "everything": dict(segments=True, softcap=3.0, bias="columns", key_mask=True, dropout=0.2, sinks=True),
    "values of another width": dict(value_width=7),
    "fewer keys": dict(keys=16, mask=Mask()),
    "more keys": dict(keys=40, mask=Mask(), dropout=0.2),
    "top-left causal": dict(keys=16),
    "rows that see nothing": dict(keys=8, mask=Mask(causal=True, window=3)),
    "as many keys, dealt otherwise": dict(mask=Mask(), key_blocks=CONTIGUOUS),
    "one token each": dict(queries=4, keys=4, query_blocks=CONTIGUOUS, key_blocks=CONTIGUOUS),
    "one row of bias each": dict(
        queries=4, keys=4, query_blocks=CONTIGUOUS, key_blocks=CONTIGUOUS, bias="rows", bias_gradient=True
    ),
}


def in_turn(name: str, variant: str, layout: str) -> bool:
    """Each layout with each algorithm, and with each variant."""
    return (NAMES.index(name) + [*VARIANTS].index(variant) + [*LAYOUTS].index(layout)) % 2 == 0


def test_layouts_meet_each_algorithm_and_each_variant() -> None:
    met = {cell for cell in itertools.product(NAMES, VARIANTS, LAYOUTS) if in_turn(*cell)}
    assert {(name, variant) for name, variant, _ in met} == {*itertools.product(NAMES, VARIANTS)}
    assert {(name, layout) for name, _, layout in met} == {*itertools.product(NAMES, LAYOUTS)}
    assert {(variant, layout) for _, variant, layout in met} == {*itertools.product(VARIANTS, LAYOUTS)}


@pytest.mark.parametrize(
    ("name", "variant", "layout"),
    [
        pytest.param(*cell, marks=() if in_turn(*cell) else pytest.mark.full)
        for cell in itertools.product(NAMES, VARIANTS, LAYOUTS)
    ],
)
def test_variants(name: str, variant: str, layout: str) -> None:
    p = problem(4, **({"layout": LAYOUTS[layout]} | VARIANTS[variant]))
    if name == "token_ring" and p.bias == "rows":
        with pytest.raises(ValueError, match='context_parallel: attention "token_ring": needs a bias that is the same'):
            check(name, name, p)
    else:
        check(name, name, p)


def few_pairs(forward: str, backward: str) -> bool:
    return (NAMES.index(backward) - NAMES.index(forward)) % len(NAMES) in (1, 3)


def test_few_pairs_have_each_forward_and_each_backward_twice() -> None:
    pairs = [pair for pair in itertools.product(NAMES, NAMES) if few_pairs(*pair)]
    assert all([pair[i] for pair in pairs].count(name) == 2 for name in NAMES for i in (0, 1))


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        pytest.param(*pair, marks=() if few_pairs(*pair) else pytest.mark.full)
        for pair in itertools.product(NAMES, NAMES)
    ],
)
def test_forward_and_backward_of_different_algorithms(forward: str, backward: str) -> None:
    """Nothing but what a rank holds of q, k, v, out and lse is kept in between: what travelled in the forward can not
    be what the backward reads (pitfall: stale keys)."""
    check(forward, backward, problem(4, dropout=0.2, segments=True, sinks=True))


# --- what is refused ---------------------------------------------------------------------------------------


def test_refusals_are_those_of_heads_and_of_biases() -> None:
    refused = {
        (name, size, heads)
        for name in NAMES
        for size in (2, 3, 4, 8)
        for heads in HEADS
        if ALGORITHMS[name].refusal(problem(size, heads=heads[0], kv_heads=heads[1]))
    }
    few = {(size, heads) for size in (2, 3, 4, 8) for heads in HEADS if heads[0] % size}
    no_groups = {(size, heads) for size in (2, 3) for heads in HEADS}
    assert refused == {("ulysses", *f) for f in few} | {("hybrid", *f) for f in no_groups}
    assert [name for name in NAMES if ALGORITHMS[name].refusal(problem(2, heads=4, bias="rows"))] == [
        "token_ring",
        "hybrid",
    ]


def test_refusals_say_what_is_needed() -> None:
    assert ALGORITHMS["ulysses"].refusal(problem(8, heads=6, kv_heads=1)) == (
        'context_parallel: attention "ulysses": 6 query heads do not divide over 8 ranks; it needs a multiple of 8 '
        'heads: choose fewer ranks, "hybrid" or "ring"'
    )
    assert ALGORITHMS["hybrid"].refusal(problem(3, heads=6, kv_heads=1)) == (
        'context_parallel: attention "hybrid": needs a group size between 1 and 3 that divides 3 ranks and 6 '
        'query heads, found none; choose "ring"'
    )


def test_groups_of_the_hybrid() -> None:
    """The largest that needs no key head twice, else the largest."""
    sizes = {
        (8, 8, 8): 4,
        (8, 8, 2): 2,
        (8, 8, 1): 4,
        (12, 12, 3): 3,
        (16, 8, 4): 4,
    }
    for (size, heads, kv_heads), expected in sizes.items():
        p = problem(size, heads=heads, kv_heads=kv_heads)
        assert ALGORITHMS["hybrid"].head_ranks(p) == expected, (size, heads, kv_heads)


# --- half precision and float32 -----------------------------------------------------------------------------


def precise(p: Problem) -> tuple[Case, AttentionFound]:
    """A case of a low precision, and the same numbers attended to in float64."""
    case = Case.of(p)
    exact: dict[str, Any] = {name: getattr(case, name).double() for name in ("q", "k", "v", "grad")}
    wide = dataclasses.replace(case, problem=dataclasses.replace(p, dtype=torch.float64), **exact)
    return case, on_the_whole(wide)


@pytest.mark.parametrize("name", NAMES)
def test_float32(name: str) -> None:
    case, expected = precise(problem(4, heads=8, kv_heads=2, dtype=torch.float32))
    found = attend_and_differentiate(name, name, case)
    assert max(difference(a, b) for a, b in zip(found.tensors(), expected.tensors(), strict=True)) < 1e-5


@pytest.mark.parametrize("name", ["all_gather", "ring", "bi_ring", "zigzag_ring", "token_ring"])
def test_errors_of_bfloat16_do_not_grow_with_the_number_of_ranks(name: str) -> None:
    """Pitfall: partial results and gradients that are rounded at each step. One rank's own error is the measure."""
    tokens: dict[str, Any] = dict(
        queries=96, keys=96, heads=4, kv_heads=2, width=16, value_width=16, dtype=torch.bfloat16
    )
    errors = {}
    for size in (1, 2, 4, 8):
        case, expected = precise(problem(size, **tokens))
        found = attend_and_differentiate(name, name, case)
        assert all(x.dtype == torch.float32 for x in found.tensors())
        pairs = list(zip(found.tensors(), expected.tensors(), strict=True))
        errors[size] = [float((a - b).abs().mean() / b.abs().mean()) for a, b in pairs]
        assert (found.out - expected.out).abs().max() < 2.5 * 4e-3
    for size in (2, 4, 8):
        assert all(many < 1.5 * one + 1e-6 for many, one in zip(errors[size], errors[1])), errors


# --- pitfalls of others --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_inputs_need_not_be_contiguous(name: str) -> None:
    """Pitfall: views of k, v and lse that a kernel reads as if they were contiguous."""
    case, expected = whole(problem(4))

    def strided(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    views: dict[str, Any] = {name: strided(getattr(case, name)) for name in ("q", "k", "v", "grad")}
    found = attend_and_differentiate(name, name, dataclasses.replace(case, **views))
    gradients, _ = differentiate_over_ranks(name, case, strided(found.out), strided(found.lse))
    found = dataclasses.replace(found, gradients=gradients)
    assert max(difference(a, b) for a, b in zip(found.tensors(), expected.tensors(), strict=True)) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_large_scores_do_not_overflow(name: str) -> None:
    """Pitfall: log(1 + exp(difference)) in the merge."""
    case, _ = whole(problem(4, mask=Mask()))
    case = dataclasses.replace(case, q=case.q * 1e4)
    out, lse, _ = attend_over_ranks(name, case)
    expected = on_the_whole(case)
    assert difference(out, expected.out) < 1e-12 and difference(lse, expected.lse) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_documents_end_anywhere(name: str) -> None:
    """Pitfall: documents that must divide over the ranks, or whose ends are forgotten."""
    for layout in LAYOUTS.values():
        case = Case.of(problem(4, layout=layout, segments=True))
        segments = torch.arange(24).ge(5).long() + torch.arange(24).ge(6).long() + torch.arange(24).ge(17).long()
        case.facts = dataclasses.replace(case.facts, segments=segments.expand(2, -1))
        found, expected = attend_and_differentiate(name, name, case), on_the_whole(case)
        assert max(difference(a, b) for a, b in zip(found.tensors(), expected.tensors(), strict=True)) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_inputs_stay_as_they_are(name: str) -> None:
    case, _ = whole(problem(4))
    before = [x.clone() for x in (case.q, case.k, case.v, case.grad)]
    attend_and_differentiate(name, name, case)
    assert all(torch.equal(a, b) for a, b in zip(before, (case.q, case.k, case.v, case.grad)))


class Paper:
    """A `Comm` on meta tensors: it writes down what one rank would send."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent: list[tuple[str, str, int]] = []
        self.coming: list[Tensor] = []

    def wait(self) -> list[Tensor]:
        return self.coming

    def _start(self, way: str, what: str, count: int, shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> Paper:
        """An exchange: bytes that leave and shapes that come."""
        if count:
            self.sent.append((way, what, count))
        started = Paper(self.rank, self.size)
        started.coming = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
        return started

    def exchange(self, way: str, what: str, send: Sent | None, receive: Expected | None) -> Paper:
        count = sum(x.nbytes for x in send[1]) if send else 0
        return self._start(way, what, count, [(like.shape, like.dtype) for like in receive[1]] if receive else [])

    def all_gather(self, what: str, x: Tensor) -> Paper:
        return self._start("all_gather", what, (self.size - 1) * x.nbytes, [((self.size, *x.shape), x.dtype)])

    def reduce_scatter(self, what: str, x: Tensor) -> Paper:
        return self._start("reduce_scatter", what, (self.size - 1) * x[0].nbytes, [(x.shape[1:], x.dtype)])


@pytest.mark.parametrize("name", NAMES)
def test_meta_tensors_make_the_same_exchanges(name: str) -> None:
    """So an estimate runs one rank alone, without numbers."""
    case, _ = whole(problem(4, segments=True, bias="columns", bias_gradient=True))
    real = attend_and_differentiate(name, name, case)
    group = Group(case, ALGORITHMS[name].head_ranks(case.problem), 0)
    for rank in range(group.problem.size):
        forward, backward = Paper(rank, group.problem.size), Paper(rank, group.problem.size)
        attend = group.attend(real.forward[rank])
        attend.facts = on_meta(attend.facts)
        q, grad = (group.rows(x, rank).to("meta") for x in (case.q, case.grad))
        k, v = (group.columns(x, rank).to("meta") for x in (case.k, case.v))
        before = [(s.way, s.what, s.bytes) for s in real.forward[rank].sent]
        out, lse = ALGORITHMS[name].forward(q, k, v, attend, forward)
        found = ALGORITHMS[name].backward(grad, q, k, v, out, lse, attend, backward)
        assert forward.sent == before
        assert backward.sent == [(s.way, s.what, s.bytes) for s in real.backward[rank].sent]
        assert (found.q.shape, found.k.shape, found.v.shape) == (q.shape, k.shape, v.shape)


def on_meta(facts: MaskSpec) -> MaskSpec:
    tensors: dict[str, Any] = {n: x.to("meta") for n, x in vars(facts).items() if isinstance(x, Tensor)}
    return dataclasses.replace(facts, **tensors, index=[x.to("meta") for x in facts.index])
