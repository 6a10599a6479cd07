"""Which of a model's outputs are losses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from autopar.api import parallelize
from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.runtime.mesh.process_groups import dp_rank_and_size, init_mesh
from tests.support.ranks import run_ranks


class Beside(nn.Module):
    """Returns what its loss is made of, too, as models do for a log."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name, self.body, self.head = name, nn.Linear(8, 8).double(), nn.Linear(8, 4).double()

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        fit, size = (self.head(h) - target).square().mean(), h.square().mean()
        return {self.name: fit + 0.1 * size, "size": size, "root": (fit + 0.1 * size).sqrt()}


@pytest.mark.parametrize("mesh", [Mesh.of(dp=2), Mesh.of(pp=2)], ids=str)
def test_what_is_called_loss_is_the_loss(mesh: Mesh) -> None:
    """What stands beside it is an output. Of scalars none of which is called so each is one."""
    batch = {"x": torch.randn(8, 8, dtype=torch.float64), "target": torch.randn(8, 4, dtype=torch.float64)}
    for name, count in (("loss", 1), ("total", 3)):
        made = compile_model(Beside(name), batch, Mesh.of(dp=2), Options(), lift_to_float64=True)
        assert len(made.losses) == count
    run_ranks(2, stepped, mesh, batch)


def stepped(mesh: Mesh, batch: dict[str, Tensor]) -> None:
    model, ranks = Beside("loss"), init_mesh("cpu", 60.0, **mesh.sizes)
    parallel = parallelize(copy.deepcopy(model), ranks, example_batch=batch, microbatches=2)
    part, parts = dp_rank_and_size(ranks)
    loss = parallel.train_step(**{name: x.chunk(parts)[part] for name, x in batch.items()})
    right = model(**batch)["loss"]
    right.backward()
    assert isinstance(loss, Tensor)
    torch.testing.assert_close(loss, right.detach(), rtol=1e-12, atol=0)
    gradients = parallel.full_gradients()
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-10, atol=1e-14, msg=name)


class Named(nn.Module):
    """Its inputs have names that Python has something by, which no graph takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4).double()

    def forward(self, input: Tensor, id: Tensor) -> dict[str, Tensor]:
        out = self.layer(input)
        return {"loss": (out * id).square().mean(), "out": out}


def named(mesh: Mesh, options: dict[str, int]) -> None:
    ranks, model = init_mesh("cpu", 60.0, **mesh.sizes), Named()
    batch = {"input": torch.rand(8, 8, dtype=torch.float64), "id": torch.rand(8, 1, dtype=torch.float64)}
    part, parts = dp_rank_and_size(ranks)
    mine = {name: x.chunk(parts)[part] for name, x in batch.items()}
    parallel = parallelize(copy.deepcopy(model), ranks, example_batch=mine, **options)
    right = model(**batch)["loss"]
    right.backward()
    for found in (parallel.train_step(**mine), parallel.eval_step(**mine)["loss"]):
        torch.testing.assert_close(found, right.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(parallel.full_gradients()["layer.weight"], model.layer.weight.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mesh, options", [(Mesh.of(dp=2), {"microbatches": 2}), (Mesh.of(tp=2), {"zero": 0})], ids=str)
def test_inputs_that_python_has_something_by(mesh: Mesh, options: dict[str, int]) -> None:
    run_ranks(2, named, mesh, options)
