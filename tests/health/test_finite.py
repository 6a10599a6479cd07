"""``check="finite"``: which module and line a NaN is said to come from, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.lift_to_float64 import LiftFloat32
from autopar.runtime.module.argument_checks import checks_of
from tests.support.plain_models import gap, gradients
from tests.support.ranks import run_ranks
from tests.support.scalar_kernels import scalar_kernels
from tests.support.subjects import tiny


class Block(nn.Module):
    def __init__(self, planted: str) -> None:
        super().__init__()
        self.up, self.down, self.planted = nn.Linear(8, 16), nn.Linear(16, 8), planted

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        if self.planted == "zero by zero":
            h = h / (h.detach() * 0)
        if self.planted == "overflow":
            h = (h * 1e20) * 1e20  # float32
            h = h - h
        if self.planted == "log":
            h = (h * 0).log().exp() * 0 + (h * 0).log() * 0
        if self.planted == "backward":
            h = (h * 0).sqrt() + h
        return x + self.down(h)


class Stack(nn.Module):
    def __init__(self, planted: str, at: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Block(planted if i == at else "") for i in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        masked = torch.where(x > 0, x, float("-inf")).softmax(-1).nan_to_num()  # infinities that harm nobody
        for layer in self.layers:
            x = layer(x)
        return (x + masked).pow(2).mean()


WAY_OUT = (
    "The weights are those of before the step; skip the batch, lower the learning rate, or compute this part in float32"
)
PLANTED = {
    "zero by zero": "h = h / (h.detach() * 0)",
    "overflow": "h = (h * 1e20) * 1e20  # float32",
    "log": "h = (h * 0).log().exp() * 0 + (h * 0).log() * 0",
    "backward": "h = (h * 0).sqrt() + h",
}


def said(planted: str, sizes: dict[str, int], by_backward: bool, options: dict[str, Any]) -> str:
    """The error of a step of a model with a planted defect."""
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 8)}
    parallel = autopar.parallelize(Stack(planted, 2), mesh, example_batch=batch, check="finite", **options)
    before = {name: p.to_local().clone() for name, p in parallel.named_parameters()}  # type: ignore[attr-defined]
    with pytest.raises(FloatingPointError) as caught:
        if by_backward:
            parallel(**batch).backward()
        else:
            parallel.train_step(**batch)
    assert all(p.grad is None for p in parallel.parameters())
    assert all(torch.equal(p.to_local(), before[n]) for n, p in parallel.named_parameters())  # type: ignore[attr-defined]
    return str(caught.value)


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize(
    ("sizes", "by_backward", "options"),
    [
        ({"dp": 2}, True, {"zero": 3}),
        ({"tp": 2}, False, {}),
        ({"pp": 2}, False, {"microbatches": 2, "schedule": "zb_h1"}),
    ],
    ids=["dp", "tp", "pp"],
)
def test_the_module_and_line_of_a_nan_are_named(
    planted: str, sizes: dict[str, int], by_backward: bool, options: dict[str, Any]
) -> None:
    for text in run_ranks(2, said, planted, sizes, by_backward, options, timeout=120):
        assert "arose from finite values in layers.2 (aten." in text and PLANTED[planted] in text, text
        by_loss = planted != "backward" and not by_backward
        assert text.startswith("the loss is nan: " if by_loss else "its gradients are not finite: "), text
        assert text.endswith("on rank 1. " + WAY_OUT if "pp" in sizes else "on ranks 0, 1. " + WAY_OUT), text


# --- what is healthy, or was not before the step --------------------------------------------------------------------


def healthy(sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Infinities of masks do not matter, and nothing changes."""
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    for name in ("llama", "gpt2"):
        model, batch = tiny(name, 2)
        with LiftFloat32():
            expected = model(**batch).loss
            expected.backward()
        right = gradients(model)
        model.zero_grad()
        parallel = autopar.parallelize(model, mesh, check=["finite"], lift_to_float64=True, **options)
        rows = {k: x.chunk(mesh.data_size)[mesh.data_rank] for k, x in batch.items()}  # type: ignore[attr-defined]
        assert abs(float(parallel.train_step(**rows)) - float(expected)) < 1e-10
        assert gap(parallel.full_gradients(), right) < 1e-10


@pytest.mark.parametrize(("sizes", "options"), [({"dp": 2}, {"zero": 3}), ({"pp": 2}, {"microbatches": 2})])
def test_a_healthy_step_is_as_without_the_check(sizes: dict[str, int], options: dict[str, Any]) -> None:
    run_ranks(2, healthy, sizes, options, timeout=120)


def given_nan(backend: str) -> list[str]:
    """The errors for an input and for a weight that hold NaN on one rank only, and for a planted line."""
    mesh = autopar.init_mesh("cpu", 60.0, dp=2)
    batch = {"x": torch.randn(4, 8)}
    found = []
    for what in ("input", "weight"):
        parallel = autopar.parallelize(
            Stack("", -1), mesh, example_batch=batch, check="finite", backend=backend, seed=1
        )
        bad = {"x": batch["x"].clone()}
        if what == "input" and dist.get_rank() == 1:
            bad["x"][0, 0] = torch.nan
        if what == "weight":
            parallel.train_step(**batch)
            with torch.no_grad():
                for p in parallel.parameters():
                    p.fill_(torch.inf)
        with pytest.raises(FloatingPointError) as caught:
            parallel.train_step(**bad)
        found.append(str(caught.value))
    return found


def test_a_batch_and_weights_that_hold_nan_are_named() -> None:
    for of_input, of_weight in run_ranks(2, given_nan, "eager", timeout=120):
        assert "the loss is nan: input x was not finite before the step on rank 1. " in of_input
        assert "parameter embed.weight and 17 more was not finite before the step on ranks 0, 1. " in of_weight


def compiled() -> str:
    with scalar_kernels():
        return said("overflow", {"dp": 1}, False, {"backend": "inductor"})


def test_compiled_steps_run_again_by_operators() -> None:
    (text,) = run_ranks(1, compiled, timeout=200)
    assert "inf arose from finite values in layers.2 (aten.mul.Tensor" in text


def scaled() -> None:
    """A loss scaler skips steps of its own accord."""
    mesh = autopar.init_mesh("cpu", 60.0, dp=1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    batch = {"input": torch.rand(4, 8)}
    parallel = autopar.parallelize(
        model, mesh, example_batch=batch, check="finite", precision="fp16", loss=lambda out, batch: out.float().sum()
    )
    scaler = autopar.GradScaler(parallel, init_scale=2.0**60)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel.train_step(**batch)
    assert any(not bool(p.grad.isfinite().all()) for p in parallel.parameters() if p.grad is not None)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2.0**60


def test_gradients_under_a_loss_scaler_may_overflow() -> None:
    run_ranks(1, scaled)


@pytest.mark.parametrize("given", ["nan", ["finite", "all"], 1])
def test_other_checks_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"check: expected names out of 'finite', 'replay', found"):
        checks_of(given)
