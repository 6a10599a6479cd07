"""Autograd functions and operators that do not run on fake tensors are operators of the graph, with their backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import Checked, check_model
from tests.support import raw_kernels as raw

MESHES = (("tp=2", {}), ("dp=2", {"zero": 3}), ("dp=2,tp=2", {"microbatches": 2}))


class Net(nn.Module):
    """A norm, a gate and a scan of kernels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.weight, self.decay = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.rand(16))
        self.up, self.gate, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        h: Any = raw.RMSNorm.apply(x, self.weight, 1e-5)  # type: ignore[no-untyped-call]
        x = x + self.down(raw.SwiGLU.apply(self.gate(h), self.up(h)))  # type: ignore[no-untyped-call]
        x = x + raw.Scan.apply(x, self.decay)  # type: ignore[no-untyped-call]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Between(nn.Module):
    """A function of a value that tp cuts."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.function(self.up(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {name: torch.randint(32, (8, 6), generator=g) for name in ("ids", "labels")}


def check(model: nn.Module, mesh: str, **options: Any) -> Checked:
    result = check_model(model.double(), batch(), Mesh.parse(mesh), Options(**options))
    assert result.worst < 1e-12
    return result


@pytest.mark.parametrize("mesh, options", MESHES)
def test_functions_on_memory_are_exact(mesh: str, options: dict[str, Any]) -> None:
    result = check(Net(), mesh, **options)
    names = [str(n.target) for n in result.compiled.stage.forward.graph.graph.nodes if n.op == "call_function"]
    assert {x.split(".")[1].rpartition("_")[0].split("_")[0] for x in names if "autopar_functions" in x} == {
        "RMSNorm", "SwiGLU", "Scan",
    }  # fmt: skip


@torch.library.custom_op("raw_kernels::bare_backward", mutates_args=())
def bare_backward(grad: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(grad.numpy() * (1 - y.numpy() ** 2))


@torch.library.custom_op("raw_kernels::bare", mutates_args=())
def bare(x: Tensor) -> Tensor:
    return torch.from_numpy(np.tanh(x.detach().numpy()))


bare.register_autograd(
    lambda ctx, grad: bare_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)
_library = torch.library.Library("raw_kernels_old", "DEF")
_library.define("tanh(Tensor x) -> Tensor")
_library.impl("tanh", lambda x: torch.from_numpy(np.tanh(x.detach().numpy())), "CPU")


class Old(torch.autograd.Function):
    """Calls an operator that has neither a fake nor a derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        y = torch.ops.raw_kernels_old.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


def old(x: Tensor) -> Any:
    return Old.apply(x)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("function", [bare, old], ids=["custom_op", "Library"])
@pytest.mark.parametrize("mesh, options", MESHES[:2])
def test_operators_without_a_fake(function: Any, mesh: str, options: dict[str, Any]) -> None:
    result = check(Between(lambda x: function(x)), mesh, **options)
    if mesh == "tp=2":
        assert any(s.name == "up.weight" and "tp" in s.placements for s in result.compiled.parameters)


class Sized(torch.autograd.Function):
    """A number of entries as an argument: on a shard it would read behind its end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        out = torch.empty_like(x)
        raw.memory(out)[:count] = np.tanh(raw.memory(x)[:count])
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y), None


def test_a_size_among_the_arguments_is_not_cut() -> None:
    with pytest.raises(ValueError, match=r"autopar_functions\.Sized"):
        check(Between(lambda x: Sized.apply(x.contiguous(), x.numel())), "dp=2")  # type: ignore[no-untyped-call]


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        raw.memory(x)
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class OfModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        raw.memory(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2, None


@pytest.mark.parametrize(
    "function, why",
    [
        (lambda x: Noisy.apply(x), "it draws random numbers"),  # type: ignore[no-untyped-call]
        (lambda x: OfModule.apply(x, nn.Linear(1, 1)), "it takes a Linear"),  # type: ignore[no-untyped-call]
    ],
)
def test_what_an_operator_cannot_be_is_refused(function: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"can neither be traced .* nor be called as one operator: {why}"):
        check(Between(function), "dp=2")
