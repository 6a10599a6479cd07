"""How the token of a row is chosen, and what was chosen."""

from __future__ import annotations

from dataclasses import dataclass

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
