"""Autograd functions of a model are differentiated by their own backward, on every mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autopar.capture import capture
from autopar.mesh import Mesh
from autopar.plan import Options
from tests.harness import check_model


class Rounded(torch.autograd.Function):
    """A straight-through estimator with a learned scale; clipped; one input without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.limit = limit
        return torch.round(x) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        grad *= 3.0  # in place
        return grad * scale * (x.abs() < ctx.limit), (grad * x).sum((0, 1)), None


class Twins(torch.autograd.Function):
    """Two results, one without gradient; setup_context, a keyword, a default; a backward that forbids derivatives."""

    @staticmethod
    def forward(x: Tensor, factor: float = 1.0, shift: float = 0.5) -> tuple[Tensor, Tensor]:
        return (x * factor + shift).sin(), x.argmax(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.factor, ctx.shift = inputs[1:]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x * ctx.factor + grad * ctx.shift, None, None


class Mixed(torch.autograd.Function):
    """A backward that mixes positions: a product with a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.sign(x) @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t() * 2.0, torch.tanh(x).flatten(0, 1).t() @ grad.flatten(0, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale, self.mix = nn.Parameter(torch.rand(12)), nn.Parameter(torch.rand(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        h = Rounded.apply(self.up(x), self.scale, 0.8)
        h, index = Twins.apply(h, factor=2.0)  # type: ignore[no-untyped-call]
        h = Mixed.apply(h, self.mix) + index.unsqueeze(-1)  # type: ignore[no-untyped-call]
        out: Tensor = self.down(h).square().mean()
        return out


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).double()}


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("options", [Options(), Options(zero=3, micro_batches=2)], ids=["plain", "zero3-mb2"])
def test_gradients_are_those_of_the_backward(mesh: str, options: Options) -> None:
    options = options if "dp" in mesh else Options(micro_batches=options.micro_batches)
    result = check_model(Net().double(), batch(), Mesh.parse(mesh), options)
    assert result.worst < 1e-12
    steps = result.compiled.graphs
    assert steps is not None and steps.backward is not None
    for gm in (steps.forward, steps.backward):
        assert not any("with_gradient_of" in str(n.target) for n in gm.graph.nodes if n.op == "call_function")
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    assert sum(n.target in products for n in steps.forward.graph.nodes) == 3  # what was transposed does not run


class Untraceable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float(grad.sum())


class Bad(Net):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Untraceable.apply(self.up(x)).sum()  # type: ignore[no-untyped-call]
        return out


def test_a_backward_that_cannot_be_traced_is_refused() -> None:
    with pytest.raises(ValueError, match=r"capture: .*the backward of the autograd function Untraceable cannot be"):
        capture(Bad().double(), batch())


def test_functions_are_left_alone_afterwards() -> None:
    before = vars(torch.autograd.Function)["apply"]
    capture(Net().double(), batch())
    assert vars(torch.autograd.Function)["apply"] is before
