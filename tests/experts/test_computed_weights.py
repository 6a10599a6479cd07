"""Experts whose weights the forward computes, each from parameters of its own: every rank stores a part of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import autopar
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.options import Options
from autopar.runtime.module.parallel_module import step_seed
from autopar.steps.graphs import Compiled
from autopar.testing.harness import check_model
from autopar.testing.reference import compare_step, eager
from tests.experts.written_out import SPELLINGS, E, H, MistralReference, Model, Routed, batch
from tests.support.ranks import run_ranks

LIMIT = 1e-11


def mlp(width: int = 24) -> nn.Module:
    return nn.Sequential(nn.Linear(H, width), nn.GELU(), nn.Linear(width, H))


class Lora(nn.Module):
    """The first product has a weight of low rank on top."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.out = nn.Linear(H, 24, bias=False), nn.Linear(24, H)
        self.a, self.b = nn.Parameter(torch.randn(3, H) / 4), nn.Parameter(torch.randn(24, 3) / 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(F.silu(F.linear(x, self.base.weight + self.b @ self.a)))
        return out


class Fused(nn.Module):
    """Gate and up are halves of one weight."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(H, 2 * width, bias=False), nn.Linear(width, H)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both.weight.chunk(2, 0)
        out: Tensor = self.down(F.silu(F.linear(x, gate)) * F.linear(x, up))
        return out


def normalised() -> nn.Module:
    made = mlp()
    made[0], made[2] = parametrizations.weight_norm(made[0]), parametrizations.weight_norm(made[2], dim=1)
    return made


class Listed(MistralReference):
    """A loop over any modules."""

    def __init__(self, make: Callable[[], nn.Module] = mlp) -> None:
        super().__init__()
        self.experts = nn.ModuleList(make() for _ in range(E))


class Stored(Routed):
    """A function of one parameter for all experts."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__(nn.Identity)
        self.of, self.up, self.down = of, nn.Parameter(torch.randn(E, 24, H) / 4), nn.Parameter(torch.randn(E, H, 24))

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.view(-1, H)
        weights, selected = self.chosen(flat)
        results, up = torch.zeros_like(flat), self.of(self.up)
        for i in range(E):
            token, nth = torch.where(selected == i)
            results[token] += weights[token, nth, None] * F.linear(F.silu(F.linear(flat[token], up[i])), self.down[i])
        return results.view_as(inputs)


class Regularised(Model):
    """Weights of experts are used outside of them, too, as they are and whole."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        experts: Any = self.layers[0].experts
        first, other = experts[0][0].weight, experts[1][0].weight
        return super().forward(ids, labels) + (first @ other.t()).pow(2).mean() + experts[2][2].weight.norm()


def model(make: Callable[[], nn.Module], kind: type[Model] = Model) -> Model:
    return kind(lambda: Listed(make)).double()  # type: ignore[arg-type]


# Name -> (model, its shards of an expert's or of all experts' parameters on ep=2).
FORMS: dict[str, tuple[Callable[[], Model], str]] = {
    "loop": (lambda: Model(SPELLINGS["LitGPT"]).double(), "w1.weight S(0) w2.weight S(0) w3.weight S(0)"),
    "biases": (lambda: model(mlp), "0.bias S(0) 0.weight S(0) 2.bias S(0) 2.weight S(0)"),
    "odd": (lambda: model(lambda: mlp(7)), "0.bias S(0/7) 0.weight S(1) 2.bias S(0) 2.weight S(0)"),
    "lora": (lambda: model(Lora), "a I b S(0) base.weight S(0) out.bias S(0) out.weight S(0)"),
    "halves": (lambda: model(Fused), "both.weight S(0;24x2) down.bias S(0) down.weight S(0)"),
    "odd halves": (lambda: model(lambda: Fused(9)), "both.weight S(1) down.bias S(0) down.weight S(0)"),
    "weight norm": (
        lambda: model(normalised),
        "0.bias S(0) 0.parametrizations.weight.original0 S(0) 0.parametrizations.weight.original1 S(0) "
        "2.bias S(0) 2.parametrizations.weight.original0 I 2.parametrizations.weight.original1 S(0)",
    ),
    "other uses": (lambda: model(mlp, Regularised), "0.bias S(0) 0.weight S(0) 2.bias S(0) 2.weight S(0)"),
    "by expert": (lambda: Model(lambda: Stored(torch.tanh)).double(), "down S(0) up S(0)"),  # type: ignore[arg-type]
    "over experts": (lambda: Model(lambda: Stored(lambda w: w.softmax(0))).double(), "down S(0) up S(1)"),  # type: ignore[arg-type]
}
MESHES = [
    ("ep=2", {}),
    ("ep=4", {}),
    ("dp=2,ep=2", {"zero": 3, "microbatches": 2}),
    ("ep=2,tp=2", {"sequence_parallel": True}),
    ("ep=4,tp=2", {}),
    ("cp=2,dp=2", {"expert_axis": "dp", "zero": 3}),  # ZeRO shards over cp first
    ("cp=2", {"expert_axis": "cp"}),
    ("tp=2", {"expert_axis": "tp"}),
]
OFTEN = ("loop", "odd")  # on the first meshes


def _case(name: str, mesh: str, options: dict[str, Any]) -> Any:
    often = mesh == "ep=2" or (name in OFTEN and (mesh, options) in MESHES[2:4])
    return pytest.param(name, mesh, options, marks=() if often else pytest.mark.full)


@pytest.mark.parametrize(("name", "mesh", "options"), [_case(name, *on) for name in FORMS for on in MESHES])
def test_exact(name: str, mesh: str, options: dict[str, Any]) -> None:
    make, stored = FORMS[name]
    result = check_model(make(), batch(), Mesh.parse(mesh), Options(**options))
    assert result.worst < LIMIT
    if mesh == "ep=2":
        assert shards(result.compiled) == stored


def shards(made: Compiled) -> str:
    """How the first expert's parameters, or those of all experts, are stored on ep."""
    inside = {p.name.removeprefix("layers.0."): p.placements.get("ep", "I") for p in made.parameters}
    own = {name.removeprefix("experts.0."): p for name, p in inside.items() if name.startswith("experts.0.")}
    own = own or {name: p for name, p in inside.items() if name in ("up", "down")}
    return " ".join(f"{name} {own[name]}" for name in sorted(own))


def test_a_stack_is_exchanged_and_not_gathered() -> None:
    """The forward, the backward and the gradients each send what a rank's own experts have, and nothing is reduced."""
    made = check_model(FORMS["loop"][0](), batch(), Mesh.of(ep=2), Options()).compiled
    forward, backward = (str(step.graph.graph) for step in (made.stage.forward, made.stage.backward_reduce) if step)
    exchange = "autopar.all_to_all.default](args = (%stack"
    assert forward.count(exchange) == backward.count(exchange) == 3
    assert backward.count("autopar.all_to_all.default](args = (%grouped_mm_weight_grad") == 3
    whole = [p for p in made.parameters if "experts" in p.name and not isinstance(p.placements["ep"], Shard)]
    assert not whole


def test_the_plan_says_what_is_exchanged() -> None:
    notes = check_model(FORMS["biases"][0](), batch(), Mesh.of(ep=2), Options()).compiled.plan.notes
    assert any("4 weights are computed in the forward (aten.stack.default): every rank of ep stores a part" in x
               for _, x in notes)  # fmt: skip


def _trained(sizes: dict[str, int], how: dict[str, Any]) -> tuple[float, int]:
    """(largest error of a step, stored elements of this rank's experts)"""
    whole, rows = Model(SPELLINGS["LitGPT"], 2).double(), batch()
    expected = eager(whole, rows, step_seed(0, 1))
    groups = autopar.init_mesh("cpu", **sizes)
    index, count = autopar.dp_rank_and_size(groups)
    part = {name: x.chunk(count)[index] for name, x in rows.items()}
    parallel = autopar.parallelize(whole, groups, lift_to_float64=True, example_batch=part, **how)
    loss = parallel.train_step(**part)
    found = compare_step(loss, parallel.full_gradients(), expected, parallel.parameter_specs, lambda spec, whole: whole)
    return found.worst, sum(p.to_local().numel() for n, p in parallel.named_parameters() if "experts" in n)


@pytest.mark.parametrize(
    ("sizes", "how", "shares"),
    [
        pytest.param({"ep": 2}, {}, 2, marks=pytest.mark.full),
        ({"ep": 2, "pp": 2}, {"microbatches": 4, "schedule": "zb_h1", "zero": 2}, 4),
    ],
    ids=str,
)
def test_on_real_ranks(sizes: dict[str, int], how: dict[str, Any], shares: int) -> None:
    whole = sum(p.numel() for n, p in Model(SPELLINGS["LitGPT"], 2).named_parameters() if "experts" in n)
    for error, stored in run_ranks(2 * sizes.get("pp", 1), _trained, sizes, how):
        assert error < 1e-10 and stored == whole // shares
