"""From logits to tokens: equal to transformers' processors, drawn from their distribution, the same on every mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as theirs

from autopar.serving.choice import OneRank, choose
from autopar.serving.sampling_params import Sampling
from autopar.serving.step import Chosen, RowChoice
from tests.serving.simulated_ranks import choose_sharded

V = 61


def a_choice(
    sampling: Sampling, seed: int = 0, history: Sequence[int] = (1, 2, 3), prompt: int = 2, **more: Any
) -> RowChoice:
    history = tuple(history)
    generated = len(history) - prompt
    kept = history if sampling.needs_history else ()
    return RowChoice(sampling, len(history), seed, prompt, kept, generated, **more)


def some_logits(rows: int, vocab: int = V, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    made = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    return made.to(dtype)


def mask_of(ids: Sequence[int], vocab: int = V) -> bytes:
    return sum(1 << i for i in ids).to_bytes(-(-vocab // 8), "little")


def tokens(found: Sequence[Chosen]) -> list[int]:
    assert all(one.error is None for one in found), found
    return [one.token for one in found]


# --- the distribution ------------------------------------------------------------------------------------------

IDS = st.integers(0, V - 1)
NUMBERS = st.floats(-5, 5, width=32)
SETTINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 5, 40, V, 1000]),
    top_p=st.sampled_from([1.0, 0.99, 0.8, 0.3, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(IDS, NUMBERS | st.just(-math.inf), max_size=4),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=3),
    min_tokens=st.sampled_from([0, 2, 5]),
    stop_token_ids=st.lists(IDS, max_size=2),
    eos_token_ids=st.lists(IDS, max_size=2),
)
HISTORIES = st.lists(IDS, min_size=3, max_size=30)


def by_transformers(logits: Tensor, choice: RowChoice, history: Sequence[int]) -> Tensor:
    """Scores by transformers' own classes, in the order of its `_get_logits_processor`."""
    s = choice.sampling
    found = theirs.LogitsProcessorList()
    if s.logit_bias:
        found.append(theirs.SequenceBiasLogitsProcessor({(i,): b for i, b in s.logit_bias.items()}))
    if s.repetition_penalty != 1.0:
        found.append(theirs.RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.bad_words:
        found.append(theirs.NoBadWordsLogitsProcessor([list(word) for word in s.bad_words]))
    if s.min_tokens and s.end_ids:
        found.append(theirs.MinNewTokensLengthLogitsProcessor(choice.prompt_length, s.min_tokens, list(s.end_ids)))
    if choice.allowed is not None:
        bits = int.from_bytes(choice.allowed, "little")
        found.append(theirs.PrefixConstrainedLogitsProcessor(lambda _, ids: [i for i in range(V) if bits >> i & 1], 1))
    if not s.greedy:
        if s.temperature != 1.0:
            found.append(theirs.TemperatureLogitsWarper(s.temperature))
        if s.top_k:
            found.append(theirs.TopKLogitsWarper(s.top_k))
        if s.top_p < 1.0:
            found.append(theirs.TopPLogitsWarper(s.top_p))
        if s.min_p:
            found.append(theirs.MinPLogitsWarper(s.min_p))
    return found(torch.tensor([list(history)]), logits.unsqueeze(0).clone())[0]


@settings(max_examples=400, deadline=None)
@given(
    rows=st.lists(st.tuples(SETTINGS, HISTORIES, st.none() | st.sets(IDS, min_size=1)), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    coarse=st.booleans(),
)
def test_scores_equal_those_of_transformers(rows: Any, seed: int, coarse: bool) -> None:
    """Several requests of different settings in one batch; ``coarse``: many equal logits, as in half precision."""
    logits = some_logits(len(rows), seed=seed)
    logits = logits.round() if coarse else logits
    choices = [
        a_choice(s, seed, history, want_scores=True, allowed=None if ids is None else mask_of(sorted(ids)))
        for s, history, ids in rows
    ]
    for row, choice, (sampling, history, ids), chosen in zip(
        logits, choices, rows, choose(logits, choices, OneRank(V)), strict=True
    ):
        expected = by_transformers(row, choice, history)
        assert chosen.scores is not None
        if chosen.error is not None:  # transformers then forces what the grammar allows and all else forbids
            free = dataclasses.replace(choice, allowed=None, sampling=dataclasses.replace(sampling, temperature=0.0))
            assert (by_transformers(row, free, history)[sorted(ids or range(V))] == -math.inf).all()
            continue
        ours, whole = chosen.scores.softmax(-1), expected.softmax(-1)
        if coarse:  # which of equal scores top p removes is left to an unstable sort there
            ours, whole = ours.sort().values, whole.sort().values
        torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-12)
        assert chosen.scores[chosen.token] > -math.inf
        if choice.sampling.greedy:
            assert chosen.token == expected.argmax()


def test_of_equal_tokens_the_lower_ids_are_within_top_p() -> None:
    logits = torch.zeros(2, V, dtype=torch.float64)
    logits[1, :3] = 2.0
    found = choose(logits, [a_choice(Sampling(top_p=10.5 / V), want_scores=True)] * 2, OneRank(V))
    kept = [(one.scores > -math.inf).nonzero().flatten().tolist() for one in found if one.scores is not None]
    assert kept == [list(range(11)), [0, 1]]


def test_top_p_of_a_flat_distribution_looks_beyond_the_first_tokens() -> None:
    logits = some_logits(2, vocab=6000) / 10
    logits[1] *= 30
    found = choose(logits, [a_choice(Sampling(top_p=0.9), want_scores=True)] * 2, OneRank(6000))
    for row, one in zip(logits, found, strict=True):
        expected = theirs.TopPLogitsWarper(0.9)(torch.zeros(1, 1).long(), row.unsqueeze(0))[0]
        assert one.scores is not None and torch.equal(one.scores, expected)


def test_penalties_are_those_of_openai() -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, with c[j] the number of times j was generated."""
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    choice = a_choice(sampling, history=(4, 4, 9, 7, 9, 9), prompt=3, want_scores=True)
    logits = torch.full((1, V), 8.0, dtype=torch.float64)
    found = choose(logits, [choice], OneRank(V))[0].scores
    expected = logits[0].clone()
    expected[[4, 7, 9]] /= 2  # transformers' penalty counts the prompt, and comes first
    expected[7] -= 0.5 + 0.25
    expected[9] -= 0.5 + 2 * 0.25
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_own_processors_run_ahead_of_temperature_with_the_tokens_so_far() -> None:
    seen = []

    def doubled(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids.tolist())
        return scores.mul_(2)

    logits = some_logits(1)
    before = logits.clone()
    choice = a_choice(Sampling(processors=(doubled,), temperature=0.5), want_scores=True, want_logits=True)
    found = choose(logits, [choice], OneRank(V))[0]
    torch.testing.assert_close(found.scores, before[0] * 4)
    torch.testing.assert_close(found.logits, before[0])
    assert torch.equal(logits, before), "the logits are not changed"
    assert seen == [[[1, 2, 3]]]


# --- drawing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.7, "top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}], ids=lambda fields: str(fields)
)
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_draws_have_the_distribution(fields: dict[str, Any], over: str) -> None:
    logits = some_logits(1, vocab=23).expand(10_000, -1) / 2
    counts = torch.zeros(23, dtype=torch.int64)
    for part in range(10):
        numbers = range(part * 10_000, (part + 1) * 10_000)
        sampling = Sampling(**fields)
        choices = [
            RowChoice(sampling, n, 5, 1) if over == "positions" else RowChoice(sampling, 9, n, 1) for n in numbers
        ]
        counts += torch.bincount(torch.tensor(tokens(choose(logits, choices, OneRank(23)))), minlength=23)
    choice = dataclasses.replace(choices[0], want_scores=True)
    scores = choose(logits[:1], [choice], OneRank(23))[0].scores
    assert scores is not None
    expected = scores.softmax(-1)
    possible = expected > 0
    assert not counts[~possible].any()
    test = scipy.stats.chisquare(counts[possible].numpy(), (expected[possible] * counts.sum()).numpy())
    assert test.pvalue > 1e-4, (test, counts, expected)


def test_draws_of_neighbours_are_independent() -> None:
    """Of positions, of seeds, and of seeds with positions: pairs of tokens have the product of distributions."""
    n, vocab = 10_000, 4
    logits = torch.zeros(2 * n, vocab)
    for first, second in [((0, 1), (1, 0)), ((0, 0), (1, 0)), ((0, 0), (0, 1))]:
        pairs = [RowChoice(Sampling(), 3 * i + p, 7 * i + s, 1) for i in range(n) for s, p in (first, second)]
        drawn = torch.tensor(tokens(choose(logits, pairs, OneRank(vocab)))).view(n, 2)
        counts = torch.bincount(drawn[:, 0] * vocab + drawn[:, 1], minlength=vocab**2)
        assert scipy.stats.chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-300])
def test_low_temperatures_choose_the_most_likely(temperature: float) -> None:
    logits = some_logits(50, dtype=torch.float32)
    found = tokens(choose(logits, [a_choice(Sampling(temperature=temperature))] * 50, OneRank(V)))
    assert found == logits.argmax(-1).tolist()


def test_each_of_many_tokens_can_be_drawn() -> None:
    """With 2e5 tokens of 5e-6 each, noise of few digits would favour the first."""
    vocab = 200_000
    logits = torch.zeros(20, vocab)
    found = tokens(choose(logits, [RowChoice(Sampling(), i, 0, 1) for i in range(20)], OneRank(vocab)))
    assert len(set(found)) == 20
    assert scipy.stats.kstest([token / vocab for token in found], "uniform").pvalue > 1e-4


def test_large_seeds_are_their_own() -> None:
    logits = torch.zeros(4, 1000)
    seeds = [0, 1 << 40, -(1 << 63), (1 << 64) - 1]
    found = tokens(choose(logits, [RowChoice(Sampling(), 3, seed, 1) for seed in seeds], OneRank(1000)))
    assert len(set(found)) == 4


# --- meshes and company -----------------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.3},
    {"temperature": 0, "logit_bias": {60: 50.0}},
    {"logit_bias": {0: 3.0, 33: -math.inf}},
    {"repetition_penalty": 1.5, "presence_penalty": 0.3},
    {"temperature": 0, "bad_words": [[3, 5], [7]], "min_tokens": 4, "eos_token_ids": [11]},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0, "logprobs": 3},
    {"top_p": 0.5, "logprobs": 0},
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_sharded_ranks_choose_as_one(size: int, padded: bool, dtype: torch.dtype) -> None:
    logits = some_logits(len(KINDS), dtype=dtype)
    choices = [a_choice(Sampling(**kind), seed=i) for i, kind in enumerate(KINDS)]
    choices.append(a_choice(Sampling(), allowed=mask_of([2, 40, 59])))
    choices.append(a_choice(Sampling(temperature=0), want_scores=True, want_logits=True))
    logits = torch.cat([logits, logits[:2]])
    expected = choose(logits, choices, OneRank(V))
    assert all(one.error is None for one in expected)
    ranks, _ = choose_sharded(logits, choices, size, padded)
    for found in ranks:
        for one, other in zip(found, expected, strict=True):
            assert (one.token, one.logprob, one.top) == (other.token, other.logprob, other.top)
            for ours, whole in ((one.logits, other.logits), (one.scores, other.scores)):
                assert (ours is None) == (whole is None)
                assert ours is None or whole is None or torch.equal(ours, whole)


def test_a_rank_may_have_no_columns() -> None:
    logits = some_logits(3, vocab=5)
    choices = [a_choice(Sampling(temperature=0)), a_choice(Sampling()), a_choice(Sampling(top_k=2))]
    expected = tokens(choose(logits, choices, OneRank(5)))
    for padded in (True, False):
        ranks, _ = choose_sharded(logits, choices, 4, padded)  # of 2, 2, 1 and 0
        assert [tokens(found) for found in ranks] == [expected] * 4


def test_a_head_that_is_not_sharded_exchanges_nothing() -> None:
    class Refusing:
        rank, size, vocab = 1, 2, V

        def all_gather(self, tensor: Tensor) -> list[Tensor]:
            raise AssertionError

    logits = some_logits(2)
    choices = [a_choice(Sampling()), a_choice(Sampling(top_k=3))]
    assert tokens(choose(logits, choices, Refusing())) == tokens(choose(logits, choices, OneRank(V)))


def test_padding_of_whole_rows_is_no_token() -> None:
    logits = torch.nn.functional.pad(some_logits(2), (0, 3), value=1e9)
    choices = [a_choice(Sampling(temperature=0)), a_choice(Sampling(top_k=3))]
    assert tokens(choose(logits, choices, OneRank(V))) == tokens(choose(logits[:, :V], choices, OneRank(V)))


@pytest.mark.parametrize("kind", [{"temperature": 0}, {}, {"logit_bias": {5: 2.0}}], ids=str)
def test_simple_rows_exchange_two_numbers_per_rank(kind: dict[str, Any]) -> None:
    _, meeting = choose_sharded(some_logits(8), [a_choice(Sampling(**kind), seed=i) for i in range(8)], 2)
    assert (meeting.calls, meeting.numbers) == (1, 2 * 8)


def test_the_first_of_equal_tokens_wins() -> None:
    logits = torch.zeros(1, V)
    logits[0, [20, 21, 50]] = 4.0
    for size in (1, 2, 3, 4):
        for fields in ({}, {"logprobs": 2}):
            ranks, _ = choose_sharded(logits, [a_choice(Sampling(temperature=0, **fields))], size)
            assert {tokens(found)[0] for found in ranks} == {20}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_token_does_not_depend_on_the_company(kind: dict[str, Any]) -> None:
    logits = some_logits(16, dtype=torch.float32)
    others = [a_choice(Sampling(**KINDS[i % len(KINDS)]), seed=i) for i in range(16)]
    mine = a_choice(Sampling(**kind), seed=123)
    alone = choose(logits[3:4], [mine], OneRank(V))[0]
    company = choose(logits, [*others[:3], mine, *others[4:]], OneRank(V))[3]
    assert alone == company


# --- log probabilities, errors -------------------------------------------------------------------------------------


def test_log_probabilities_are_of_the_models_own_distribution() -> None:
    logits = some_logits(1)
    sampling = Sampling(temperature=0, logprobs=3, logit_bias={8: 100.0})
    found = choose(logits, [a_choice(sampling)], OneRank(V))[0]
    expected = logits[0].log_softmax(-1)
    assert found.token == 8 and found.logprob == pytest.approx(expected[8].item(), abs=1e-12)
    best = expected.sort(descending=True)
    assert found.top is not None and [token for token, _ in found.top] == best.indices[:3].tolist()
    assert [value for _, value in found.top] == pytest.approx(best.values[:3].tolist(), abs=1e-12)


def test_log_probabilities_of_the_distribution_that_is_drawn_from() -> None:
    sampling = Sampling(temperature=0.5, top_k=2, logprobs=3, processed_logprobs=True)
    found = choose(some_logits(1), [a_choice(sampling, want_scores=True)], OneRank(V))[0]
    assert found.scores is not None and found.top is not None
    assert found.logprob == pytest.approx(found.scores.log_softmax(-1)[found.token].item(), abs=1e-12)
    assert math.exp(found.top[0][1]) + math.exp(found.top[1][1]) == pytest.approx(1.0)
    assert found.top[2][1] == -math.inf


def test_only_the_chosen_log_probability() -> None:
    found = choose(some_logits(1), [a_choice(Sampling(logprobs=0))], OneRank(V))[0]
    assert found.logprob is not None and found.top == ()


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"logprobs": 2}], ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_a_row_without_a_possible_token_is_an_error_of_that_row_alone(fields: dict[str, Any], size: int) -> None:
    logits = some_logits(3)
    logits[2, 30] = math.nan
    choices = [
        a_choice(Sampling(**fields), allowed=mask_of([])),
        a_choice(Sampling(**fields)),
        a_choice(Sampling(**fields)),
    ]
    ranks, _ = choose_sharded(logits, choices, size)
    for first, second, third in ranks:
        assert first.token == -1 and first.error is not None and "expected a possible token, found none" in first.error
        assert second.error is None and second == choose(logits[1:2], choices[1:2], OneRank(V))[0]
        assert third.token == -1 and third.error is not None and "found nan" in third.error


def test_a_mask_that_ends_early_forbids_the_rest() -> None:
    logits = torch.zeros(1, V)
    logits[0, 40] = 9.0
    found = choose(logits, [a_choice(Sampling(temperature=0), allowed=b"\x00\x82")], OneRank(V))
    assert tokens(found) == [9]


def test_minimum_length_forbids_the_end() -> None:
    logits = torch.zeros(2, V)
    logits[:, 5] = 9.0
    sampling = Sampling(temperature=0, min_tokens=2, eos_token_ids=(5,))
    assert tokens(
        choose(logits, [a_choice(sampling, history=(1, 2, 3)), a_choice(sampling, history=(1, 2, 3, 4))], OneRank(V))
    ) == [0, 5]
