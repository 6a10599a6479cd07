"""precision=: parameters stored in one dtype, used in another, gradients summed in a third."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.capture.front_end import capture
from autopar.compile.model import compile_model
from autopar.ir.graph import outputs, placeholders
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.plan import Plan
from autopar.precision import PRECISIONS, Precision
from autopar.verification import computing_in, reference
from tests.support.ranks import run_ranks
from tests.support.subjects import tiny

HALF = PRECISIONS["bf16"]
SINGLE = Precision("float32", "float64", "float64")  # its errors are so small that a wrong sum stands out
Found = dict[str, Any]


def made(name: str, layers: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    return tiny(name, layers)


def mean_error(found: dict[str, Tensor], expected: dict[str, Tensor | None]) -> float:
    """Mean over the parameters of the relative error of their gradients. Where that is zero but for rounding (keys'
    biases, which a softmax does not see), there is none."""
    there = {name: x for name, x in expected.items() if x is not None}
    assert found.keys() == there.keys()
    noise = 1e-12 * max(float(x.norm()) for x in there.values())
    errors = [float((found[n].double() - x).norm() / x.norm()) for n, x in there.items() if x.norm() > noise]
    return sum(errors) / len(errors)


@functools.cache
def exact_step(name: str, layers: int) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradients of one process in float64."""
    loss, gradients = reference(*made(name, layers), lift_to_float64=True)
    return float(loss), gradients


def exact_gradients(name: str, layers: int) -> dict[str, Tensor | None]:
    return exact_step(name, layers)[1]


@functools.cache
def alone(name: str, layers: int, policy: Precision) -> tuple[float, float]:
    """One process in the dtypes of a policy: (loss, error of its gradients)."""
    model, batch = made(name, layers)
    loss, found = reference(computing_in(model, policy), batch, lift_to_float64=False)
    there = {n: g for n, g in found.items() if g is not None}
    return loss, mean_error(there, exact_gradients(name, layers))


def step(name: str, layers: int, sizes: dict[str, int], policy: Precision, options: dict[str, Any]) -> Found:
    """On a rank: a step's loss, gradients (of the first rank) and dtypes."""
    model, batch = made(name, layers)
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    part, parts = autopar.dp_rank_and_size(mesh)
    mine = {k: v.chunk(parts)[part] for k, v in batch.items()}
    parallel = autopar.parallelize(model, mesh, example_batch=mine, precision=policy, **options)
    loss = parallel.train_step(**mine)
    gradients = parallel.full_gradients()
    tensors = [x for p in parallel.parameters() for x in (p, p.grad) if x is not None]
    first = dist.get_rank() == 0
    return {"loss": float(loss), "gradients": gradients if first else {}, "dtypes": {str(x.dtype) for x in tensors}}


CASES: list[tuple[str, dict[str, int], dict[str, Any], tuple[Precision, ...]]] = [
    ("llama", {"dp": 2}, {"zero": 0}, (HALF,)),
    ("llama", {"dp": 2}, {"zero": 1, "microbatches": 2}, (HALF,)),
    ("llama", {"dp": 2}, {"zero": 3, "microbatches": 2}, (SINGLE, HALF)),
    ("gpt2", {"dp": 2, "tp": 2}, {"zero": 2, "microbatches": 2, "sequence_parallel": True}, (HALF,)),
    ("llama", {"dp": 2, "tp": 2}, {"zero": 3, "sequence_parallel": True}, (HALF,)),
    ("llama", {"dp": 2, "cp": 2}, {"zero": 3}, (SINGLE,)),
    ("llama", {"dp": 2, "pp": 2}, {"zero": 0, "microbatches": 2, "schedule": "zb_h1"}, (SINGLE,)),
    ("llama", {"dp": 2, "pp": 2}, {"zero": 3, "microbatches": 2, "schedule": "1f1b"}, (HALF,)),
    ("t5", {"pp": 2}, {"microbatches": 2, "schedule": "1f1b"}, (HALF,)),
    ("mixtral", {"dp": 2}, {"zero": 3}, (SINGLE,)),
]
RARE = (0, 2, 4, 7)  # run with -m full only: modes and meshes that others have
MORE = [
    (name, sizes, options, (SINGLE, HALF, PRECISIONS["bf16_pure"]))
    for name in TINY
    for sizes, options in (({"dp": 2}, {"zero": 3, "microbatches": 2}), ({"tp": 2}, {}))
]


def check_errors(
    name: str, sizes: dict[str, int], options: dict[str, Any], policy: Precision, limit: float = 1.1
) -> None:
    """A mesh's gradients are at most a tenth further from float64 than those of one process; its loss is near."""
    layers = 0 if "layer_types" in TINY[name].sizes else 1
    loss, error = exact_step(name, layers)[0], alone(name, layers, policy)[1]
    found = run_ranks(math.prod(sizes.values()), step, name, layers, sizes, policy, options, timeout=120)
    for rank in found:
        assert abs(rank["loss"] - loss) / loss < (1e-5 if policy is SINGLE else 3e-2), (rank["loss"], loss)
        assert {f"torch.{policy.stored}"} <= rank["dtypes"] <= {f"torch.{policy.stored}", "torch.float32"}
    ours = mean_error(found[0]["gradients"], exact_gradients(name, layers))
    assert ours <= limit * error, (ours, error)


def test_cases_cover_what_there_is() -> None:
    often = [case for i, case in enumerate(CASES) if i not in RARE]
    assert {options.get("zero") for _, _, options, _ in often} == {None, 0, 1, 2, 3}
    for policy in (SINGLE, HALF):
        mine = [case for case in often if policy in case[3]]
        assert len({name for name, *_ in mine}) > 1 and len({axis for _, sizes, *_ in mine for axis in sizes}) > 2
    assert {axis for _, sizes, *_ in often for axis in sizes} == {"dp", "tp", "cp", "pp"}
    assert {name for name, *_ in often} == {"llama", "gpt2", "t5", "mixtral"}


@pytest.mark.parametrize(
    ("name", "sizes", "options", "policies"),
    [pytest.param(*case, marks=pytest.mark.full if i in RARE else ()) for i, case in enumerate(CASES)],
    ids=str,
)
def test_gradients_are_as_good_as_those_of_one_process(
    name: str, sizes: dict[str, int], options: dict[str, Any], policies: tuple[Precision, ...]
) -> None:
    for policy in policies:
        check_errors(name, sizes, options, policy)


@pytest.mark.full
@pytest.mark.parametrize(("name", "sizes", "options", "policies"), MORE, ids=str)
def test_all_models_are_as_good_as_in_one_process(
    name: str, sizes: dict[str, int], options: dict[str, Any], policies: tuple[Precision, ...]
) -> None:
    """Over tp the model's own products are rounded before they are added up: where heads are few and keys see few
    others that weighs up to one and a half times (gpt_oss)."""
    for policy in policies:
        check_errors(name, sizes, options, policy, 1.5 if "tp" in sizes else 1.1)


# --- what is kept -------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A batch norm, a buffer, a norm that may be kept, a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.batch_norm, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LayerNorm(8)
        self.table, self.head = nn.Embedding(6, 8), nn.Linear(8, 6, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("shift", torch.rand(8))
        self.shift: Tensor

    def forward(self, x: Tensor, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.batch_norm(self.inner(x)) + self.table(tokens)
        h = self.norm(h) + self.shift.to(h.dtype)
        return {"loss": nn.functional.mse_loss(self.head(h).float(), labels), "h": h}


def mixed_batch() -> dict[str, Tensor]:
    return {"x": torch.rand(8, 8), "tokens": torch.arange(8) % 6, "labels": torch.rand(8, 6)}


def dtypes_in(policy: Precision) -> dict[str, torch.dtype]:
    """Of parameters as they are used (prefix "used"), and as they are stored; of inputs of the loss."""
    gm = capture(Mixed(), mixed_batch(), precision=policy)
    specs = {s.node: s.name for s in gm.meta["signature"].inputs}
    found = {f"used {specs[n.name]}": n.meta["val"].dtype for n in placeholders(gm)}
    return found | {specs[node]: dtype for node, dtype in gm.meta["stored_dtypes"].items()}


def test_buffers_norms_of_batches_and_what_is_named_are_kept() -> None:
    half, single = torch.bfloat16, torch.float32
    found = dtypes_in(PRECISIONS["bf16_pure"])
    assert found["used inner.weight"] == found["inner.weight"] == half
    assert found["used batch_norm.weight"] == found["batch_norm.weight"] == single
    assert found["used shift"] == found["used batch_norm.running_mean"] == found["used labels"] == single
    kept = dtypes_in(Precision("bfloat16", "bfloat16", "float32", keep=("LayerNorm",)))
    assert kept["used norm.weight"] == kept["norm.weight"] == single and found["used norm.weight"] == half


def test_a_kept_module_computes_in_float32() -> None:
    gm = capture(Mixed(), mixed_batch(), precision=Precision("bfloat16", "float32", "float32", keep=("norm",)))
    (norm,) = [n for n in gm.graph.nodes if "layer_norm" in str(n.target)]
    assert norm.meta["val"].dtype == torch.float32
    assert [x.meta["val"].dtype for x in outputs(gm)][1] == torch.bfloat16, "and what comes out is cast back"
    model = computing_in(Mixed(), Precision("bfloat16", "float32", "float32", keep=("norm",)))
    assert model(**mixed_batch())["h"].dtype == torch.bfloat16


def test_what_transformers_keeps_is_kept() -> None:
    model, batch = made("t5", 1)
    autopar.api.load_adapters(model)
    gm = capture(model.float(), batch, precision=PRECISIONS["bf16"])
    nodes, specs = placeholders(gm), gm.meta["signature"].inputs
    used = {spec.name: node.meta["val"].dtype for spec, node in zip(specs, nodes, strict=True)}
    assert {dtype for name, dtype in used.items() if name.endswith(".wo.weight")} == {torch.float32}
    assert used["shared.weight"] == torch.bfloat16


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: Options(precision="bf32"), "precision: expected 'none', 'bf16'.*found 'bf32'"),  # type: ignore[arg-type]
        (lambda: Options(precision=3), "precision: expected a text, found 3"),  # type: ignore[arg-type]
        (lambda: Precision("int8"), "precision.compute: expected one of 'bfloat16'"),
        (lambda: Precision(reduce="float32"), "needs a dtype to compute in"),
        (lambda: Precision("float16", "float16"), "lose small optimizer updates"),
        (lambda: dtypes_in(Precision("bfloat16", keep=("attention",))), "names no module.*'attention'.*BatchNorm1d"),
        (lambda: dtypes_in(Precision("bfloat16", keep=("head",))), "table.weight and head.weight are one parameter"),
        (lambda: Precision("bfloat16", keep="norm"), r"precision.keep: expected a tuple of names"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_policies_that_say_nothing_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        given()


def test_a_plan_remembers_its_precision() -> None:
    model, batch = made("llama", 1)
    policy = Precision("bfloat16", "float32", "float32", keep=("norm",))
    plan = compile_model(model.float(), batch, Mesh.of(dp=2), Options(precision=policy)).plan
    assert Plan.from_json(plan.to_json()).options.precision == policy


# --- verify -------------------------------------------------------------------------------------------------


def verified(exact: bool) -> tuple[bool, str]:
    model, batch = made("llama", 1)
    mesh = autopar.init_mesh("cpu", 30.0, dp=2)
    report = autopar.verify(model.float(), mesh, batch, lift_to_float64=exact, precision="bf16", zero=3)
    return report.passed, report.precision


def test_verify_compares_in_the_precision() -> None:
    for exact, words in ((True, "float64"), (False, "bfloat16")):
        for passed, precision in run_ranks(2, verified, exact):
            assert passed and words in precision


# --- what is around a step ----------------------------------------------------------------------------------


class Small(nn.Module):
    """A batch norm on half precision, and a slope that its result meets."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.slope, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.PReLU(), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.slope(self.norm(self.conv(x))).mean((2, 3))
        return nn.functional.cross_entropy(self.head(h), labels)


def small(_: Any = None) -> Found:
    torch.manual_seed(0)
    model, batch = Small(), {"x": torch.rand(8, 3, 8, 8), "labels": torch.arange(8) % 4}
    _, exact = reference(model.double(), {"x": batch["x"].double(), "labels": batch["labels"]})
    model = model.float()
    _, alone = reference(computing_in(model, PRECISIONS["bf16"]), batch, lift_to_float64=False)
    part = {k: v.chunk(2)[dist.get_rank()] for k, v in batch.items()}
    mesh = autopar.init_mesh("cpu", 30.0, dp=2)
    parallel = autopar.parallelize(model, mesh, example_batch=part, precision="bf16", zero=3)
    parallel.train_step(**part)
    del exact["conv.bias"], alone["conv.bias"]  # zero: the norm takes it off
    found = {n: g for n, g in parallel.full_gradients().items() if n in exact}
    one = mean_error({n: g for n, g in alone.items() if g is not None}, exact)
    parallel.to(torch.bfloat16)
    parallel.train_step(**part)
    try:
        autopar.parallelize(model, mesh, example_batch=part, precision="bf16", lift_to_float64=True)
        said = ""
    except ValueError as error:
        said = str(error)
    return {
        "error": mean_error(found, exact),
        "alone": one,
        "held": {p.dtype for p in parallel.parameters()},
        "said": said,
    }


def test_batch_norms_dtypes_that_change_and_exactness() -> None:
    for found in run_ranks(2, small):
        assert found["error"] <= 1.1 * found["alone"], found
        assert found["held"] == {torch.bfloat16} and "lift_to_float64: computes everything in float64" in found["said"]
