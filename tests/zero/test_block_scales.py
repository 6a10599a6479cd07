"""Products of float8 with a scale for 32 numbers (mxfp8): the numbers, the same on every mesh, refusals, training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compile.model import compile_model
from autopar.cost.flops import node_seconds
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.ops.few_bits.scaled_products import in_blocks, scaled_linear
from autopar.options import Options
from autopar.precision import PRECISIONS, Precision
from autopar.steps.graphs import Compiled
from tests.support.ranks import refusal, run_ranks
from tests.zero.test_few_bits import EXACT, trained, worst

E4 = torch.float8_e4m3fn
BLOCKS = dataclasses.replace(EXACT, scaling="block")
BY_TOKEN = dataclasses.replace(BLOCKS, wide_weight_gradient=True)
WIDER: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4, "max_position_embeddings": 256},
    "gpt2": {"n_embd": 64, "n_positions": 256},
    "mixtral": {},
}
Made = tuple[nn.Module, dict[str, Tensor]]


def made(name: str, tokens: int = 64, rows: int = 4) -> Made:
    """Wide enough for two ranks of tp to hold whole blocks."""
    model = dataclasses.replace(TINY[name], sizes={**TINY[name].sizes, **WIDER[name]})
    return model.build(), model.batch(rows, tokens)


def compiled(subject: Made, sizes: dict[str, int], policy: Precision = BLOCKS, **options: Any) -> Compiled:
    how = Options(precision=policy, **options)
    return compile_model(*subject, Mesh.of(**sizes), how, lift_to_float64=True, outputs=())


# --- numbers ---------------------------------------------------------------------------------------------------


def by_hand(x: Tensor, along: int) -> Tensor:
    """x as its rounded self: each block of 32 by the next power of two above its greatest magnitude over 448."""
    x = x if along else x.t()
    blocks = x.double().unflatten(-1, (-1, 32))
    most = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(most == 0, 1.0, 2.0 ** (most / 448).log2().ceil())
    found = ((blocks / scale).to(torch.float32).to(E4).double() * scale).flatten(-2)
    return found if along else found.t()


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e5])
def test_blocks_by_hand(along: int, size: float) -> None:
    torch.manual_seed(0)
    x = (torch.randn(64, 96).exp() * size).bfloat16()
    x[:32, 32:64] = 0
    q, scale = in_blocks(x, along)
    assert scale.shape == ((64, 3) if along else (2, 96)) and q.dtype == E4
    spread = scale.repeat_interleave(32, along).double()
    assert torch.equal(q.double() * spread, by_hand(x, along))


def test_a_layer_equals_its_three_products_by_hand() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 32, 64).double().requires_grad_(), torch.randn(96, 64).double().requires_grad_()
    grad = torch.randn(2, 32, 96).double()
    y = scaled_linear(x, w, None, "block")
    dx, dw = torch.autograd.grad(y, (x, w), grad)
    a, b, g = x.detach().view(-1, 64), w.detach(), grad.view(-1, 96)
    assert torch.allclose(y.view(-1, 96), by_hand(a, 1) @ by_hand(b, 1).t(), 0, 1e-12)
    assert torch.allclose(dx.view(-1, 64), by_hand(g, 1) @ by_hand(b, 0), 0, 1e-12)
    assert torch.allclose(dw, by_hand(g, 0).t() @ by_hand(a, 0), 0, 1e-12)
    wide = torch.autograd.grad(scaled_linear(x, w, None, "block", True), w, grad)[0]
    assert torch.allclose(wide, g.t() @ a, 0, 1e-12)


def test_what_is_not_finite_stays_so() -> None:
    for bad in (torch.inf, torch.nan):
        x = torch.ones(32, 32)
        x[1, 2] = bad
        found = scaled_linear(x, torch.ones(32, 32), None, "block")
        assert not found[1].isfinite().any() and found[2:].isfinite().all()


# --- the same on every mesh ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, sizes, tokens, options, policy",
    [
        ("llama", {"dp": 2, "tp": 2}, 64, {"zero": 3, "sequence_parallel": True}, BLOCKS),
        ("gpt2", {"tp": 2}, 32, {}, BLOCKS),
        ("gpt2", {"dp": 2}, 32, {"zero": 1}, BLOCKS),
        ("llama", {"cp": 2}, 128, {"cp_load_balance": "zigzag"}, BLOCKS),
        ("llama", {"cp": 2, "dp": 2}, 64, {"cp_load_balance": "contiguous", "zero": 2}, BLOCKS),
        ("mixtral", {"ep": 2}, 32, {}, BLOCKS),
        ("llama", {"dp": 2, "cp": 2}, 20, {}, BY_TOKEN),
    ],
)
def test_loss_and_gradients_equal_one_process(
    name: str, sizes: dict[str, int], tokens: int, options: dict[str, Any], policy: Precision
) -> None:
    subject = made(name, tokens)
    assert worst(subject, compiled(subject, sizes, policy, **options), policy) < 1e-10


RUNS: list[tuple[dict[str, int], dict[str, Any], Precision]] = [
    ({"dp": 2}, {"zero": 3, "microbatches": 2}, BLOCKS),
    ({"tp": 2}, {"sequence_parallel": True}, BLOCKS),
    ({"pp": 2}, {"schedule": "zb_h1", "microbatches": 2}, BLOCKS),
    ({"pp": 2}, {"schedule": "tera_pipe", "microbatches": 2}, BY_TOKEN),
]


def test_real_ranks_equal_one_process() -> None:
    for (passed, ratio, text), case in zip(run_ranks(2, verified, timeout=120)[0], RUNS, strict=True):
        assert passed and ratio < 1, (case, text)
        assert "weights are in few bits: in one process that changes the loss by" in text


def verified() -> list[tuple[bool, float, str]]:
    found = []
    for sizes, options, policy in RUNS:
        model, batch = made("llama")
        mesh = autopar.init_mesh("cpu", 60.0, **sizes)
        report = autopar.verify(model, mesh, batch, precision=policy, **options)
        found.append((report.passed, report.entries[0].ratio, report.wide))
    return found


# --- what is refused -------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "tokens": (lambda: compiled(made("llama", 48), {"dp": 2}), "in blocks of 32 tokens of a row, found 48 at"),
    "chunks of tokens": (
        lambda: compiled(made("llama"), {"cp": 2}, cp_load_balance="zigzag"),
        "in blocks of 32 tokens of a row, found 16 at",
    ),
    "weights": (
        lambda: compiled(made("llama"), {"tp": 4}),
        "shards of whole blocks of 32, found 16 of dim 0 of p_model",
    ),
    "gathers": (lambda: dataclasses.replace(BLOCKS, gather="float8"), "which needs one scale"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    attempt, says = REFUSED[case]
    with pytest.raises(ValueError, match=says):
        attempt()


def test_tokens_matter_where_weights_have_gradients() -> None:
    x, w = torch.randn(5, 32, requires_grad=True), torch.randn(32, 32)
    scaled_linear(x, w, None, "block").sum().backward()
    assert x.grad is not None
    found = scaled_linear(x, w.requires_grad_(), None, "block").sum()
    with pytest.raises(ValueError, match="blocks of 32 tokens of a row, found 5 tokens; use lengths"):
        found.backward()


def test_the_plan_says_what_stays_wide() -> None:
    plan = compiled((TINY["llama"].build(), TINY["llama"].batch(4, 32)), {"dp": 2}).plan
    assert plan.products["model.layers.0.self_attn.k_proj.weight"] == "16 x 32 are no multiples of 32"
    assert plan.products["model.layers.0.self_attn.q_proj.weight"] == ""
    assert (
        "precision",
        "products scaled by block run as wide products of rounded operands on every device",
    ) in plan.notes
    assert "are of float8, scaled by block" in str(plan)
    assert PRECISIONS["mxfp8"].name == "mxfp8" and not PRECISIONS["mxfp8"].scales_by_token


class Rates:
    """A device whose memory is never the limit, and which notes the dtypes of the products that it is asked for."""

    memory, launch = float("inf"), 0.0

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()

    def speed(self, dtype: torch.dtype) -> float:
        self.dtypes.add(dtype)
        return 1.0


@pytest.mark.parametrize(("name", "dtype"), [("fp8_row", E4), ("mxfp8", torch.bfloat16)])
def test_the_price_is_that_of_what_runs(name: str, dtype: torch.dtype) -> None:
    """No kernel multiplies blocks: in the graph that is planned and in the step's."""
    model, batch = made("llama")
    how = Options(precision=PRECISIONS[name])
    step = compile_model(model.float(), batch, Mesh.of(dp=2), how, outputs=())
    for graph, targets in ((step.local, "scaled_linear"), (step.stage.forward.graph, "autopar.scaled_mm.default")):
        rates = Rates()
        nodes = [n for n in graph.graph.nodes if targets in (getattr(n.target, "__name__", ""), str(n.target))]
        assert nodes and all(node_seconds(n, rates) > 0 for n in nodes)  # type: ignore[arg-type]
        assert rates.dtypes == {dtype}


def test_padding_is_refused() -> None:
    assert "padded tokens would change the scales" in run_ranks(1, padded, timeout=60)[0]


def padded() -> str:
    model, batch = made("llama")
    mesh = autopar.init_mesh("cpu", 60.0, dp=1)
    how: dict[str, Any] = {"precision": "mxfp8", "padding": "bucket", "example_batch": batch}
    return refusal(lambda: autopar.parallelize(model.float(), mesh, **how))


# --- training --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [20, pytest.param(200, marks=pytest.mark.full)])
def test_the_loss_is_within_a_percent_of_that_in_bfloat16(steps: int) -> None:
    means = run_ranks(1, trained, made, ("bf16", "mxfp8"), 8, 32, steps, timeout=120)[0]
    assert means["bf16"] < 4.1, "it learns"
    assert means["mxfp8"] != means["bf16"]
    assert abs(means["mxfp8"] / means["bf16"] - 1) < 0.01, means
