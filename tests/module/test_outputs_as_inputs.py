"""Outputs of one model on a mesh as inputs of another: distillation, the discriminator of a GAN, a critic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.support.ranks import refusal, run_ranks


class Teacher(nn.Module):
    """Its hidden values are sharded on tp."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.inner(x))
        return {"hidden": h, "logits": self.out(h)}


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(4, 8)

    def forward(self, x: Tensor, hidden: Tensor, logits: Tensor) -> Tensor:
        h = self.inner(x)
        return nn.functional.mse_loss(h, hidden) + nn.functional.l1_loss(h[:, :4], logits)


def whole_batch() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def steps(student: Any, teacher: Any, x: Tensor, on_mesh: bool) -> tuple[float, Tensor]:
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    found = []
    for number in range(3):
        with torch.no_grad():
            told = teacher(x=x)
        told = {"hidden": told["hidden"] * 2, "logits": told["logits"].softmax(-1)}
        if on_mesh and number != 1:
            found.append(student.train_step(x=x, **told))
        else:
            loss = student(x=x, **told)
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    weight = student.inner.weight
    return float(sum(found)), (weight.full_tensor() if on_mesh else weight).detach()


def on_a_mesh(sizes: dict[str, int]) -> tuple[float, Tensor, str]:
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)
    part, parts = autopar.dp_rank_and_size(mesh)
    x = whole_batch().chunk(parts)[part]
    teacher = autopar.parallelize(Teacher().double(), mesh, example_batch={"x": x})
    example = {"x": x, "hidden": torch.zeros(len(x), 8).double(), "logits": torch.zeros(len(x), 4).double()}
    student = autopar.parallelize(Student().double(), mesh, example_batch=example)
    found = steps(student, teacher, x, on_mesh=True)
    return *found, refusal(lambda: student.train_step(x=x, **teacher(x=x)))


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.full)])
def test_outputs_are_this_ranks_part(sizes: dict[str, int]) -> None:
    loss, weight = steps(Student().double(), Teacher().double(), whole_batch(), on_mesh=False)
    for found, learned, said in run_ranks(torch.Size(sizes.values()).numel(), on_a_mesh, sizes):
        assert abs(found - loss) < 1e-10
        torch.testing.assert_close(learned, weight, rtol=0, atol=1e-10)
        assert "requires a gradient, which only parameters get" in said
