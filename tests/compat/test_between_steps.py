"""What is kept between steps is looked at again: a step takes what the model holds now, and writes to nothing else."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.adapters.dtensor import local_of
from autopar.runtime.inputs.call_arguments import by_name
from tests.support.plain_models import EXACT, Net, build, gap, gradients, images, numbers, part, put
from tests.support.ranks import refusal, run_ranks

SIZES = {"dp": 2}


def as_alone(parallel: autopar.ParallelModule, alone: nn.Module, batch: dict[str, Tensor]) -> None:
    """A step of both from here: the same loss and gradients, added to what is there."""
    alone(**batch)["loss"].backward()
    parallel.train_step(**part(batch, SIZES))
    assert gap(parallel.full_gradients(), gradients(alone)) < EXACT


def parameters() -> None:
    alone, batch = build(Net), numbers()
    parallel = put(alone, batch, SIZES, zero=3)
    weight, bias = parallel.first.weight, parallel.first.bias
    as_alone(parallel, alone, batch)
    as_alone(parallel, alone, numbers(1))  # into the same gradients

    held = {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}
    before = {n: local_of(g).clone() for n, g in held.items()}
    parallel.zero_grad(set_to_none=True), alone.zero_grad()
    as_alone(parallel, alone, batch)
    assert all(torch.equal(local_of(held[n]), x) for n, x in before.items()), "gradients that somebody kept"
    assert not {id(g) for g in held.values()} & {id(p.grad) for p in parallel.parameters()}

    parallel.zero_grad(set_to_none=True), alone.zero_grad()
    weight.grad, bias.grad = torch.zeros_like(weight), None  # some are there, some are not
    kept = weight.grad
    as_alone(parallel, alone, batch)
    assert weight.grad is kept, "added up in place, as in torch"

    bias.requires_grad_(False), alone.first.bias.requires_grad_(False)
    parallel.zero_grad(), alone.zero_grad()
    as_alone(parallel, alone, batch)
    assert bias.grad is None
    bias.requires_grad_(True), alone.first.bias.requires_grad_(True)
    as_alone(parallel, alone, batch)

    with torch.no_grad():
        replaced = nn.Parameter(weight.detach().clone() * 2)
        alone.first.weight.mul_(2)
    parallel.zero_grad(), alone.zero_grad()
    parallel.first.weight = replaced
    as_alone(parallel, alone, batch)
    assert parallel.first.weight is replaced and weight.grad is None and replaced.grad is not None

    replaced.data.mul_(0.5), alone.first.weight.data.mul_(0.5)  # as old optimizers write
    local_of(replaced).data = local_of(replaced).data.clone()  # the same values elsewhere
    local_of(replaced).mul_(3), alone.first.weight.data.mul_(3)
    parallel.zero_grad(), alone.zero_grad()
    as_alone(parallel, alone, batch)

    replaced.grad = DTensor.from_local(torch.zeros(16, 12, dtype=torch.float64), replaced.device_mesh, run_check=False)
    alone.first.weight.grad = torch.zeros(16, 12, dtype=torch.float64)
    as_alone(parallel, alone, batch)

    kept, others = [p.data for p in (parallel.head.weight, alone.head.weight)], (parallel, alone)
    for model in others:
        model.head.weight.data = model.head.weight.data * 2
        model.zero_grad()
    as_alone(parallel, alone, batch)
    for model, x in zip(others, kept, strict=True):
        model.head.weight.data = x
        model.head.weight.grad.data = torch.ones_like(x)
    as_alone(parallel, alone, batch)
    assert torch.equal(local_of(parallel.head.weight), local_of(kept[0])), "what was kept is as it was"


def test_parameters_and_gradients_are_those_of_now() -> None:
    run_ranks(2, parameters)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(8, dtype=torch.float64))
        self.norm.register_buffer("same", self.scale)  # one buffer, two names

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.norm(self.conv(images))).mean((2, 3)) * self.scale + self.norm.same
        return {"loss": nn.functional.cross_entropy(self.head(h), labels)}


def buffers() -> None:
    alone, batch = build(Normed), images()
    parallel = put(alone, batch, SIZES)
    as_alone(parallel, alone, batch)
    for change in (
        lambda m: m.scale.mul_(2),
        lambda m: setattr(m, "scale", m.scale * 3),  # another tensor under one of the two names
        lambda m: setattr(m.norm, "running_var", m.norm.running_var.clone() + 1),
        lambda m: m.norm._buffers.update(running_mean=m.norm.running_mean.clone() - 1),
        lambda m: m.register_buffer("more", torch.zeros(2)),
        lambda m: delattr(m, "more"),
    ):
        for model in (parallel, alone):
            change(model)
            model.zero_grad()
        as_alone(parallel, alone, batch)
        now = dict(parallel.named_buffers())
        assert gap({n: now[n] for n in ("norm.running_mean", "norm.running_var", "scale")},
                   {n: b for n, b in alone.named_buffers() if n in ("norm.running_mean", "norm.running_var", "scale")}
                   ) < EXACT  # fmt: skip
    parallel.eval(), alone.eval()
    parallel.zero_grad(), alone.zero_grad()
    as_alone(parallel, alone, batch)


def test_buffers_are_those_of_now() -> None:
    run_ranks(2, buffers)


# --- names of arguments -----------------------------------------------------------------------------------


class Named(nn.Module):
    def forward(self, x: Tensor, target: Tensor, *, scale: float = 1.0) -> Tensor:
        return x


def other(self: Any, target: Tensor, x: Tensor) -> Tensor:
    return x


def test_arguments_go_by_the_forward_of_now() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    model, kind = Named(), type("Copy", (Named,), {"forward": copy.copy(Named.forward)})
    assert list(by_name(model, (one, two), {"scale": 2.0})) == ["x", "target", "scale"]
    assert "needs target" in refusal(lambda: by_name(model, (one,), {}))
    model.forward = functools.partial(other, model)  # on the instance
    assert by_name(model, (one, two), {}) == {"target": one, "x": two}
    del model.forward
    assert by_name(model, (one, two), {}) == {"x": one, "target": two}
    kind.forward = other  # of the class
    assert by_name(kind(), (one, two), {}) == {"target": one, "x": two}

    def forward(self: Any, x: Tensor, target: Tensor) -> Tensor:
        return x

    kind.forward = forward
    assert "needs target" in refusal(lambda: by_name(kind(), (one,), {}))
    forward.__defaults__ = (two,)  # the same function
    assert by_name(kind(), (one,), {}) == {"x": one}
    for value in (torch.zeros(2), [two], {}):  # of any kind; one after the other may lie at the same place
        forward.__defaults__ = (value,)
        assert by_name(kind(), (one,), {}) == {"x": one}
        forward.__defaults__ = None
        assert "needs target" in refusal(lambda: by_name(kind(), (one,), {}))

    def by_keyword(self: Any, x: Tensor, *, scale: Any = [1]) -> Tensor:  # noqa: B006
        return x

    kind.forward = by_keyword
    assert by_name(kind(), (one,), {}) == {"x": one}
    by_keyword.__kwdefaults__.clear()
    assert "needs scale" in refusal(lambda: by_name(kind(), (one,), {}))
    kind.forward = forward
    forward.__wrapped__ = other  # type: ignore[attr-defined] # whose signature counts
    assert by_name(kind(), (one, two), {}) == {"target": one, "x": two}
    kind.forward = staticmethod(lambda x, target: x)
    assert by_name(kind(), (one, two), {}) == {"x": one, "target": two}
    kind.forward = lambda *args, x, target: x
    assert by_name(kind(), (), {"target": two, "x": one}) == {"x": one, "target": two}
