"""Experts in eight bits: the operators, what the plan scales, and the same numbers on every mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.adapters.dispatch import DispatchMode
from autopar.cost.flops import flops
from autopar.ops.few_bits import scaled_experts as scaled
from autopar.ops.few_bits.eager_products import ScaledProducts
from autopar.ops.few_bits.scaled_experts import scaled_experts
from autopar.ops.few_bits.scaled_products import scaled_linear
from autopar.precision import PRECISIONS, Precision
from autopar.testing.harness import MeshRun
from autopar.testing.reference import eager
from tests.support.ranks import refusal, run_ranks
from tests.support.subjects import make
from tests.zero.test_few_bits import BY_ROW, BY_TOKEN, EXACT, compiled, trained

ours = torch.ops.autopar
BLOCKS = dataclasses.replace(EXACT, scaling="block", wide_weight_gradient=True)
COUNTS = (5, 0, 18, 9)  # rows of each expert; three more are no one's
ROWS, INNER, COLUMNS = sum(COUNTS) + 3, 32, 64


# --- operators -------------------------------------------------------------------------------------------------


def layer(transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rows, weight, offsets and a gradient of the result, with magnitudes that differ from row to row."""
    torch.manual_seed(0)
    rows = (torch.randn(ROWS, INNER) * torch.logspace(-3, 3, ROWS)[:, None]).double().requires_grad_()
    weight = torch.randn(len(COUNTS), COLUMNS, INNER).double()
    weight = (weight.transpose(1, 2).contiguous() if transposed else weight).requires_grad_()
    return rows, weight, torch.tensor(COUNTS).cumsum(0).int(), torch.randn(ROWS, COLUMNS).double()


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_expert_is_a_layer_with_scales_of_rows(scaling: str, wide: bool, transposed: bool) -> None:
    rows, weight, offsets, grad = layer(transposed)
    out = scaled_experts(rows, weight, offsets, transposed, scaling, wide)
    found = torch.autograd.grad(out, (rows, weight), grad)
    assert not out[offsets[-1] :].any() and not found[0][offsets[-1] :].any()
    matrices = weight.transpose(1, 2) if transposed else weight
    how = ("block", True) if scaling == "block" else ("row", wide)
    parts = [
        scaled_linear(mine, matrix, None, *how) if len(mine) else mine.new_zeros(0, COLUMNS)
        for mine, matrix in zip(rows[: offsets[-1]].split(COUNTS), matrices, strict=True)
    ]
    expected = torch.cat(parts)
    torch.testing.assert_close(out[: offsets[-1]], expected, rtol=0, atol=1e-12 * float(expected.detach().abs().max()))
    for one, other in zip(found, torch.autograd.grad(expected, (rows, weight), grad[: offsets[-1]]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * float(other.abs().max()))
    exact = ours.grouped_mm(rows, weight, offsets, transposed)
    assert 1e-3 < (out - exact).norm() / exact.norm() < 0.1


def test_magnitudes_of_groups() -> None:
    x = torch.randn(8, 3)
    x[1, 0], x[6:] = torch.nan, 1e9
    found = ours.largest_by_group(x, torch.tensor([2, 2, 6]))
    assert found[0, 0].isnan() and torch.equal(found[0, 1:], x[:2, 1:].abs().amax(0))
    assert torch.equal(found[1:], torch.stack((torch.zeros(3), x[2:6].abs().amax(0))))


class Calls(DispatchMode):
    """The arguments of torch's grouped kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_grouped_mm.default:
            self.found.append(args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("transposed", [False, True])
def test_what_torchs_kernel_is_given(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks of shapes, strides and dtypes run on tensors without data."""
    monkeypatch.setattr(scaled, "_has_kernel", lambda *_: True)
    size, dim = ((4, INNER, COLUMNS), 1) if transposed else ((4, COLUMNS, INNER), 2)
    of_weight = [1 if i == dim else n for i, n in enumerate(size)]
    scales = torch.empty(ROWS, 1, device="meta"), torch.empty(of_weight, device="meta")
    q, w = (torch.empty(s, dtype=torch.float8_e4m3fn, device="meta") for s in ((ROWS, INNER), size))
    offsets = torch.empty(len(COUNTS), dtype=torch.int32, device="meta")
    with Calls() as calls:
        out = scaled.product(q, w, *scales, offsets, transposed, torch.bfloat16)
    assert out.shape == (ROWS, COLUMNS) and out.dtype == torch.bfloat16
    ((_, matrices, of_rows, of_columns, *_),) = calls.found
    assert matrices.shape == (4, INNER, COLUMNS) and matrices.stride(1) == 1
    assert of_rows.shape == (ROWS,) and of_columns.shape == (4, COLUMNS)


# --- what is scaled --------------------------------------------------------------------------------------------


def test_the_plan_says_what_is_scaled() -> None:
    step = compiled(make("mixtral"), {"ep": 2}, EXACT)
    experts = {n: why for n, why in step.plan.products.items() if "experts" in n}
    assert len(experts) == 4 and not any(experts.values())
    assert any("a scale for each row" in why for _, why in step.plan.notes)
    gates = [why for name, why in step.plan.products.items() if name.endswith("gate.weight")]
    assert gates and all("router" in why or "multiples" in why for why in gates)
    products = [n for n in step.stage.forward.graph.graph.nodes if n.target is ours.scaled_grouped_mm.default]
    (local, *_) = (n for n in step.local.graph.nodes if n.target is scaled_experts)
    assert len(products) == 4 and flops(local) == flops(products[0]) > 0


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (dataclasses.replace(EXACT, wide=("experts",)), "wide='experts' names it"),
        (dataclasses.replace(EXACT, scaling="delayed"), "experts: their scales are of rows, which no earlier step had"),
    ],
    ids=["named", "delayed"],
)
def test_experts_that_stay_wide(policy: Precision, says: str) -> None:
    found = compiled(make("mixtral"), {"ep": 2}, policy).plan.products
    assert {why for name, why in found.items() if "experts" in name} == {says}
    assert "" in found.values()


# --- the same on every mesh ------------------------------------------------------------------------------------

CASES: list[tuple[str, dict[str, int], dict[str, Any], Precision]] = [
    ("mixtral", {"ep": 2}, {}, EXACT),
    ("mixtral", {"dp": 2, "ep": 2}, {"zero": 3, "token_dispatcher": "allgather"}, EXACT),
    ("qwen3_moe", {"ep": 2, "tp": 2}, {"sequence_parallel": True}, EXACT),
    ("gpt_oss", {"ep": 2, "cp": 2}, {}, BY_ROW),
    ("mixtral", {"dp": 2}, {"expert_axis": "dp", "zero": 1, "activation_checkpoint": "full"}, EXACT),
    ("qwen3_moe", {"ep": 2}, {"microbatches": 2}, BY_TOKEN),
    ("mixtral", {"dp": 2, "cp": 2}, {}, BLOCKS),
    ("mixtral", {"ep": 2}, {"token_dispatcher": "alltoall_dedup"}, BLOCKS),
    ("mixtral", {"dp": 2}, {"tiles": 2}, BY_TOKEN),
]


@pytest.mark.parametrize(("name", "sizes", "options", "policy"), CASES)
def test_loss_and_gradients_equal_one_process(
    name: str, sizes: dict[str, int], options: dict[str, Any], policy: Precision
) -> None:
    model, batch = make(name)
    step = compiled((model, batch), sizes, policy, **options)
    weights = [n for n, why in step.plan.products.items() if not why]
    experts = [n for n in weights if "experts" in n]
    assert len(experts) == 4
    with ScaledProducts(model, weights, policy.scaling, policy.wide_weight_gradient) as products:
        expected = eager(model, batch)
    assert not products.unmet
    with ScaledProducts(model, set(weights) - set(experts), policy.scaling, policy.wide_weight_gradient):
        assert abs(eager(model, batch).loss - expected.loss) > 1e-8, "experts are rounded"
    assert max(errors.worst for errors in MeshRun(step, model, batch, step.plan.mesh).errors(expected)) < 1e-10


RUNS: list[tuple[str, dict[str, int], dict[str, Any], Precision]] = [
    ("mixtral", {"ep": 2}, {"zero": 3}, EXACT),
    ("mixtral", {"pp": 2}, {"schedule": "zb_h1", "microbatches": 2}, EXACT),
    ("gpt_oss", {"ep": 2}, {"microbatches": 2, "zero": 2}, BY_ROW),
    ("qwen3_moe", {"tp": 2}, {"sequence_parallel": True}, BY_ROW),
]


def test_real_ranks_equal_one_process() -> None:
    for (passed, ratio, text), case in zip(run_ranks(2, verified, timeout=200)[0], RUNS, strict=True):
        assert passed and ratio < 1, (case, text)
        assert "weights are in few bits" in text


def verified() -> list[tuple[bool, float, str]]:
    found = []
    for name, sizes, options, policy in RUNS:
        model, batch = make(name)
        report = autopar.verify(model, autopar.init_mesh("cpu", 60.0, **sizes), batch, precision=policy, **options)
        found.append((report.passed, report.entries[0].ratio, report.wide))
    return found


class Experts(nn.Module):
    """Of one product; ``whole``: returns its sum, too."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.weight, self.whole = nn.Parameter(torch.randn(2, INNER, INNER)), whole

    def forward(self, x: Tensor) -> Any:
        chosen = torch.where(x[:, 0] > 0)[0]
        y = torch.zeros_like(x).index_add(0, chosen, nn.functional.linear(x[chosen], self.weight[0]))
        return (y, y.sum()) if self.whole else y


def test_each_microbatch_scales_its_rows_of_an_expert() -> None:
    torch.manual_seed(0)
    model, rows = Experts(False).double(), [torch.arange(0, 8, 2), torch.arange(1, 8, 2)]
    x = torch.randn(8, INNER).double() * torch.tensor([1, 1e4]).repeat(4)[:, None]

    def gradient(parts: list[Tensor], microbatches: list[Tensor]) -> Tensor:
        with ScaledProducts(model, ["weight"], "tensor", microbatches=microbatches):
            (found,) = torch.autograd.grad(torch.stack([model(part).sum() for part in parts]).sum(), model.weight)
        return found

    found = gradient([x], rows)
    torch.testing.assert_close(found, gradient([x[own] for own in rows], []), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found, gradient([x], []), rtol=1e-9), "the scales differ"
    assert "forward" not in vars(model)
    with ScaledProducts(both := Experts(True), ["weight"], "tensor", microbatches=rows):
        assert "found those of Experts; compare with one microbatch" in refusal(both, x.float())
        assert "no rows of each of 8 examples" in refusal(both, x[:7].float())


def test_the_loss_is_within_a_percent_of_that_in_bfloat16() -> None:
    means = run_ranks(1, trained, mixtral, ("bf16", "fp8"), 16, 16, 20, timeout=120)[0]
    assert means["fp8"] != means["bf16"] and abs(means["fp8"] / means["bf16"] - 1) < 0.01, means
    assert PRECISIONS["fp8"].product


def mixtral(_: str) -> Any:
    return make("mixtral")
