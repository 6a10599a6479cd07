"""`torch.autograd.grad` within a forward: values of the graph, with their own gradients; refused where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad  # bound before a capture patches anything
from torch.nn import functional as F

from autopar.capture.front_end import capture
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import check_model
from tests.support.cases import Cell, called, check
from tests.support.subjects import SPECIAL

ROWS, WIDTH = 4, 8


class Net(nn.Module):
    """Layers, and what a test makes of them and of an input."""

    def __init__(self, loss: Callable[[Any, Tensor], Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.loss, self.layers = loss, nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self, x.clone().requires_grad_())


def _mlp(*between: nn.Module) -> list[nn.Module]:
    return [nn.Linear(WIDTH, 16), *(between or (nn.Tanh(),)), nn.Linear(16, WIDTH)]


def first(net: Any, x: Tensor) -> Tensor:
    u = net.layers(x)
    return (grad(u.sum(), x, create_graph=True)[0] + u).square().mean()


def second(net: Any, x: Tensor) -> Tensor:
    """The heat equation's: a derivative of a derivative."""
    u = net.layers(x)
    (du,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    (ddu,) = torch.autograd.grad(du[:, :1].sum(), x, create_graph=True)
    return (ddu + du * u).square().mean()


def penalty(net: Any, x: Tensor) -> Tensor:
    """WGAN-GP's, of every layer in float64."""
    found = net.layers(x)
    (g,) = torch.autograd.grad(found, x, torch.ones_like(found), create_graph=True, retain_graph=True)
    return found.mean() + 10 * (g.flatten(1).norm(2, dim=1) - 1).square().mean()


def constant(net: Any, x: Tensor) -> Tensor:
    """Without create_graph the derivative is a number."""
    u = net.layers(x)
    return (grad(u.sum(), x, retain_graph=True)[0] * u).mean()


def within(net: Any, x: Tensor) -> Tensor:
    """With respect to an activation, of which another one that is asked for is made."""
    h = net.layers[0](x)
    k = torch.sin(h)
    gh, gk = grad(net.layers[2](k).square().sum() + h.sum(), (h, k), create_graph=True)
    return (gh * gk).mean()


def detached(net: Any, x: Tensor) -> Tensor:
    """What is detached, or made without gradients, has none in the derivative, either."""
    h = net.layers[0](x)
    with torch.no_grad():
        scale = torch.exp(net.layers[0](x) * 0.1)
    return grad((net.layers[2](h.tanh() * h.detach() * scale)).sum(), x, create_graph=True)[0].square().mean()


def inner_step(net: Any, x: Tensor) -> Tensor:
    """MAML's: a step of the weights, and the loss of the weights after it."""
    w = net.layers[0].weight
    (g,) = grad(F.linear(x, w).square().sum(), w, create_graph=True)
    return net.layers[2](F.linear(x, w - 0.01 * g).tanh()).square().mean()


def unused(net: Any, x: Tensor) -> Tensor:
    u = net.layers(x)
    g, nothing = grad(u.sum(), (x, net.layers[0].bias * 2), create_graph=True, allow_unused=True)
    assert nothing is None
    return g.square().mean() + u.mean()


def by_func(net: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda t: net.layers(t).sum())(x).square().mean()


CASES: dict[str, tuple[Any, ...]] = {
    "first": (first, *_mlp()),
    "second": (second, *_mlp()),
    "norm and softmax": (first, *_mlp(nn.LayerNorm(16), nn.Softmax(-1))),
    "written in place": (first, *_mlp(nn.Softplus(), nn.LeakyReLU(0.2, inplace=True))),
    "dropout of nothing": (first, *_mlp(nn.SiLU(), nn.Dropout(0.0))),
    "a number": (constant, *_mlp()),
    "of an activation": (within, *_mlp()),
    "detached": (detached, *_mlp()),
    "of a weight": (inner_step, *_mlp()),
    "unused": (unused, *_mlp()),
}


def _made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(*CASES[name]).double()


def _batch(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, *(shape or (WIDTH,)), dtype=torch.float64)}


@pytest.mark.parametrize("name", CASES)
def test_exact(name: str) -> None:
    result = check_model(_made(name), _batch(), Mesh.of(dp=2, tp=2), Options(zero=3))
    assert result.worst < 1e-10, str(result)


def test_microbatches() -> None:
    result = check_model(_made("second"), _batch(), Mesh.of(dp=2), Options(microbatches=2))
    assert result.worst < 1e-10, str(result)


def test_convolutions() -> None:
    layers = nn.Conv2d(3, 4, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(4 * 16, 1)
    result = check_model(Net(penalty, *layers).double(), _batch(3, 6, 6), Mesh.of(dp=2))
    assert result.worst < 1e-10, str(result)


def test_layers_that_are_traced_once() -> None:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    assert check_model(Net(second, *blocks).double(), _batch(), Mesh.of(dp=2)).worst < 1e-10


SPECIAL["derivative"] = lambda: (_made("second"), _batch())


def test_real_ranks() -> None:
    check(called(Cell("derivative", Mesh.of(pp=2))))


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * g


def _backward(net: Any, x: Tensor) -> Tensor:
    net.layers(x).sum().backward(retain_graph=True)
    return net.layers(x).mean()


def _of_function(net: Any, x: Tensor) -> Tensor:
    return grad(_Twice.apply(net.layers(x)).sum(), x, create_graph=True)[0].mean()


def _into_buffer(net: Any, x: Tensor) -> Tensor:
    buffer = torch.zeros_like(x)
    buffer[:, 0] = x[:, 1]
    return grad(net.layers(buffer + x).sum(), x, create_graph=True)[0].mean()


def _not_used(net: Any, x: Tensor) -> Tensor:
    return grad(net.layers(x).sum(), net.layers[0].bias * 2, create_graph=True)[0].mean()


@pytest.mark.parametrize("loss, layers, words", [
    (_backward, _mlp(), r"a backward within the forward cannot be captured"),
    (first, _mlp(nn.Dropout(0.5)), r"goes through random numbers \(aten.dropout.default\)"),
    (first, _mlp(nn.BatchNorm1d(16)), "goes through an operator that writes to a buffer"),
    (by_func, _mlp(), r"torch.func.grad, vjp and jacrev cannot .*use torch.autograd.grad\("),
    (_of_function, _mlp(), "goes through autopar.gradient_of.default, whose derivative"),
    (_into_buffer, _mlp(), r"writes in place \(aten.copy_.default\)"),
    (_not_used, _mlp(), "the outputs do not depend on; pass allow_unused=True"),
])  # fmt: skip
def test_refused_with_the_line(loss: Any, layers: Any, words: str) -> None:
    model = Net(loss, *layers).double()
    with pytest.raises(ValueError, match=r"(?s)^capture: .*test_inner_derivatives.py:\d+ .*" + words):
        capture(model, _batch())
    assert not any(p.grad is not None for p in model.parameters())


def test_what_is_patched_is_put_back() -> None:
    before = vars(torch.autograd)["_engine_run_backward"]
    capture(_made("first"), _batch())
    assert vars(torch.autograd)["_engine_run_backward"] is before
