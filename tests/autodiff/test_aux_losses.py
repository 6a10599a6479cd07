"""Losses that balance experts, with microbatches: of the whole batch, or of each one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import parallelize
from autopar.compile.model import compile_model
from autopar.ir.batch import part_of_batch
from autopar.ir.mesh import Mesh
from autopar.lift_to_float64 import LiftFloat32
from autopar.models.hf import exact_experts
from autopar.models.hf_capacity import capped_experts
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.runtime.mesh.process_groups import dp_rank_and_size, init_mesh
from autopar.testing.harness import MeshRun, check_model
from autopar.testing.reference import LIMIT, Expected, eager
from tests.hf import zoo
from tests.support.ranks import run_ranks
from tests.support.subjects import Made, tiny

AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
EACH = Options(microbatches=2, aux_loss_scope="microbatch")
TYPES = ["mixtral", "gpt_oss", "olmoe", "qwen2_moe"]


def masked(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """With padding, of which microbatches have unequal shares."""
    mask = torch.ones_like(batch["input_ids"])
    mask[1, :5], mask[5, :9], mask[6, :3] = 0, 0, 0
    return {**batch, "attention_mask": mask}


def of_any_type(name: str) -> Made:
    """A small model of a type of transformers."""
    model: Any = zoo.make(name, "causal")[0]
    model.config.output_router_logits, model.router_aux_loss_coef = True, AUXILIARY["router_aux_loss_coef"]
    ids = torch.randint(3, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    return model, {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize(
    ("name", "layers", "mesh", "options"),
    [
        ("qwen3_moe", 2, Mesh.of(dp=1), Options(microbatches=4)),
        ("qwen3_moe", 1, Mesh.of(dp=2, ep=2), Options(microbatches=2, zero=3, token_dispatcher="alltoall_dedup")),
        pytest.param(
            *(
                "qwen3_moe",
                1,
                Mesh.of(ep=2, tp=2),
                Options(microbatches=2, token_dispatcher="alltoall", activation_checkpoint="full"),
            ),
            marks=pytest.mark.full,
        ),
        *(pytest.param(name, 2, Mesh.of(ep=2), Options(microbatches=2), marks=pytest.mark.full) for name in TYPES),
        pytest.param("qwen3_moe", 2, Mesh.of(cp=2, ep=2), Options(microbatches=2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_of_the_whole_batch(name: str, layers: int, mesh: Mesh, options: Options) -> None:
    """What each expert was chosen for, padding left out, is counted over all microbatches before a backward."""
    model, batch = tiny(name, layers, **AUXILIARY) if name in TINY else of_any_type(name)
    assert check_model(model, masked(batch), mesh, options).worst < LIMIT


def test_of_the_whole_batch_with_dropout() -> None:
    """The pre-pass drops the same pairs as the step."""
    model, batch = tiny("mixtral", layers=1, **AUXILIARY, attention_dropout=0.3)
    assert check_model(model, batch, Mesh.of(ep=2), Options(microbatches=2)).worst < LIMIT


def own_losses(model: nn.Module, batch: dict[str, Tensor], parts: list[Tensor]) -> Expected:
    """The loss of the whole batch, with the mean of the auxiliary losses that parts of its rows have by themselves."""
    coefficient = float(model.router_aux_loss_coef)  # type: ignore[arg-type]
    model.zero_grad()
    with LiftFloat32(), exact_experts(model):
        whole = model(**batch)
        own = [model(**{name: x[rows] for name, x in batch.items()}).aux_loss for rows in parts]
        loss = whole.loss + coefficient * (torch.stack(own).mean() - whole.aux_loss)
        loss.backward()
    assert abs(own[0] - own[1]) > 1e-4
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return Expected(float(loss.detach()), gradients, {})


ALONE = [pytest.param(mesh, marks=pytest.mark.full) for mesh in (Mesh.of(dp=1), Mesh.of(ep=2))]


@pytest.mark.parametrize("mesh", [*ALONE, Mesh.of(dp=2, ep=2)], ids=str)
def test_of_each_microbatch(mesh: Mesh) -> None:
    """A microbatch is that of all ranks together."""
    model, batch = tiny("qwen3_moe", **AUXILIARY)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])  # captured as `masked` is
    dp = mesh.size("dp")
    per_rank = torch.arange(8).chunk(dp)
    parts = [torch.cat([rows.chunk(2)[i] for rows in per_rank]) for i in range(2)]
    made = compile_model(model, batch, mesh, EACH, lift_to_float64=True, outputs=())
    assert "aten.histc" not in str(made.prologue.graph.graph if made.prologue is not None else "")
    for found in MeshRun(made, model, batch, mesh).errors(own_losses(model, batch, parts)):
        assert found.worst < LIMIT, found


def stepped(facts: dict[str, Any], batch: dict[str, Tensor], axes: dict[str, int], how: dict[str, Any]) -> Any:
    """Loss and whole gradients of a step of real ranks, what experts were chosen for, and the plan."""
    model, _ = tiny("qwen3_moe", **facts)
    mesh = init_mesh("cpu", 60.0, **axes)
    part, parts = dp_rank_and_size(mesh)
    dims = dict.fromkeys(batch, 0)
    mine = part_of_batch(batch, dims, parts, part, axes.get("ep", 1), how["microbatches"])
    parallel = parallelize(model, mesh, lift_to_float64=True, example_batch=mine, **how)
    loss = parallel.train_step(**mine)
    found = {n: p.grad.full_tensor() for n, p in parallel.named_parameters() if p.grad is not None}  # type: ignore[union-attr]
    return float(loss), found, parallel.expert_load(), str(parallel.plan)


def test_on_ranks() -> None:
    """Experts are counted once, though tokens choose them twice."""
    facts = {"layers": 1, **AUXILIARY}
    model, batch = tiny("qwen3_moe", **facts)
    how = {"microbatches": 2, "token_dispatcher": "alltoall_dedup"}
    expected = eager(model, masked(batch))
    for loss, gradients, load, plan in run_ranks(2, stepped, facts, masked(batch), {"ep": 2}, how):
        assert "a forward of each runs before the step" in plan
        assert abs(loss - expected.loss) < LIMIT
        for name, x in expected.gradients.items():
            assert x is None or (gradients[name] - x).abs().max() < LIMIT, name
        assert [int(x.sum()) for x in load.values()] == [batch["input_ids"].numel() * 2]


STAGES = [
    ({"pp": 2, "ep": 2}, {"schedule": "dual_pipe", "token_dispatcher": "alltoall_dedup"}),
    ({"pp": 2, "tp": 2}, {"schedule": "zb_h1", "aux_loss_scope": "microbatch"}),
    pytest.param({"pp": 2, "dp": 2}, {"schedule": "interleaved", "zero": 1}, marks=pytest.mark.full),
]


@pytest.mark.parametrize("layers", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(("axes", "how"), STAGES, ids=str)
def test_stages_go_ahead_together(axes: dict[str, int], how: dict[str, Any], layers: int) -> None:
    """A round of forwards for every layer whose router decides what an expert takes; of tokens that later stages have,
    too. Where auxiliary losses are those of microbatches, only pairs are counted ahead."""
    facts = {} if "aux_loss_scope" in how else AUXILIARY
    facts = {"layers": layers, **facts}
    model, batch = tiny("qwen3_moe", **facts)
    with capped_experts(model, 0.75):
        expected = eager(model, masked(batch))
    how = {**how, "microbatches": 4, "capacity_factor": 0.75}
    for loss, gradients, *_ in run_ranks(4, stepped, facts, masked(batch), axes, how):
        assert abs(loss - expected.loss) < LIMIT
        for name, x in gradients.items():
            assert (expected.gradients[name] - x).abs().max() < LIMIT, name  # type: ignore[operator]


def test_slices_of_tokens_are_too_late() -> None:
    model, batch = tiny("qwen3_moe", layers=1)
    with pytest.raises(ValueError, match=r"token_slices: .*within_capacity.* needs all tokens .* at once"):
        compile_model(model, batch, Mesh.of(pp=2), Options(microbatches=2, schedule="tera_pipe", capacity_factor=1.0))
