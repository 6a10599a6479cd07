"""Weights that change between requests: the next ones are computed with the new ones, tables and prefixes too."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

import autopar
from autopar.models.tiny import TINY
from tests.serving.served import SIZES, generated, tiny, worst
from tests.support.ranks import run_ranks

PROMPTS = [[3 + (i * 7 + j * 5) % 50 for j in range(n)] for i, n in enumerate((1, 9, 30))]


def changes(kind: str, sizes: dict[str, int], changed: str) -> Any:
    """On rank 0, how far logits are from whole forwards with the weights as they are: before and after parameters were
    scaled, and after a write that tensors do not record; and the tokens found in the cache."""
    model = tiny(kind)
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    parallel = autopar.parallelize(tiny(kind), mesh, lift_to_float64=True)
    apart, cached = [], []
    with autopar.serve(parallel, **SIZES) as server:
        first = server._control.rank == 0

        def serve() -> None:
            found = generated(server, PROMPTS)
            apart.append(worst(model, found, PROMPTS) if first else 0.0)
            cached.append(server.metrics().cached_tokens)

        serve()
        serve()
        for scaled, hidden in ((1.25, False), (0.75, True)):
            for one in (model, parallel):
                with torch.no_grad():
                    for name, p in one.named_parameters():
                        if changed in name:
                            (p.data if hidden else p).mul_(scaled)
            if hidden:
                server.weights_changed()
            serve()
    return apart, cached


@pytest.mark.parametrize(
    ("kind", "sizes", "changed"),
    [("gpt2", {"tp": 2}, ""), ("gpt2", {"tp": 1}, "wpe"), ("llama", {"pp": 2}, "layers.1"), ("llama", {"dp": 2}, "")],
    ids=str,
)
def test_changed_parameters(kind: str, sizes: dict[str, int], changed: str) -> None:
    (apart, cached), *_ = run_ranks(prod(sizes.values()), changes, kind, sizes, changed)
    assert max(apart) < 1e-12
    assert cached[0] < cached[1] == cached[2] == cached[3] or "dp" in sizes  # a replica knows its own prefixes


def trains() -> Any:
    """Requests between the steps of an optimizer."""
    mesh = autopar.init_mesh("cpu", 60.0, dp=2)
    parallel = autopar.parallelize(TINY["llama"].build(), mesh, lift_to_float64=True, zero=3)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    batch = {name: x[mesh.data_rank :: 2] for name, x in TINY["llama"].batch().items()}
    found = []
    with autopar.serve(parallel, **SIZES) as server:
        for _ in range(3):
            model = tiny("llama")
            whole = {name: p.full_tensor() for name, p in parallel.named_parameters()}
            model.load_state_dict(whole)
            found.append(worst(model, generated(server, PROMPTS), PROMPTS))
            parallel(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_between_the_steps_of_an_optimizer() -> None:
    for found in run_ranks(2, trains):
        assert max(found) < 1e-12
