"""Gradients that are products are added up within the product, and forward values are left as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.compile.model import compile_model
from autopar.ir.graph import is_call
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.steps.graphs import StepGraph

aten = torch.ops.aten


class Shared(nn.Module):
    """A weight that is used three times; of its products the last two meet in the forward as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.mm(x, self.weight).tanh()
        return (torch.mm(h, self.weight) + torch.mm(x, self.weight)).square().sum()


def count(step: StepGraph | None, target: object) -> int:
    assert step is not None
    return sum(is_call(node, target) for node in step.graph.graph.nodes)  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_only_gradients(checkpoint: str) -> None:
    """Three products for the weight's gradient, two sums of them; F adds two products, beside."""
    torch.manual_seed(0)
    model, batch = Shared(), {"x": torch.randn(4, 6, dtype=torch.float64)}
    stage = compile_model(model, batch, Mesh.of(), Options(activation_checkpoint=checkpoint), outputs=()).stage
    backward = stage.backward or stage.backward_reduce
    assert count(stage.forward, aten.addmm.default) == 0 and count(stage.forward, aten.add.Tensor) == 1
    assert count(backward, aten.addmm.default) == 2 and count(backward, aten.add.Tensor) == 0
