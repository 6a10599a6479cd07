"""Products in eight bits: the operators, what the plan scales, the same numbers on every mesh, and training."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.adapters.dispatch import DispatchMode
from autopar.compile.model import compile_model
from autopar.cost.flops import flops
from autopar.cost.hardware import device_of
from autopar.cost.traffic import step_communication
from autopar.ir.mesh import Mesh
from autopar.ops.declare import COMPILED
from autopar.ops.few_bits.eager_products import ScaledProducts
from autopar.ops.few_bits.scaled_products import scaled_linear
from autopar.ops.kernels.chips import Chip
from autopar.options import Options
from autopar.passes.partition import scale_products
from autopar.plan import Plan
from autopar.precision import PRECISIONS, Precision
from autopar.rewrite.step_checks import StepError
from autopar.runtime.module.argument_checks import check_module
from autopar.steps.graphs import Compiled
from autopar.testing.harness import MeshRun
from autopar.testing.reference import eager
from tests.support.ranks import refusal, run_ranks
from tests.support.subjects import make

ours = torch.ops.autopar
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
EXACT = Precision("float64", "float64", "float64", product="float8")
GATHERED = dataclasses.replace(EXACT, gather="float8")
BY_ROW = dataclasses.replace(EXACT, scaling="row")
BY_TOKEN = dataclasses.replace(BY_ROW, wide_weight_gradient=True)


# --- operators -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left, right", [(E4, E4), (E5, E4), (E4, E5)])
@pytest.mark.parametrize("by_row", [False, True])
def test_the_emulated_product_has_the_bits_of_torchs_kernel(
    left: torch.dtype, right: torch.dtype, by_row: bool
) -> None:
    torch.manual_seed(0)
    for m, k, n in ((32, 64, 16), (128, 512, 64), (5, 16, 32)):
        a, b = torch.randn(m, k).to(left), torch.randn(n, k).to(right).t()
        scales = (torch.rand(m, 1) + 0.1, torch.rand(1, n) + 0.1) if by_row else (torch.rand(1, 1), torch.rand(1, 1))
        for dtype in (torch.bfloat16, torch.float32):
            kernels = torch._scaled_mm(a, b, *scales, out_dtype=dtype)  # type: ignore[misc, arg-type]
            found = ours.scaled_mm(a, b, *scales, dtype)
            if not torch.cpu._is_amx_tile_supported():
                assert torch.equal(found, kernels)
            # There torch's kernel sums in another order, each sum rounded to float32 and the result to its dtype
            most = scales[0] * scales[1] * (a.float().abs() @ b.float().abs()) * k * 2.0**-24
            rounded = kernels.float().abs() * torch.finfo(dtype).eps
            assert ((found.float() - kernels.float()).abs() <= 2 * most + rounded).all()


def test_chips_without_float8_compute_in_half_precision() -> None:
    known = {(8, 0): (False, False), (8, 9): (True, False), (9, 0): (True, True), (10, 0): (True, True)}
    for capability, expected in known.items():
        chip = Chip(capability)
        assert (chip.multiplies_float8(False), chip.multiplies_float8(True)) == expected
    assert not Chip((9, 4), rocm=True).multiplies_float8(False)


def test_scales_map_magnitudes_to_the_greatest_number() -> None:
    magnitudes = torch.tensor([448.0, 300.0, 7.0, 448.0 * 2**-90, 0.0, 1e-40, 448 * 1.0000002, torch.inf, torch.nan])
    for dtype in (torch.float32, torch.float64):
        scale = ours.scale_of(magnitudes.to(dtype), E4, True)
        assert scale[:7].tolist() == [1.0, 1.0, 2.0**-6, 2.0**-90, 1.0, 1.0, 2.0]
        assert scale[7].isinf() and scale[8].isnan()
        exact = ours.scale_of(magnitudes.to(dtype), E4, False)
        assert torch.equal(exact[:3], magnitudes[:3].to(dtype) / 448)


def test_what_is_not_finite_stays_so_and_no_rows_are_no_error() -> None:
    for bad in (torch.inf, torch.nan):
        x, w = torch.ones(4, 16), torch.ones(16, 16)
        x[1, 2] = bad
        assert not scaled_linear(x, w, None, "tensor").isfinite().all()
        assert not scaled_linear(x, w, None, "row")[1].isfinite().any()
    w = torch.ones(16, 16, requires_grad=True)
    scaled_linear(torch.ones(0, 16), w, None, "tensor").sum().backward()
    assert torch.equal(w.grad, torch.zeros(16, 16))  # type: ignore[arg-type]


def by_hand(x: Tensor, dims: tuple[int, ...], format: torch.dtype, power_of_two: bool) -> Tensor:
    """x as its rounded, scaled self."""
    scale = x.abs().amax(dims, keepdim=True) / torch.finfo(format).max
    scale = 2 ** scale.log2().ceil() if power_of_two else scale
    return (x / scale).to(torch.float32).to(format).double() * scale


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_a_layer_equals_its_three_products_by_hand(scaling: str) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 24, 32).double().requires_grad_(), torch.randn(48, 32).double().requires_grad_()
    grad, row = torch.randn(2, 24, 48).double(), scaling == "row"
    y = scaled_linear(x, w, None, scaling)
    dx, dw = torch.autograd.grad(y, (x, w), grad)
    a, b, g = x.detach().view(-1, 32), w.detach(), grad.view(-1, 48)
    last, first = ((1,), (0,)) if row else ((0, 1), (0, 1))
    gradients = E4 if row else E5
    assert torch.allclose(y.view(-1, 48), by_hand(a, last, E4, row) @ by_hand(b, last, E4, row).t(), 0, 1e-12)
    expected = by_hand(g, last, gradients, row) @ by_hand(b, first, E4, row)
    assert torch.allclose(dx.view(-1, 32), expected, 0, 1e-12)
    assert torch.allclose(dw, by_hand(g, first, gradients, row).t() @ by_hand(a, first, E4, row), 0, 1e-12)
    wide = torch.autograd.grad(scaled_linear(x, w, None, scaling, True), w, grad)[0]
    assert torch.allclose(wide, g.t() @ a, 0, 1e-12)


# --- what is scaled --------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """An input layer, a layer, one with odd sizes, a router, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.odd = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 24)
        self.back, self.router, self.head = nn.Linear(24, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.mid = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.first(x).relu()).relu()
        h = h + self.back(self.odd(h))
        weights, _ = self.router(h).softmax(-1).topk(2)
        h = self.mid(h) * weights.sum(-1, keepdim=True)
        return self.head(h).square().mean()


def mixture() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Mixture().double(), {"x": torch.randn(8, 16).double()}


def compiled(made: tuple[nn.Module, Any], sizes: dict[str, int], policy: Precision, **options: Any) -> Compiled:
    how = Options(precision=policy, **options)
    return compile_model(*made, Mesh.of(**sizes), how, lift_to_float64=policy.compute == "float64", outputs=())


def test_the_plan_says_what_is_scaled_and_why_the_rest_is_not() -> None:
    plan = compiled(mixture(), {"dp": 2}, dataclasses.replace(EXACT, wide=("mid",))).plan
    assert plan.products == {
        "first.weight": "the first product",
        "body.weight": "",
        "odd.weight": "24 x 32 are no multiples of 16",
        "back.weight": "32 x 24 are no multiples of 16",
        "router.weight": "a router: its result chooses",
        "mid.weight": "wide='mid' names it",
        "head.weight": "the last product",
    }
    text = str(plan)
    assert "products of 1 of 7 weights are of float8, scaled by tensor" in text
    assert "head.weight" in text and "stays wide: the last product" in text
    assert Plan.from_json(plan.to_json()) == plan
    assert not compiled(mixture(), {"dp": 2}, PRECISIONS["bf16"]).plan.products


@pytest.mark.parametrize(
    "given, says",
    [
        ({"product": "float4"}, "precision.product: expected one of '', 'float8', found 'float4'"),
        ({"product": "float8", "scaling": "column"}, "precision.scaling: expected one of 'tensor', 'delayed', 'row'"),
        ({"scaling": "row"}, "are those of a product"),
        ({"product": "float8", "compute": "float16"}, "the range of float32"),
        ({"product": "float8", "compute": ""}, "needs a dtype to compute in"),
        ({"gather": "float8"}, "are those of a product"),
        ({"product": "float8", "gather": "float8", "scaling": "row"}, "which needs one scale"),
    ],
)
def test_policies_that_cannot_be_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Precision(**{"compute": "bfloat16", **given})


def test_names_that_match_nothing_and_padding_are_refused() -> None:
    with pytest.raises(ValueError, match="wide names no module with a linear layer, found 'midd'"):
        compiled(mixture(), {"dp": 2}, dataclasses.replace(EXACT, wide=("midd",)))
    assert "padded tokens would change the scales" in run_ranks(1, padded, timeout=60)[0]


def padded() -> str:
    model, batch = make("llama")
    mesh = autopar.init_mesh("cpu", 60.0, dp=1)
    return refusal(
        lambda: autopar.parallelize(model.float(), mesh, precision="fp8", padding="bucket", example_batch=batch)
    )


@pytest.mark.parametrize("policy", [EXACT, BY_ROW], ids=["tensor", "row"])
def test_tiles_need_scales_of_single_tokens(policy: Precision) -> None:
    with pytest.raises(ValueError, match="tiles: 2 tiles need products whose scales are each token's own, found"):
        compiled(make("one-layer llama"), {"dp": 2}, policy, tiles=2)


class Float8Linear(nn.Linear):
    """As torchao's conversion makes them."""

    __module__ = "torchao.float8.float8_linear"


class Float8BlockwiseLinear(nn.Linear):
    """Likewise."""

    __module__ = "torchao.prototype.blockwise_fp8_training.linear"


@pytest.mark.parametrize("kind", [Float8Linear, Float8BlockwiseLinear])
def test_a_model_that_torchao_has_converted_is_refused(kind: type[nn.Linear]) -> None:
    says = f"found torchao's {kind.__name__} at 0; pass the model before its conversion"
    with pytest.raises(ValueError, match=says):
        check_module(nn.Sequential(kind(16, 16)))


# --- the graph -------------------------------------------------------------------------------------------------


def test_a_value_is_rounded_once_and_gradients_by_their_format() -> None:
    """q, k and v share their operand, gate and up do: 4 values and 7 weights of each layer, and 7 gradients."""
    step = compiled(make("one-layer llama"), {"dp": 2, "tp": 2}, EXACT, zero=3)
    stage = step.stage
    backward = stage.backward_reduce
    assert backward is not None
    forward, back = (Counter(_formats(graph.graph)) for graph in (stage.forward, backward))
    assert forward == {E4: 4 + 7}
    assert back == {E5: 7, E4: 7}  # weights are gathered and rounded again, activations are saved
    saved = [n.meta["val"].dtype for n in _results(stage.forward.graph)]
    assert saved.count(E4) == 4
    products = [n for graph in (stage.forward, backward) for n in _calls(graph.graph, ours.scaled_mm.default)]
    assert len(products) == 3 * 7


def _calls(gm: Any, target: Any) -> list[Any]:
    return [n for n in gm.graph.nodes if n.target is target]


def _formats(gm: Any) -> list[torch.dtype]:
    return [n.meta["val"].dtype for n in _calls(gm, ours.quantized.default)]


def _results(gm: Any) -> list[Any]:
    return [x for x in next(n for n in gm.graph.nodes if n.op == "output").args[0] if x is not None]


def test_rounding_addends_of_a_gradient_is_a_type_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks of tp hold two heads of keys whole: their gradients are sums, which must be summed first."""
    made = make("one-layer llama")
    step = compiled(made, {"tp": 4}, EXACT)
    layers = [n.args for n in step.local.graph.nodes if n.target is scaled_linear]
    assert [args[8] for args in layers].count(["tp"]) == 2
    monkeypatch.setattr(scale_products, "_pending", lambda *args: ([], [], []))
    with pytest.raises(StepError):
        compiled(made, {"tp": 4}, EXACT)


def gathered_bytes(axis: str, sizes: dict[str, int], gather: str, name: str = "fp8", **options: Any) -> int:
    policy = dataclasses.replace(PRECISIONS[name], gather=gather)
    made = make("llama")
    return step_communication(compiled((made[0].float(), made[1]), sizes, policy, **options))[axis, "all_gather"].bytes


def test_gathers_of_products_move_half_the_bytes() -> None:
    """Weights of the two layers (bfloat16: 2 bytes) are gathered by F and B; the embedding and the head stay wide, and
    are gathered once and twice. Of activations, what the head takes does, once each way."""
    layers = 2 * (32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 64)
    before, after = (gathered_bytes("dp", {"dp": 2}, gather, zero=3) for gather in ("", "float8"))
    assert before - after == layers * 2 * (2 - 1) // 2  # a rank sends its half
    before, after = (gathered_bytes("tp", {"tp": 2}, gather, sequence_parallel=True) for gather in ("", "float8"))
    stream = 8 * 16 * 32 // 2
    assert before - after == 2 * (2 + 2) * stream  # two values of each layer, forward and backward
    assert after - (before - after) == 2 * stream * 2  # the head's, in bfloat16


def test_gathers_once_per_step_are_not_rounded() -> None:
    with pytest.raises(ValueError, match="rounds parameters for each use, found zero=1, which gathers them once"):
        compiled(make("one-layer llama"), {"dp": 2}, GATHERED, zero=1)


def test_the_price_is_that_of_products_in_float8() -> None:
    step = compiled(make("one-layer llama"), {"dp": 2}, EXACT)
    (local, *_) = (n for n in step.local.graph.nodes if n.target is scaled_linear)
    (product, *_) = _calls(step.stage.forward.graph, ours.scaled_mm.default)
    m, k = product.args[0].meta["val"].shape
    assert flops(local) == flops(product) == 2 * m * k * product.meta["val"].shape[1]
    hopper, ampere = (device_of(Options(target_hardware=name)) for name in ("H100", "A100"))
    assert hopper.speed(E4) == pytest.approx(hopper.chip.float8 * hopper.stack.products * hopper.stack.float8)
    assert ampere.speed(E4) == ampere.speed(torch.bfloat16)


# --- the same on every mesh ------------------------------------------------------------------------------------


def worst(made: tuple[nn.Module, dict[str, Tensor]], step: Compiled, policy: Precision) -> float:
    """The largest difference of the loss and of all gradients on a mesh from one process with the same products."""
    model, batch = made
    weights = [name for name, why in step.plan.products.items() if not why]
    assert weights
    with ScaledProducts(model, weights, policy.scaling, policy.wide_weight_gradient) as products:
        expected = eager(model, batch, None)
    assert not products.unmet
    assert abs(expected.loss - eager(model, batch, None).loss) > 1e-8, "it is rounded"
    return max(errors.worst for errors in MeshRun(step, model, batch, step.plan.mesh).errors(expected))


@pytest.mark.parametrize(
    "name, sizes, options, policy",
    [
        ("gpt2", {"dp": 2, "tp": 2}, {"zero": 3, "sequence_parallel": True}, EXACT),
        ("deepseek_v3", {"ep": 2}, {}, BY_ROW),
        ("llama", {"tp": 4}, {"sequence_parallel": True}, BY_ROW),
        ("bert", {"cp": 2}, {}, EXACT),
        ("llama", {"dp": 2}, {"zero": 1}, BY_TOKEN),
        ("llama", {"dp": 2}, {"tiles": 2}, BY_TOKEN),
        ("gpt2", {"dp": 2, "cp": 2}, {"zero": 3}, GATHERED),
        ("llama", {"dp": 2, "tp": 2}, {"zero": 3, "sequence_parallel": True}, GATHERED),
    ],
)
def test_loss_and_gradients_equal_one_process(
    name: str, sizes: dict[str, int], options: dict[str, Any], policy: Precision
) -> None:
    made = make(name)
    assert worst(made, compiled(made, sizes, policy, **options), policy) < 1e-10


class Bytes(DispatchMode):
    """How often each byte stands in every rounded operand, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is ours.quantized.default:
            counts = torch.bincount(out.view(torch.uint8).flatten().long(), minlength=256)
            counts[0] += counts[128]  # -0.0
            counts[128] = 0
            self.found.append(counts)
        return out


@pytest.mark.parametrize("policy", [EXACT, BY_ROW])
def test_rounded_operands_have_the_bits_of_one_process(policy: Precision) -> None:
    """On every rank together, those of replicas as often as there are replicas. (-0.0 counts as 0.0: sums differ.)"""
    made, mesh = make("one-layer llama"), Mesh.of(dp=2, tp=2)
    model, batch = made
    step = compiled(made, {"dp": 2, "tp": 2}, policy, sequence_parallel=True)
    weights = [name for name, why in step.plan.products.items() if not why]
    with Bytes() as alone, ScaledProducts(model, weights, policy.scaling):
        eager(model, batch, None)
    with Bytes() as ranks:
        MeshRun(step, model, batch, mesh).step()
    whole = Counter(_key(x) for x in alone.found)
    assert len(ranks.found) % 4 == 0
    pieces = (sum(ranks.found[i : i + 4]) for i in range(0, len(ranks.found), 4))
    together = {_key(x // r) for x in pieces for r in [_replicas(x, alone.found)] if not (x % r).any()}
    assert together == set(whole)


def _replicas(x: Any, alone: list[Tensor]) -> int:
    """How many copies of an operand of one process the ranks hold."""
    return next(r for r in (1, 2, 4) if any(torch.equal(x, r * y) for y in alone))


def _key(x: Tensor) -> tuple[int, ...]:
    return tuple(x.tolist())


RUNS: list[tuple[dict[str, int], dict[str, Any], Precision]] = [
    ({"dp": 2}, {"zero": 3, "microbatches": 2}, EXACT),
    ({"tp": 2}, {"sequence_parallel": True}, EXACT),
    ({"cp": 2}, {}, BY_ROW),
    ({"pp": 2}, {"schedule": "zb_h1", "microbatches": 2}, EXACT),
    ({"pp": 2}, {"schedule": "tera_pipe", "microbatches": 2}, BY_TOKEN),
    ({"pp": 2}, {"schedule": "tera_pipe", "token_slices": (10, 6)}, EXACT),
    ({"dp": 2}, {"zero": 3}, GATHERED),
    ({"tp": 2}, {"sequence_parallel": True}, GATHERED),
]


def test_real_ranks_equal_one_process_and_say_what_rounding_changes() -> None:
    for (passed, ratio, text), case in zip(run_ranks(2, verified, timeout=120)[0], RUNS, strict=True):
        assert passed and ratio < 1, (case, text)
        assert "weights are in few bits: in one process that changes the loss by" in text
        assert "by 0.0% of their norm" not in text


def verified() -> list[tuple[bool, float, str]]:
    found = []
    for sizes, options, policy in RUNS:
        model, batch = make("llama")
        mesh = autopar.init_mesh("cpu", 60.0, **sizes)
        report = autopar.verify(model, mesh, batch, precision=policy, **options)
        found.append((report.passed, report.entries[0].ratio, report.wide))
    return found


# --- training --------------------------------------------------------------------------------------------------


def chain(generator: torch.Generator, rows: int, tokens: int, classes: int = 64) -> Tensor:
    """Tokens of a random walk: each is followed by one of four."""
    found = [torch.randint(0, classes, (rows,), generator=generator)]
    for _ in range(tokens - 1):
        step = torch.randint(0, 4, (rows,), generator=generator)
        found.append((found[-1] * 5 + 7 * step + 3) % classes)
    return torch.stack(found, 1)


def trained(
    model_of: Callable[[str], Any], policies: tuple[str, ...], rows: int, tokens: int, steps: int
) -> dict[str, float]:
    """Mean loss of the last tenth of the steps, by policy."""
    means = {}
    for policy in policies:
        torch.manual_seed(0)
        model = model_of("llama")[0].float()
        mesh, generator = autopar.init_mesh("cpu", 60.0, dp=1), torch.Generator().manual_seed(1)
        ids = chain(generator, rows, tokens)
        parallel = autopar.parallelize(model, mesh, precision=policy, example_batch={"input_ids": ids, "labels": ids})
        optimizer, losses = torch.optim.AdamW(parallel.parameters(), 3e-3), []
        for _ in range(steps):
            losses.append(float(parallel.train_step(input_ids=ids, labels=ids)))
            optimizer.step()
            optimizer.zero_grad()
            ids = chain(generator, rows, tokens)
        means[policy] = sum(losses[-steps // 10 :]) / len(losses[-steps // 10 :])
    return means


@pytest.mark.parametrize("steps", [20, pytest.param(200, marks=pytest.mark.full)])
def test_the_loss_is_within_a_percent_of_that_in_bfloat16(steps: int) -> None:
    means = run_ranks(1, trained, make, ("bf16", "fp8", "fp8_row"), 16, 16, steps, timeout=120)[0]
    assert means["bf16"] < 4.1, "it learns"
    for policy in ("fp8", "fp8_row"):
        assert means[policy] != means["bf16"]
        assert abs(means[policy] / means["bf16"] - 1) < 0.01, means


def test_an_evaluation_rounds_and_generation_does_not() -> None:
    assert run_ranks(1, evaluated, timeout=120)[0] == (True, True, True)


def evaluated() -> tuple[bool, bool, bool]:
    """(evaluation is rounded, the model generates as one in bfloat16, it is the loss of training)"""
    losses, tokens, trains = [], [], []
    for policy in ("fp8", "bf16"):
        model, batch = make("llama")
        mesh = autopar.init_mesh("cpu", 60.0, dp=1)
        parallel = autopar.parallelize(model.float(), mesh, precision=policy, example_batch=batch)
        trains.append(float(parallel.train_step(**batch)))
        parallel.eval()
        losses.append(float(parallel(**batch).loss))
        tokens.append(parallel.generate(input_ids=batch["input_ids"][:2, :4], max_new_tokens=4))
    return losses[0] != losses[1], torch.equal(*tokens), losses[0] == trains[0]


def test_compiled_kernels_round_alike() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(16, 32).bfloat16(), torch.randn(32, 32).bfloat16()
    magnitude = ours.largest(x, [0, 1])
    scale = ours.scale_of(magnitude, E4, True)
    for op, args in (
        (ours.largest, (x, [1])),
        (ours.scale_of, (magnitude, E4, True)),
        (ours.quantized, (x, scale, E4)),
    ):
        assert torch.equal(COMPILED[op.default](*args).float(), op(*args).float())
    assert F.linear(x, w).sub(scaled_linear(x, w, None, "row")).abs().max() < 2
