"""Hooks of parameters are called as in torch: not for a parameter to which a backward brings no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

import autopar
from tests.support.ranks import run_ranks

Log = list[tuple[str, float | None]]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("body", "one", "other", "still"):
            self.register_parameter(name, nn.Parameter(torch.rand(4, dtype=torch.float64)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            x = x + self.still
        h = torch.tanh(x * self.body)
        return {"loss": (h * self.one).square().mean(), "other": (h * self.other).mean()}


def rows(step: int) -> Tensor:
    return torch.rand(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def only_the_loss(net: Any, _: Log) -> None:
    net(x=rows(0))["loss"].backward()


def the_other_output_later(net: Any, _: Log) -> None:
    only_the_loss(net, [])
    net(x=rows(1))["other"].backward()
    out = net(x=rows(2))
    out["loss"].backward(retain_graph=True)
    out["other"].backward()


def two_forwards_one_backward(net: Any, _: Log) -> None:
    one, two = net(x=rows(0)), net(x=rows(1))
    (one["loss"] + two["other"]).backward()


def removed_meanwhile(net: Any, log: Log) -> None:
    handle = net.other.register_hook(lambda g: log.append(("removed", None)))
    only_the_loss(net, log)
    handle.remove()
    net(x=rows(1))["other"].backward()


def several_leaves(net: Any, log: Log) -> None:
    for mode in ("all", "any"):
        leaves = net.body, net.other

        def note(found: Any, mode: Any = mode) -> None:
            log.append((mode, None if not isinstance(found, (list, tuple)) else sum(g is not None for g in found)))

        register_multi_grad_hook(leaves, note, mode=mode)  # type: ignore[arg-type]
    the_other_output_later(net, log)


def hooked(net: Any) -> Log:
    log: Log = []

    def doubled(name: str) -> Callable[[Tensor], Tensor]:
        return lambda g: (log.append((f"{name} arrives", float(g.sum()))), g * 2)[1]

    for name in ("body", "one", "other", "still"):
        p = getattr(net, name)
        p.register_hook(doubled(name))
        p.register_post_accumulate_grad_hook(lambda p, name=name: log.append((f"{name} is there", float(p.grad.sum()))))
    return log


def logs(do: Callable[[Any, Log], None], parallel: bool) -> list[tuple[str, Any]]:
    torch.manual_seed(0)
    net: Any = Heads()
    if parallel:
        mesh = autopar.init_mesh("cpu", 30.0, dp=1)
        net = autopar.parallelize(net, mesh, example_batch={"x": rows(0)})
    log = hooked(net)
    do(net, log)
    return sorted(log, key=str)


def on_one_rank(do: Callable[[Any, Log], None]) -> tuple[Any, Any]:
    return logs(do, False), logs(do, True)


@pytest.mark.parametrize(
    "do", [only_the_loss, the_other_output_later, two_forwards_one_backward, removed_meanwhile, several_leaves]
)
def test_hooks_are_called_as_in_torch(do: Callable[[Any, Log], None]) -> None:
    [(plain, parallel)] = run_ranks(1, on_one_rank, do)
    assert [name for name, _ in parallel] == [name for name, _ in plain]
    for (name, expected), (_, found) in zip(plain, parallel, strict=True):
        assert found == pytest.approx(expected, abs=1e-12), name
