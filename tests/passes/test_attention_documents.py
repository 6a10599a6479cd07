"""Algorithms over ranks with packed documents: exact, nothing computed between documents, nothing sent for nobody."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.attend import KernelCall
from autopar.attention.layouts import LAYOUTS
from autopar.attention.problem import Mask, Problem
from autopar.ops import documents as documents_module
from autopar.passes import attention as attention  # fills ALGORITHMS
from autopar.testing.attention_ranks import AttentionFound, Case, attend_and_differentiate, on_the_whole

NAMES = list(ALGORITHMS)
MASKS = {"causal": Mask(causal=True), "full": Mask(), "window": Mask(causal=True, window=5)}
TOKENS = 48
ENDS = {"alike": [(5, 6, 17, 40)], "different": [(5, 6, 17, 40), (30, 31)], "one": [()], "at the edges": [(12, 24, 36)]}
WORD = 8  # bytes of float64


def segments_of(name: str) -> Tensor:
    """[2, TOKENS]."""
    rows = [
        sum(torch.arange(TOKENS).ge(end).long() for end in ends) + torch.zeros(TOKENS).long() for ends in ENDS[name]
    ]
    return torch.stack([*rows, *rows][:2])


def case_of(size: int, layout: str, ends: str, mask: str = "causal") -> Case:
    blocks = LAYOUTS[layout]
    made = Problem(
        batch=2, heads=4, kv_heads=2, queries=TOKENS, keys=TOKENS, width=4, value_width=4, dtype=torch.float64,
        size=size, mask=MASKS[mask], query_blocks=blocks, key_blocks=blocks, segments=True,
    )  # fmt: skip
    case = Case.of(made)
    case.facts = dataclasses.replace(case.facts, segments=segments_of(ends))
    return case


def check(name: str, case: Case) -> AttentionFound:
    found, expected = attend_and_differentiate(name, name, case), on_the_whole(case)
    for left, right in zip(found.tensors(), expected.tensors(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)
    return found


@pytest.fixture(autouse=True)
def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "SHORT", 1)


SIZED = [(name, size) for name in NAMES for size in (2, 4) if (name, size) != ("hybrid", 2)]  # has no groups of 2
CELLS = [(*sized, *rest) for sized in SIZED for rest in itertools.product(LAYOUTS, ENDS, MASKS)]


def in_turn(cell: tuple[str, int, str, str, str]) -> bool:
    name, size, layout, ends, mask = cell
    places = NAMES.index(name), size // 2 - 1, [*LAYOUTS].index(layout), [*ENDS].index(ends), [*MASKS].index(mask)
    return sum(places) % 4 == 0


@pytest.mark.parametrize(
    "cell", [pytest.param(c, marks=() if in_turn(c) else pytest.mark.full) for c in CELLS], ids=str
)
def test_equal_to_the_whole(cell: tuple[str, int, str, str, str]) -> None:
    name, *rest = cell
    check(name, case_of(*rest))


def allowed(case: Case) -> Tensor:
    """[B, S, S]."""
    i, j = torch.arange(TOKENS).unsqueeze(-1), torch.arange(TOKENS)
    segments = case.facts.segments
    assert segments is not None
    return (segments.unsqueeze(-1) == segments.unsqueeze(-2)) & (j <= i)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "size"), SIZED)
def test_pairs_that_exist_are_computed_once(name: str, size: int, layout: str) -> None:
    """With blocks as small as documents, none beyond them: forward and backward, over all ranks."""
    for ends in ENDS:
        case = case_of(size, layout, ends)
        found = check(name, case)
        for comms in (found.forward, found.backward):
            calls = [e for comm in comms for e in comm.events if isinstance(e, KernelCall)]
            groups = ALGORITHMS[name].head_ranks(case.problem)
            pairs = sum(call.pairs * call.examples * call.heads for call in calls) * groups
            assert pairs == int(allowed(case).sum()) * case.problem.heads, (name, ends)


def owned(case: Case) -> list[Tensor]:
    p = case.problem
    return [torch.cat([torch.arange(s.start, s.stop) for s in p.rows(rank)]) for rank in range(p.size)]


def needed(case: Case) -> int:
    """Tokens whose keys a rank needs of others, summed over the ranks: of a token, if any example needs it."""
    pairs, mine = allowed(case).any(0), owned(case)
    return sum(
        int(pairs[mine[rank]][:, mine[other]].any(0).sum())
        for rank, other in itertools.permutations(range(len(mine)), 2)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["ring", "bi_ring", "zigzag_ring"])
def test_a_ring_sends_what_a_document_of_the_receiver_needs(name: str, size: int, layout: str) -> None:
    """Exactly that, as long as a span goes straight to the few that need it, or around through those that need it."""
    for ends in ENDS:
        case = case_of(size, layout, ends)
        found = check(name, case)
        per_token = 2 * case.problem.kv_heads * (4 + 4) * WORD
        forward, backward = (
            sum(comm.bytes("up", "down", "home") for comm in comms) for comms in (found.forward, found.backward)
        )
        assert forward == needed(case) * per_token, (name, ends)
        assert backward == 2 * forward, (name, ends)  # keys and values, and their gradients


@pytest.mark.parametrize("name", ["ring", "bi_ring", "zigzag_ring", "token_ring"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_of_one_rank_are_not_sent(name: str, layout: str) -> None:
    case = case_of(4, layout, "at the edges")
    ends = torch.arange(TOKENS) // (TOKENS // 8)  # within a chunk of any layout
    case.facts = dataclasses.replace(case.facts, segments=ends.expand(2, -1))
    found = check(name, case)
    assert not any(comm.sent for comm in (*found.forward, *found.backward))


def test_queries_are_sent_to_keys_of_their_document() -> None:
    case = case_of(4, "contiguous", "alike")
    found = check("token_ring", case)
    pairs, mine = allowed(case).any(0), owned(case)
    rows = sum(int(pairs[mine[a]][:, mine[b]].any(1).sum()) for a, b in itertools.permutations(range(4), 2))
    sent = sum(s.bytes for comm in found.forward for s in comm.sent if s.what == "q")
    assert sent == rows * 2 * case.problem.heads * 4 * WORD
