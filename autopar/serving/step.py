"""What a step computes and what it chose, the rank that runs it, and how a step is sent.

A step is sent as a pickle of plain tuples: page tables and histories as bytes of an array, each request's `Sampling`
as bytes that sender and receiver keep, so that neither costs time per step.
"""

from __future__ import annotations

import functools
import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from autopar.serving.sampling_params import Sampling


@dataclass(frozen=True)
class RowChoice:
    """How the token of one row of logits is chosen; plain data, picklable."""

    sampling: Sampling
    position: int  # of the token to be chosen: its index in the request, prompt included
    seed: int  # of the request
    prompt_length: int
    history: tuple[int, ...] = ()  # prompt and generated tokens; filled if ``sampling.needs_history``
    generated: int = 0  # number of tokens generated so far
    allowed: bytes | None = None  # a grammar's bitmask over the vocabulary; None: all
    want_logits: bool = False  # the row of logits is wanted
    want_scores: bool = False  # the row that the token was drawn from is wanted: processed, after temperature


@dataclass
class Chosen:
    """What was chosen for one row."""

    token: int
    logprob: float | None = None  # if ``sampling.logprobs`` is not None
    top: tuple[tuple[int, float], ...] | None = None  # (id, logprob) of the most likely ones, best first
    logits: Tensor | None = None  # [vocabulary]
    scores: Tensor | None = None  # [vocabulary]
    error: str | None = None  # why no token can be chosen; ``token`` is then -1 and the request ends with "error"


@dataclass(frozen=True)
class Row:
    """One request's tokens in a step."""

    request: int  # id of the request
    tokens: tuple[int, ...]  # at least one
    start: int  # position of the first
    pages: tuple[tuple[int, ...], ...]  # per window kind: the page table; 0: given back
    choice: RowChoice | None = None  # None: no logits are wanted, of a chunk of a prompt that goes on


@dataclass(frozen=True)
class Step:
    """What all ranks do next."""

    rows: tuple[tuple[Row, ...], ...]  # per replica; a replica may have none


class Runner(Protocol):
    """What runs a step on a rank. All ranks run the same steps in the same order."""

    replicas: int
    stages: int  # along pp
    page_size: int  # tokens
    windows: tuple[int, ...]  # per window kind, in tokens; 0: unlimited, which is kind 0
    pages: tuple[int, ...]  # per window kind: pages of its pools, page 0 among them, which is scratch
    page_bytes: tuple[int, ...]  # per window kind: of one page, of all layers on this rank
    replica: int  # of this rank
    has_other_roles: bool  # whether ranks that are not of the mesh take part in its steps
    reporters: tuple[int, ...]  # per replica: the global rank that returns its tokens, one of the last stage

    @property
    def traffic(self) -> Any:
        """Bytes that this rank has sent to other stages, or to ranks of experts, so far: a `Ledger`."""

    @property
    def timeline(self) -> list[Any]:
        """Of roles: when this rank computed what in the last step (`autopar.cost.ping_pong.Interval`)."""

    def refresh(self, changed: bool = False) -> bool:
        """Take the present weights; whether they have changed, which ``changed`` knows already. Called on all ranks,
        between steps, when no request runs."""

    def run(self, step: Step) -> list[Chosen] | None:
        """Run the rows of this rank's replica, maybe none: other replicas may need this rank. On ranks of the last
        stage, one `Chosen` per row with a choice; None elsewhere."""

    def release(self) -> None:
        """Free the memory of the pools until the next step."""

    def end(self, error: BaseException | None = None) -> None:
        """There are no more steps; ``error``: this rank has failed. Called once."""


def packed_step(step: Step) -> Any:
    """A step as plain tuples, to be pickled."""
    return tuple(tuple(map(_packed_row, rows)) for rows in step.rows)


def unpacked_step(packed: Any) -> Step:
    """The step of `packed_step`."""
    return Step(tuple(tuple(map(_unpacked_row, rows)) for rows in packed))


def _packed_row(row: Row) -> Any:
    pages = tuple(_bytes(table) for table in row.pages)
    choice = row.choice
    if choice is None:
        return row.request, row.tokens, row.start, pages, None
    of_choice = (
        _packed_sampling(choice.sampling), choice.position, choice.seed, choice.prompt_length, _bytes(choice.history),
        choice.generated, choice.allowed, choice.want_logits, choice.want_scores,
    )  # fmt: skip
    return row.request, row.tokens, row.start, pages, of_choice


def _unpacked_row(packed: Any) -> Row:
    request, tokens, start, pages, choice = packed
    if choice is not None:
        sampling, position, seed, length, history, *others = choice
        choice = RowChoice(_unpacked_sampling(sampling), position, seed, length, _ints(history), *others)
    return Row(request, tokens, start, tuple(map(_ints, pages)), choice)


def _bytes(numbers: Sequence[int]) -> bytes:
    return array("i", numbers).tobytes()


def _ints(packed: bytes) -> tuple[int, ...]:
    return tuple(array("i", packed))


_MOST_KEPT = 4096
_sent: dict[int, tuple[Sampling, bytes]] = {}  # by identity: a Sampling need not be hashable


def _packed_sampling(sampling: Sampling) -> bytes:
    found = _sent.get(id(sampling))
    if found is None:
        if len(_sent) >= _MOST_KEPT:
            _sent.clear()
        found = _sent[id(sampling)] = sampling, pickle.dumps(sampling)  # holding it keeps its identity unique
    return found[1]


@functools.lru_cache(_MOST_KEPT)
def _unpacked_sampling(packed: bytes) -> Sampling:
    found: Sampling = pickle.loads(packed)
    return found
