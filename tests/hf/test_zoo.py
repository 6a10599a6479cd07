"""Types of transformers that no other test has, as they come; ``-m full`` runs all that are known to work."""

from __future__ import annotations

import itertools

import pytest

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import check_model
from autopar.token_dispatchers import TOKEN_DISPATCHERS
from tests.hf.zoo import CAUSAL, WITHOUT_ATTENTION, make

SOME = [
    ("apertus", "dp=2"),  # minimum of two tensors
    ("falcon_h1", "cp=2"),  # einsum in state-space layers, beside attention
    ("openai-gpt", "cp=2"),  # attention that is not recognised: keys are gathered
    ("codegen", "cp=2,tp=2"),  # attention written out, keys filled by where
    ("gpt_bigcode", "tp=2"),  # one key head, fused with all query heads: whole
    ("hy_v4", "dp=2"),  # computes with its mask
    ("gpt_neox_japanese", "cp=2"),  # a stream that starts at an expanded bias
    pytest.param("deepseek_v4", "cp=2", marks=pytest.mark.full),  # keys with an empty part
    ("mamba2", "tp=2"),
    ("pegasus_x", "cp=2"),  # keys joined from two sequences
    ("xlm", "dp=2"),  # asserts something of values
    ("yoso", "dp=2"),  # an autograd function whose backward is no derivative
]
DIFFERING = ("hy_v4", "deepseek_v4")  # layers, of which the second has experts
FAMILY = {"pegasus_x": "seq2seq", "yoso": "masked"}


@pytest.mark.parametrize(("kind", "mesh"), SOME)
def test_equals_one_process(kind: str, mesh: str) -> None:
    check(kind, mesh, layers=2 if kind in DIFFERING else 1)


def check(kind: str, mesh: str, layers: int) -> None:
    model, batch = make(kind, FAMILY.get(kind, "causal"), layers=layers)
    assert check_model(model, batch, Mesh.parse(mesh)).worst < 1e-10


WITH_EXPERTS = [
    "afmoe", "aria_text", "axk1", "bailing_hybrid", "cohere2_moe", "deepseek_v3", "deepseek_v4", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoe_swa",
    "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "jamba", "jetmoe", "laguna",
    "llama4_text", "longcat_flash", "mimo_v2_flash", "minimax", "minimax_m2", "mixtral", "nemotron_h",
    "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "solar_open",
]  # fmt: skip

ALL = [
    *itertools.product([*CAUSAL, *WITHOUT_ATTENTION], ("dp=2", "tp=2", "cp=2")),
]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "mesh"), ALL)
def test_every_type(kind: str, mesh: str) -> None:
    check(kind, mesh, layers=2)


@pytest.mark.full
@pytest.mark.parametrize("dispatch", TOKEN_DISPATCHERS)
@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_every_type_with_experts(kind: str, dispatch: str) -> None:
    model, batch = make(kind, "causal")
    over_nodes = TOKEN_DISPATCHERS[dispatch].over_nodes  # two nodes of two ranks
    mesh, topology = (Mesh.of(ep=4), "ep%2=switch:450e9,ep/2=switch:50e9") if over_nodes else (Mesh.of(ep=2), None)
    assert check_model(model, batch, mesh, Options(token_dispatcher=dispatch, topology=topology)).worst < 1e-10
