"""Types of causal models: tokens and logits of requests that run together equal those of each alone through the whole
forward. ``-m full`` runs all types that transformers registers, and has the reasons of those that are refused."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from tests.hf.zoo import CAUSAL, WITHOUT_ATTENTION, make
from tests.serving.served import PROMPTS, alone, generated, serving, worst
from tests.support.ranks import run_ranks

SOME = ["llama", "gpt2", "gemma3_text", "gpt_oss", "mixtral", "deepseek_v3", "falcon", "doge"]


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


BOTH_SIDES = r"autopar\.attention\.default .* queries attend to later tokens"
STATE = r"aten\.conv1d\.default .* windows of a convolution overlap"
COUNTED = r"aten\.cumsum\.default"  # positions are numbers of tokens that are no padding
REFUSED = {
    **dict.fromkeys(
        ("bert-generation", "bert", "big_bird", "electra", "ernie", "megatron-bert", "rembert", "roc_bert",
         "roformer"), BOTH_SIDES,
    ),
    **dict.fromkeys(
        ("falcon_h1", "nemotron_h", "olmo_hybrid", "bailing_hybrid", "bamba", "falcon_mamba", "granitemoehybrid",
         "jamba", "lfm3", "mamba", "mamba2", "qwen3_5_text", "qwen3_next"), STATE,
    ),
    **dict.fromkeys(
        ("camembert", "data2vec-text", "roberta-prelayernorm", "roberta", "xlm-roberta-xl", "xlm-roberta"), COUNTED
    ),
    "deepseek_v4": r"aten\.slice\.Tensor .*compressor",
    "minimax": r"aten\.matmul\.default",
    "xlm": r"aten\.lt\.Tensor",
    "cpmant": "in cpmant needs all tokens",
    "rwkv": r"aten\.pad\.default",
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("kind", [*CAUSAL, *WITHOUT_ATTENTION])
def test_every_type(kind: str) -> None:
    (found,) = run_ranks(1, serves, kind)
    if kind in REFUSED:
        assert re.fullmatch(rf"serve: .*{REFUSED[kind]}.*; generate with the model itself", str(found)), found
    else:
        assert isinstance(found, float) and found < 1e-12, found


def test_most_types_are_served() -> None:
    assert len({*CAUSAL, *WITHOUT_ATTENTION} - {*REFUSED}) >= 95
