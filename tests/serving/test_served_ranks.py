"""Served models on real ranks: over any mesh the tokens and logits of one process. ``-m full`` runs the product."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from autopar.token_dispatchers import TOKEN_DISPATCHERS
from tests.serving.served import DRAWN, PROMPTS, alone, generated, serving, tiny, worst
from tests.support.ranks import run_ranks


def serves(kind: str, sizes: dict[str, int], options: dict[str, Any]) -> Any:
    """Greedy and drawn tokens; on rank 0, how far the logits are from whole forwards."""
    model = tiny(kind)
    with serving(model, sizes, options) as server:
        found, drawn = generated(server), generated(server, sampling=DRAWN)
        rank = server._control.rank
    apart = worst(model, found) if rank == 0 else 0.0
    assert rank or found.tokens[2] == alone(model, PROMPTS[2])
    return found.tokens, drawn.tokens, apart


def check(kind: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    ((expected, drawn, _),) = run_ranks(1, serves, kind, {"dp": 1}, {})
    for tokens, of_rank, apart in run_ranks(prod(sizes.values()), serves, kind, sizes, options):
        assert tokens == expected and of_rank == drawn
        assert apart < 1e-12


SOME = [
    ("llama", {"tp": 2}, {}),
    ("gemma3", {"pp": 2}, {}),
    ("gpt_oss", {"ep": 2}, {}),
    ("mixtral", {"ep": 2}, {"token_dispatcher": "allgather"}),
    ("mixtral", {"dp": 2, "tp": 2}, {}),
    ("deepseek_v3", {"dp": 2}, {"zero": 3}),
]
DISPATCHERS = [({"ep": 2}, {"token_dispatcher": name}) for name in TOKEN_DISPATCHERS if name != "hierarchical"]
DENSE, EXPERTS = ("llama", "gpt2", "qwen3", "gemma3"), ("gpt_oss", "mixtral", "deepseek_v3")
ALL = [
    *((kind, sizes, {}) for kind in (*DENSE, *EXPERTS) for sizes in ({"tp": 2}, {"pp": 2})),
    *((kind, *how) for kind in EXPERTS for how in DISPATCHERS),
    *((kind, {"ep": 4}, {"token_dispatcher": "hierarchical", "topology": "ep%2=switch"}) for kind in EXPERTS),
    *((kind, {"dp": 2}, {"zero": 3}) for kind in (*DENSE, *EXPERTS)),
    *((kind, {"tp": 2, "ep": 2}, {}) for kind in EXPERTS),
    *((kind, {"pp": 2}, options) for kind in ("llama", "mixtral") for options in (
        {"schedule": "interleaved", "virtual_stages": 2}, {"schedule": "dual_pipe", "microbatches": 4})),
    ("mixtral", {"dp": 2, "tp": 2}, {}),
    ("mixtral", {"dp": 2, "ep": 2}, {}),
    ("llama", {"pp": 2, "tp": 2}, {}),
    ("llama", {"dp": 2, "pp": 2}, {}),
    ("llama", {"tp": 2}, {"sequence_parallel": True}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "sizes", "options"), SOME, ids=str)
def test_equals_one_process(kind: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    check(kind, sizes, options)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "sizes", "options"), ALL, ids=str)
def test_every_mesh(kind: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    check(kind, sizes, options)
