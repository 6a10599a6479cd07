"""From rows of logits to tokens, with the vocabulary sharded over the tp ranks.

The order of processing is that of transformers' `generate`; OpenAI's penalties, which it lacks, follow the repetition
penalty as in vLLM:

    logit bias, repetition penalty, frequency and presence penalty, bad words, minimum length, grammar,
    the request's own processors, temperature, top k, top p, min p

A token is drawn as the largest of score + Gumbel noise. The noise is a function of the request's seed, the position
and the token id alone, by the counter-based random numbers of `autopar.ops.dropout`. So a request has the same
tokens in every batch, on every mesh, after it was interrupted, and on CPU and CUDA.

What acts on single ids runs on each rank's own columns; then two numbers per row and rank, the largest score and its
id, are exchanged. Rows that need the whole distribution (top k, top p, min p, log probabilities, processors) are
gathered, and every rank computes them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from autopar.ops.dropout import random_words
from autopar.serving.step import Chosen, RowChoice

_SITE = 0x5E2E  # keeps the noise apart from the random numbers of other operators
_MOST_LIKELY = 512  # tokens among which the boundary of top p is looked for first
_GOLDEN = 0x9E3779B97F4A7C15  # an odd number: seed * _GOLDEN + position is another one for each position and seed


class VocabExchange(Protocol):
    """The tp ranks that share a row of logits."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def vocab(self) -> int:
        """The number of ids, without padding."""

    def all_gather(self, tensor: Tensor, /) -> list[Tensor]:
        """The tensors of all ranks, of equal shapes, in the order of ranks."""


@dataclass(frozen=True)
class OneRank:
    """A `VocabExchange` of a process that has whole rows."""

    vocab: int
    rank: int = 0
    size: int = 1

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


def choose(logits: Tensor, choices: Sequence[RowChoice], exchange: VocabExchange) -> list[Chosen]:
    """The token of each row of ``logits`` [N, columns of this rank]; equal on all ranks of the exchange.

    Collective over its ranks, which give the same ``choices``. A row without a possible token has `Chosen.error`.
    """
    assert logits.shape[0] == len(choices), f"{len(choices)} choices for logits of shape {list(logits.shape)}"
    shard = _Shard.of(logits, exchange)
    gathered = [i for i, choice in enumerate(choices) if _needs_whole_row(choice)]
    local = [i for i, choice in enumerate(choices) if not _needs_whole_row(choice)]
    found: dict[int, Chosen] = {}
    if local:
        own = [choices[i] for i in local]
        scores = _at_temperature(_processed(_rows(shard.logits, local), own, shard.first), own)
        tokens = _tokens(shard.exchanged(_best(scores, own, shard.first)))
        found |= dict(zip(local, tokens, strict=True))
    if gathered:
        own = [choices[i] for i in gathered]
        rows = shard.whole(_rows(shard.logits, gathered))
        found |= dict(zip(gathered, _of_whole_rows(rows, own), strict=True))
    return [found[i] for i in range(len(choices))]


def _needs_whole_row(choice: RowChoice) -> bool:
    sampling = choice.sampling
    filters = not sampling.greedy and (sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0)
    wanted = choice.want_logits or choice.want_scores or sampling.logprobs is not None
    return bool(filters or wanted or sampling.processors)


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


# --- shards of the vocabulary ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shard:
    """The columns of this rank: ids ``first``, ``first`` + 1, ... The others have up to ``width`` columns.

    autopar shards a dim only if it divides, after padding perhaps; `torch.chunk` gives a last, shorter shard. In both
    the shard of rank r begins at r times the width of the first. A head that is not sharded gives whole rows, and
    nothing is exchanged.
    """

    logits: Tensor
    first: int
    width: int
    exchange: VocabExchange

    @staticmethod
    def of(logits: Tensor, exchange: VocabExchange) -> _Shard:
        columns, vocab = logits.shape[1], exchange.vocab
        if exchange.size == 1 or columns == vocab:
            assert columns >= vocab, f"one rank has {columns} columns of {vocab}"
            return _Shard(logits[:, :vocab] if columns > vocab else logits, 0, vocab, OneRank(vocab))
        assert columns < vocab, f"rank {exchange.rank} has {columns} columns of {vocab}: give whole rows with OneRank"
        width = max(columns, -(-vocab // exchange.size))
        first = exchange.rank * width
        own = max(0, min(first + width, vocab) - first)
        assert own <= columns, f"rank {exchange.rank} of {exchange.size} has {columns} columns of {vocab}, needs {own}"
        return _Shard(logits[:, :own], first, width, exchange)

    def exchanged(self, best: Tensor) -> Tensor:
        """[2, N] of the whole vocabulary from each rank's; the first rank among equals has the lower ids."""
        if self.exchange.size == 1:
            return best
        ranks = torch.stack(self.exchange.all_gather(best))  # [size, 2, N]
        winner = ranks[:, 0].max(0).indices
        return ranks.gather(0, winner.expand(1, 2, -1))[0]

    def whole(self, rows: Tensor) -> Tensor:
        """The rows with all columns."""
        if self.exchange.size == 1:
            return rows
        padded = torch.nn.functional.pad(rows, (0, self.width - rows.shape[1]))
        return torch.cat(self.exchange.all_gather(padded.contiguous()), 1)[:, : self.exchange.vocab]


# --- what acts on single ids ------------------------------------------------------------------------------


@dataclass
class _Entries:
    """Places (row, column) among the columns of this rank, with a number each."""

    first: int
    columns: int
    rows: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)

    def add(self, row: int, ids: Iterable[int], number: float = 0.0) -> None:
        for token in ids:
            if self.first <= token < self.first + self.columns:
                self.rows.append(row)
                self.ids.append(token - self.first)
                self.numbers.append(number)

    def place(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        rows, ids = torch.tensor([self.rows, self.ids], device=scores.device)
        return rows, ids

    def amounts(self, scores: Tensor) -> Tensor:
        return torch.tensor(self.numbers, dtype=scores.dtype, device=scores.device)


def _processed(logits: Tensor, choices: Sequence[RowChoice], first: int) -> Tensor:
    """Scores of the columns from id ``first`` on; ``logits`` itself if nothing changes."""
    kinds = bias, repetition, penalty, forbidden = [_Entries(first, logits.shape[1]) for _ in range(4)]
    for row, choice in enumerate(choices):
        sampling = choice.sampling
        for token, amount in sampling.logit_bias.items():
            bias.add(row, (token,), amount)
        if sampling.repetition_penalty != 1.0:
            repetition.add(row, set(choice.history), sampling.repetition_penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            for token, times in Counter(choice.history[choice.prompt_length :]).items():
                penalty.add(row, (token,), times * sampling.frequency_penalty + sampling.presence_penalty)
        if sampling.bad_words:
            forbidden.add(row, _ends_of_bad_words(choice))
        if choice.generated < sampling.min_tokens:
            forbidden.add(row, sampling.end_ids)
    masked = [row for row, choice in enumerate(choices) if choice.allowed is not None]
    if not masked and not any(entries.rows for entries in kinds):
        return logits
    scores = logits.clone() if logits.dtype in (torch.float32, torch.float64) else logits.float()
    if bias.rows:
        scores[bias.place(scores)] += bias.amounts(scores)
    if repetition.rows:
        at, factor = repetition.place(scores), repetition.amounts(scores)
        scores[at] = torch.where(scores[at] < 0, scores[at] * factor, scores[at] / factor)
    if penalty.rows:
        scores[penalty.place(scores)] -= penalty.amounts(scores)
    if forbidden.rows:
        scores[forbidden.place(scores)] = -math.inf
    for row in masked:
        scores[row].masked_fill_(
            ~_bits(choices[row].allowed or b"", first, scores.shape[1]).to(scores.device), -math.inf
        )
    return scores


def _ends_of_bad_words(choice: RowChoice) -> list[int]:
    """The ids that would complete one."""
    history = choice.history
    return [word[-1] for word in choice.sampling.bad_words if len(word) == 1 or history[1 - len(word) :] == word[:-1]]


def _bits(mask: bytes, first: int, columns: int) -> Tensor:
    """Bits ``first`` to ``first`` + ``columns`` of a little-endian mask; those beyond its end are 0."""
    start, end = first // 8, -(-(first + columns) // 8)
    part = torch.frombuffer(bytearray(mask[start:end].ljust(end - start, b"\0")), dtype=torch.uint8)
    bits = (part.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten()[first - 8 * start :][:columns].bool()


# --- temperature, filters, the draw -------------------------------------------------------------------------


def _column(numbers: Sequence[float], scores: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=scores.dtype, device=scores.device).unsqueeze(1)


def _at_temperature(scores: Tensor, choices: Sequence[RowChoice]) -> Tensor:
    temperatures = [1.0 if choice.sampling.greedy else choice.sampling.temperature for choice in choices]
    if all(t == 1.0 for t in temperatures):
        return scores
    scores = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
    return scores / _column(temperatures, scores)


def _filtered(scores: Tensor, choices: Sequence[RowChoice]) -> Tensor:
    """Scores [N, vocabulary] with -inf where top k, top p or min p removes a token."""
    drawn_from = [choice.sampling if not choice.sampling.greedy else None for choice in choices]
    vocab = scores.shape[1]
    if any(ks := [min(s.top_k, vocab) if s else 0 for s in drawn_from]):
        best = scores.topk(max(ks)).values
        least = best.gather(1, torch.tensor(ks, device=scores.device).sub(1).clamp(min=0).unsqueeze(1))
        active = _column([float(k > 0) for k in ks], scores) > 0
        scores = scores.masked_fill((scores < least) & active, -math.inf)
    if rows := [i for i, s in enumerate(drawn_from) if s and s.top_p < 1.0]:
        removed = _outside_nucleus(scores[rows], [choices[i].sampling.top_p for i in rows])
        scores = scores.index_copy(
            0, torch.tensor(rows, device=scores.device), scores[rows].masked_fill(removed, -math.inf)
        )
    if any(ps := [s.min_p if s else 0.0 for s in drawn_from]):
        least = scores.amax(-1, keepdim=True) + _column(ps, scores).log()  # of probabilities: max * min_p
        scores = scores.masked_fill(scores < least, -math.inf)
    return scores


def _outside_nucleus(scores: Tensor, ps: Sequence[float], number: int = _MOST_LIKELY) -> Tensor:
    """Which tokens top p removes, True: those ahead of which the more likely ones have a mass of p. Of equal scores
    the lower id counts as more likely; in transformers its sort decides, which is not stable.

    Sums are in double precision: else the batch and the device would decide at the boundary. It is looked for among
    the ``number`` largest scores, since a sort of the whole vocabulary takes four times as long, then among more.
    """
    vocab = scores.shape[1]
    largest = scores.topk(min(number, vocab)).values
    likely = (largest.double() - scores.double().logsumexp(-1, keepdim=True)).exp_()
    kept = likely.cumsum(-1).sub_(likely) < _column(ps, likely)
    kept[:, 0] = True
    counts = kept.sum(-1, keepdim=True)
    least = largest.gather(1, counts - 1)
    removed, equal = scores < least, scores == least
    of_equal = counts - (scores > least).sum(-1, keepdim=True)
    if bool((equal.sum(-1, keepdim=True) > of_equal).any()):
        removed |= equal & (equal.cumsum(1) > of_equal)
    if number < vocab and (beyond := kept[:, -1].nonzero().flatten().tolist()):
        removed[beyond] = _outside_nucleus(scores[beyond], [ps[i] for i in beyond], 8 * number)
    return removed


def _best(scores: Tensor, choices: Sequence[RowChoice], first: int) -> Tensor:
    """[2, N], in double precision: the largest score of each row, with noise if the row is sampled, and its id, the
    first among equals. NaN counts as largest. Columns are ids from ``first`` on."""
    sampled = [i for i, choice in enumerate(choices) if not choice.sampling.greedy]
    greedy = [i for i, choice in enumerate(choices) if choice.sampling.greedy]
    if not sampled:
        return _largest(scores, first)
    noisy = _best_with_noise(_rows(scores, sampled), [choices[i] for i in sampled], first)
    if not greedy:
        return noisy
    both = torch.cat([_largest(scores[greedy], first), noisy], 1)
    return both[:, torch.tensor([*greedy, *sampled]).argsort().to(both.device)]


def _largest(scores: Tensor, first: int) -> Tensor:
    if not scores.shape[1]:
        return torch.tensor([[-math.inf], [0.0]], dtype=torch.float64, device=scores.device).repeat(1, len(scores))
    largest = scores.max(-1)
    return torch.stack([largest.values.double(), largest.indices.double() + first])


def _best_with_noise(scores: Tensor, choices: Sequence[RowChoice], first: int) -> Tensor:
    """Gumbel noise is added: 32 random bits in double precision, so probabilities are exact to 2e-10 and equal noise is
    no matter; float32 has too few digits for rare tokens."""
    ids = (scores != -math.inf).any(0).nonzero().squeeze(1)  # after top k they are few
    if not len(ids):
        return _largest(scores, first)
    keys = torch.tensor([_signed(choice.seed * _GOLDEN + choice.position) for choice in choices], device=scores.device)
    seed = torch.zeros((), dtype=torch.int64, device=scores.device)
    words = random_words((len(keys), len(ids)), seed, _SITE, [keys, ids + first], [1 << 62, 1 << 32])
    between = words.to(torch.float64).add_(2**31 + 0.5).mul_(2**-32)  # uniform, above 0 and below 1
    best = _largest((scores if len(ids) == scores.shape[1] else scores[:, ids]) - between.log_().neg_().log_(), 0)
    best[1] = ids[best[1].long()] + first
    return best


def _signed(number: int) -> int:
    """The low 64 bits, as int64."""
    return (number + 2**63) % 2**64 - 2**63


# --- results -------------------------------------------------------------------------------------------------


def _of_whole_rows(rows: Tensor, choices: Sequence[RowChoice]) -> list[Chosen]:
    rows = rows if rows.dtype == torch.float64 else rows.float()
    scores = _processed(rows, choices, 0)
    if any(choice.sampling.processors for choice in choices):
        scores = torch.stack([_own_processors(row, choice) for row, choice in zip(scores, choices, strict=True)])
    scores = _filtered(_at_temperature(scores, choices), choices)
    found = _tokens(_best(scores, choices, 0))
    for i, (choice, chosen) in enumerate(zip(choices, found, strict=True)):
        if choice.want_logits:
            chosen.logits = rows[i].to("cpu", copy=True)  # it is sent to other ranks
        if choice.want_scores:
            chosen.scores = scores[i].to("cpu", copy=True)
        if choice.sampling.logprobs is not None and chosen.error is None:
            source = scores if choice.sampling.processed_logprobs else rows
            _add_logprobs(chosen, source[i].log_softmax(-1), choice.sampling.logprobs)
    return found


def _own_processors(row: Tensor, choice: RowChoice) -> Tensor:
    """On the CPU, where the tensors that processors hold are on every rank."""
    scores, ids = row.clone().cpu().unsqueeze(0), torch.tensor([choice.history])
    for processor in choice.sampling.processors:
        scores = processor(ids, scores)
    return scores[0].to(row.device)


def _add_logprobs(chosen: Chosen, logprobs: Tensor, number: int) -> None:
    chosen.logprob = logprobs[chosen.token].item()
    best = logprobs.topk(min(number, len(logprobs)))
    pairs: list[tuple[int, float]] = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    chosen.top = tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def _tokens(best: Tensor) -> list[Chosen]:
    values, ids = best.tolist()
    return [_chosen(value, int(token)) for value, token in zip(values, ids, strict=True)]


def _chosen(value: float, token: int) -> Chosen:
    if math.isnan(value):
        return Chosen(-1, error="sampling: expected logits that are numbers, found nan; check the model's weights")
    if value == -math.inf:
        what = "the grammar, bad words, biases and minimum length together forbid all; allow one"
        return Chosen(-1, error=f"sampling: expected a possible token, found none: {what}")
    return Chosen(token)
