"""Whole models through the executor of pipelines: what the compiler makes, on real ranks, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compile import compile_model
from autopar.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.placement import nested_piece
from autopar.plan import Options
from autopar.runtime.groups import Groups, init_mesh
from autopar.runtime.pipeline import PipelineExecutor
from tests.harness import eager
from tests.plain_models import Tied, build, tokens
from tests.ranks import run_ranks


def model_and_batch(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    if name == "tied":
        return build(Tied), tokens()
    torch.manual_seed(0)
    return TINY[name].build().double(), TINY[name].batch(8, 6)


def train(name: str, sizes: dict[str, int], options: dict[str, Any]) -> tuple[float, float, int, dict[str, int]]:
    """(gap of the loss, worst gap of a gradient, number of gradients, calls by axis and kind) of one rank."""
    model, batch = model_and_batch(name)
    mesh, groups = Mesh.of(**sizes), Groups(init_mesh("cpu", 30.0, **sizes))
    compiled = compile_model(model, batch, mesh, Options(**options), exact=True, outputs=())
    executor = PipelineExecutor(compiled, groups)
    here, cut = groups.coordinate, mesh.cut_order
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **compiled.local.meta["constants"]}
    placed = {p.name: p.placements for p in compiled.parameters}
    values = {
        n: nested_piece(v.detach(), placed.get(n, {}), cut, here).clone() if n in placed else v
        for n, v in state.items()
    }
    values = {n: v.double() if v.dtype == torch.float32 else v for n, v in values.items()}
    values |= {n: nested_piece(v, compiled.plan.inputs.get(n, {}), cut, here) for n, v in batch.items()}
    parts = [part for i, part in enumerate(compiled.pipeline.parts) if here["pp"] in holders(executor, i)]
    held = {n for part in parts for n in part.parameters}
    result = executor.train_step({n: v for n, v in values.items() if n in held or n not in placed})
    loss, expected = eager(model, batch)
    worst = 0.0
    names = {executor.specs[node].name: g for node, g in result.gradients.items()}
    assert set(names) == {n for n in held if expected[n] is not None}
    for n, gradient in names.items():
        whole = expected[n]
        assert whole is not None
        worst = max(worst, float((gradient - nested_piece(whole, placed[n], cut, here)).abs().max()))
    sent = {f"{axis} {kind}": t.calls for (axis, kind), t in executor.traffic.items()}
    return abs(float(result.losses[0]) - loss), worst, len(names), sent


def holders(executor: PipelineExecutor, part: int) -> set[int]:
    return {executor.order.rank_of[chain[part]] for chain in executor.order.chains}


@pytest.mark.parametrize("name, sizes, options", [
    ("llama", {"pp": 2}, {"schedule": "tera_pipe", "slices": (3, 2, 1)}),
    ("tied", {"pp": 2, "dp": 2}, {"zero": 3, "schedule": "zb_h1"}),
])  # fmt: skip
def test_loss_and_gradients_are_those_of_eager(name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    ranks = Mesh.of(**sizes).world_size
    found = run_ranks(ranks, train, name, sizes, {"micro_batches": 2, **options}, timeout=120)
    if "dp" in sizes:  # once per step, whatever the number of micro-batches
        assert all(calls["dp reduce_scatter"] == calls["dp all_gather"] == 1 for *_, calls in found), found
    assert all(loss < 1e-10 and worst < 1e-10 and count for loss, worst, count, _ in found)
