"""The choice of tokens: the device's are those of the CPU, and what it takes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.serving.choice import OneRank, choose
from autopar.serving.sampling_params import Sampling
from autopar.serving.step import RowChoice
from tests.gpu_check.clock import milliseconds
from tests.gpu_check.processes import Check, Machine
from tests.gpu_check.rows import OK, Row, guarded, judged

VOCAB, ROWS = 32_000, 64
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "bias": {"logit_bias": {5: 20.0, 9: float("-inf")}},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "bad words and minimum": {"bad_words": ((7,), (2, 3)), "min_tokens": 9, "eos_token_ids": (1,)},
    "top k": {"top_k": 50},
    "top p": {"top_p": 0.9},
    "top p, flat": {"top_p": 0.9, "temperature": 20.0},
    "min p": {"min_p": 0.05},
    "log probabilities": {"logprobs": 5},
}


def checks(machine: Machine) -> list[Check]:
    """Tokens, and their time."""
    return [Check("sampling", "tokens", tokens), Check("sampling", "time", times)]


def tokens(machine: Machine) -> Iterator[Row]:
    """Each kind alone, and all in one batch."""
    for dtype in (torch.bfloat16, torch.float32):
        for name in [*KINDS, "mixed"]:
            case = f"{name}, {str(dtype).removeprefix('torch.')}"
            yield from guarded("tokens", case, functools.partial(compared, case, name, dtype, machine.device))


def compared(case: str, name: str, dtype: torch.dtype, device: str) -> Row:
    """Tokens of the device against those of the CPU, from equal logits."""
    logits, choices = some_logits(dtype), some_choices(name)
    expected = [chosen.token for chosen in choose(logits, choices, OneRank(VOCAB))]
    found = [chosen.token for chosen in choose(logits.to(device), choices, OneRank(VOCAB))]
    wrong = sum(a != b for a, b in zip(found, expected, strict=True))
    return judged("tokens", case, float(wrong), 0.0, f"{wrong} of {ROWS} tokens differ" if wrong else "")


def times(machine: Machine) -> Iterator[Row]:
    """Of a step, over that of one argmax."""
    logits = some_logits(torch.float32).to(machine.device)
    for name in ["greedy", "temperature", "top p", "mixed"]:
        yield from guarded("time", name, functools.partial(timed, name, logits, machine.is_gpu))


def timed(name: str, logits: Tensor, is_gpu: bool) -> Row:
    choices = some_choices(name)
    calls = (lambda: choose(logits, choices, OneRank(VOCAB)), lambda: logits.argmax(-1).tolist())
    took = [milliseconds(call, is_gpu=is_gpu) for call in calls]
    words = f"{took[0]:.3f} ms for {ROWS} rows of {VOCAB}, argmax {took[1]:.3f} ms"
    return Row("time", name, OK, took[0] / took[1], "argmax", words)


def some_logits(dtype: torch.dtype) -> Tensor:
    made = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    return made.to(dtype)


def some_choices(name: str) -> list[RowChoice]:
    kinds = list(KINDS.values()) if name == "mixed" else [KINDS[name]]
    history = tuple(range(0, 3000, 7))
    return [
        RowChoice(Sampling(**kinds[row % len(kinds)]), len(history), row, 100, history, len(history) - 100)
        for row in range(ROWS)
    ]
