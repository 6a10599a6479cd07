"""Servers of real models on real ranks, and what they must generate: each prompt alone through the whole forward.

found = run_ranks(2, generates, "llama", {"tp": 2})       # a rank's `Generated`
check(found[0])
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.lift_to_float64 import LiftFloat32
from autopar.models.hf import exact_experts
from autopar.models.tiny import TINY
from autopar.serving.sampling_params import Sampling
from autopar.serving.server import Server

LENGTH, NEW = 64, 24
PROMPTS = [[3 + (i * 7 + j * 5) % 50 for j in range(n)] for i, n in enumerate((1, 2, 5, 9, 40))]
GREEDY = Sampling(temperature=0.0, max_tokens=NEW, ignore_eos=True)
DRAWN = Sampling(temperature=0.8, top_p=0.9, seed=3, max_tokens=NEW, ignore_eos=True)
SIZES: dict[str, Any] = {"max_length": LENGTH, "step_tokens": 16, "max_running": 8, "page_size": 8}


@dataclass
class Generated:
    """What one rank got: tokens and rows of logits per request."""

    tokens: list[list[int]]
    logits: list[list[Tensor]]


def tiny(kind: str) -> nn.Module:
    return TINY[kind].build().eval()


@contextlib.contextmanager
def serving(
    model: nn.Module, sizes: dict[str, int], options: dict[str, Any] | None = None, timeout: float = 60.0, **more: Any
) -> Iterator[Server]:
    """A server of a model on all ranks, in float64 throughout."""
    mesh = autopar.init_mesh("cpu", timeout, **sizes)
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True, **(options or {}))
    with autopar.serve(parallel, **{**SIZES, **more}) as server:
        yield server


def generated(
    server: Server, prompts: Sequence[Sequence[int]] = PROMPTS, sampling: Sampling | Sequence[Sampling] = GREEDY
) -> Generated:
    tickets = server.complete(prompts, sampling, want_logits=True)
    return Generated([ticket.result() for ticket in tickets], [ticket.logits for ticket in tickets])


def exact(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """The logits [length, V] of a whole forward."""
    with torch.no_grad(), exact_experts(model), LiftFloat32():
        out = model(input_ids=torch.tensor([list(ids)]))
    return (out if isinstance(out, Tensor) else out.logits)[0]


def alone(model: nn.Module, prompt: Sequence[int], count: int = NEW) -> list[int]:
    """The most likely tokens after a prompt, from one whole forward for each."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(exact(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def worst(model: nn.Module, found: Generated, prompts: Sequence[Sequence[int]] = PROMPTS) -> float:
    """How far the logits are from those of whole forwards, relative to the largest of a row; checks the tokens, which
    are the most likely ones."""
    apart = 0.0
    for prompt, tokens, logits in zip(prompts, found.tokens, found.logits, strict=True):
        assert len(tokens) == len(logits), (len(tokens), len(logits))
        expected = exact(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        assert tokens == expected.argmax(-1).tolist(), prompt
        difference = (torch.stack(logits) - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=1e-3)
        apart = max(apart, float(difference.max()))
    return apart
