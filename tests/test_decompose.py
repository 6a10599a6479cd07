"""Captured node by node or traced once more as a whole: the same graph, for whole models and for single habits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autopar.adapters import export as exporting
from autopar.adapters.decompositions import DECOMPOSITIONS
from autopar.capture import capture
from autopar.models.tiny import TINY

SOME = ("llama", "gpt2", "mixtral", "gemma3", "bert")


def text(gm: GraphModule) -> list[str]:
    """Every node by what it calls, its result and its module; names, and the order of keywords, are left out."""
    number: dict[Node, str] = {}
    lines = []
    for node in gm.graph.nodes:
        number[node] = node.name if node.op == "placeholder" else f"v{len(number)}"
        val = node.meta.get("val")
        facts = (tuple(val.shape), val.stride(), val.dtype) if isinstance(val, Tensor) else None
        args, kwargs = map_arg((node.args, node.kwargs), number.__getitem__)
        module = list((node.meta.get("nn_module_stack") or {}).values())[-1:]
        target = node.target if node.op == "call_function" else node.op
        lines.append(f"{number[node]} = {target}{args}{sorted(kwargs.items())} : {facts} of {module}")
    return lines


def both(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, batch: dict[str, Any], **how: Any
) -> tuple[GraphModule, GraphModule, bool]:
    """(as it is captured, traced once more as a whole, whether the two ways differ)"""
    long, way = [], ExportedProgram.run_decompositions

    def noted(program: ExportedProgram, table: Any) -> ExportedProgram:
        long.append(program)
        return way(program, table)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", noted)
    found = capture(model, batch, **how)
    short = not long
    monkeypatch.setattr(exporting, "decompose", lambda program, _: program.run_decompositions(dict(DECOMPOSITIONS)))
    return found, capture(model, batch, **how), short


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.full) for n in TINY])
def test_models(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found, whole, short = both(monkeypatch, TINY[name].build(), TINY[name].batch(2, 8), exact=True)
    assert text(found) == text(whole) and found.meta["signature"] == whole.meta["signature"]
    assert short or name not in SOME


# --- habits -----------------------------------------------------------------------------------------------


def no_grad(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = x * m.weight
        with torch.enable_grad():
            h = h.reshape(2, 2, 3).chunk(3, -1)[1] + m.weight.sum()
    return h.sum() * m.weight


def fresh(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    h.div_(x.sum())
    top = x.topk(2)[0]
    top += 1.0
    return h + top.sum()


def narrower(m: nn.Module, x: Tensor) -> Tensor:
    h = (x * m.weight).float()
    h.mul_(x.sum())  # stays float32
    return h


def a_view(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    h[0] = 3.0
    return h


def of_a_view(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    first = h.view(-1)
    h.mul_(2.0)
    return first.sum() + h


def perhaps_itself(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    same = h.to(torch.float64)
    same.add_(1.0)
    return h + same


def twice(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    h.mul_(2.0).add_(1.0)
    return h + h.exp_()


def a_buffer(m: nn.Module, x: Tensor) -> Tensor:
    m.count.add_(1.0)  # type: ignore[operator]
    return x * m.weight * m.count


def copies(m: nn.Module, x: Tensor) -> Tensor:
    h = torch.zeros(4, 3, dtype=x.dtype)
    h.copy_(x)
    return h * m.weight


def dropouts(m: nn.Module, x: Tensor) -> Tensor:
    f = nn.functional
    h = f.dropout(x, 0.5, True) + f.dropout(x, 0.0, True) + f.dropout(x, 0.5, False)
    return f.alpha_dropout(h, 0.1, True) * m.weight


def random(m: nn.Module, x: Tensor) -> Tensor:
    return (x * m.weight + torch.bernoulli(torch.full_like(x, 0.5))) * torch.rand_like(x)


def constants(m: nn.Module, x: Tensor) -> Tensor:
    return x * m.weight + torch.tensor(2.0) + torch.tensor([1.0, 2.0, 3.0])


def layouts(m: nn.Module, x: Tensor) -> Tensor:
    h = (x.t().contiguous().t() * m.weight).t().reshape(-1).view(3, 4).flatten().unflatten(0, (4, 3))
    return (
        h.expand_as(x).type_as(x) + x.to("cpu").narrow(0, 1, 2).sum() + torch.einsum("ij,kj->ik", x, x).diagonal()[:3]
    )


def norms(m: nn.Module, x: Tensor) -> Tensor:
    f = nn.functional
    return f.instance_norm((x * m.weight)[None]).sum() + f.layer_norm(x, (3,), m.weight).sum()


SHORT = (no_grad, fresh, copies, random, constants, layouts)
LONG = (narrower, a_view, of_a_view, perhaps_itself, twice, a_buffer, dropouts, norms)


class Habit(nn.Module):
    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x).sum()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("habit", (*SHORT, *LONG), ids=lambda habit: habit.__name__)
def test_habits(monkeypatch: pytest.MonkeyPatch, habit: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model, x = Habit(habit), torch.rand(4, 3, dtype=torch.float64)
    found, whole, short = both(monkeypatch, model, {"x": x})
    assert text(found) == text(whole)
    assert short == (habit in SHORT)
