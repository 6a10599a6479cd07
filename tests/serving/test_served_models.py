"""Types of causal models: tokens and logits of requests that run together equal those of each alone through the whole
forward. ``-m full`` runs all types that transformers registers, and has the reasons of those that are refused."""

from __future__ import annotations

import contextlib
import io

import pytest

from tests.hf.zoo import make
from tests.serving.served import PROMPTS, alone, generated, serving, worst
from tests.support.ranks import run_ranks

SOME = [
    "llama", "gpt2", "gemma3_text", "gpt_oss", "mixtral", "deepseek_v3", "falcon", "bloom", "gpt_neo", "phi3",
]  # fmt: skip


def serves(kind: str) -> float | str:
    """How far its logits are from the whole forward; or why it is refused."""
    with contextlib.redirect_stderr(io.StringIO()):
        model, _ = make(kind, "causal")
    model.eval()
    try:
        with serving(model, {"dp": 1}) as server:
            found = generated(server)
    except ValueError as error:
        return str(error)
    assert found.tokens[2] == alone(model, PROMPTS[2])
    return worst(model, found)


@pytest.mark.parametrize("kind", SOME)
def test_equals_the_whole_forward(kind: str) -> None:
    (found,) = run_ranks(1, serves, kind)
    assert isinstance(found, float) and found < 1e-12, found
