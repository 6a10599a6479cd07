"""Captured node by node or traced once more as a whole: the same graph, for whole models and for single habits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from autopar.capture import front_end as capturing
from autopar.capture.front_end import capture
from autopar.capture.trace import export as exporting
from autopar.capture.trace.decompose import decompose
from autopar.models.tiny import TINY
from tests.capture.test_capture import one_layer

SOME = ("gpt2", "mixtral", "gemma3")


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
    """(as it is captured, traced once more as a whole, whether the two ways differ): of what is exported once."""
    long, way = [], ExportedProgram.run_decompositions
    traced: list[ExportedProgram] = []

    def noted(program: ExportedProgram, table: Any) -> ExportedProgram:
        long.append(program)
        return way(program, table)

    def both_ways(program: ExportedProgram, table: Any) -> ExportedProgram:
        traced.append(way(program, dict(table)))
        return decompose(program, table)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", noted)
    monkeypatch.setattr(exporting, "decompose", both_ways)
    found = capture(model, batch, **how)
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: traced[-1])
    monkeypatch.setattr(exporting, "_prepare", lambda program: None)
    monkeypatch.setattr(capturing, "refuse_other_gradients", lambda *_: None)  # no forward runs
    monkeypatch.setattr(exporting, "decompose", lambda program, _: program)
    return found, capture(model, batch, **how), not long


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.full) for n in TINY])
def test_models(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found, whole, short = both(monkeypatch, one_layer(name).build(), TINY[name].batch(2, 8), lift_to_float64=True)
    assert sorted_inputs(found) == sorted_inputs(whole)
    assert found.meta["signature"].outputs == whole.meta["signature"].outputs
    assert short or name not in SOME


def sorted_inputs(gm: GraphModule) -> tuple[list[str], list[str], list[Any]]:
    """The text of a graph: its inputs (a whole trace puts constants before buffers), its calls; and what is fed."""
    lines = text(gm)
    inputs = [line for line in lines if " = placeholder(" in line]
    return sorted(inputs), lines[len(inputs) :], sorted(gm.meta["signature"].inputs, key=lambda spec: str(spec.node))


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


def views_of_views(m: nn.Module, x: Tensor) -> Tensor:
    h = x.new_zeros(2, 4, 6)
    h[1:, :, ::2][0] = x * m.weight
    h[0, 1:-1, -3:].copy_(x[:2])
    h[..., 0] = h[0, 0, 2]
    h[1:, 0].mul_(m.weight.sum())
    return h * h.sum()


def a_product(m: nn.Module, x: Tensor) -> Tensor:
    h = x @ m.weight
    h += 1.0
    return h * m.count


def views_in_no_grad(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    with torch.no_grad():
        h[1:3] = 2.0
        h[0].add_(m.mean)  # type: ignore[arg-type]
    return h


def a_view_used_later(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    row = h[0]
    h[1] = 2.0
    return h + row


def a_view_of_a_view_used_later(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    part = h[0][1:]
    h[0] = 2.0
    return h + part.sum()


def a_view_written_and_used(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    row = h[0]
    row.mul_(2.0)
    return h + row


def a_view_given_back(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    h[:, 0] += 1.0
    return h


def a_mixed_view(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.weight
    h.t()[1] = 2.0
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


def a_batch_norm(m: nn.Module, x: Tensor) -> Tensor:
    before = m.mean * 1.0  # type: ignore[operator]
    for training in (True, True, False):
        x = nn.functional.batch_norm(x, m.mean, m.var, m.weight, None, training)  # type: ignore[arg-type]
    return x + before + m.mean


def buffers_in_no_grad(m: nn.Module, x: Tensor) -> Tensor:
    h = x * m.mean
    with torch.no_grad():
        m.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)  # type: ignore[operator]
        m.count += 1  # type: ignore[operator]
    return h * m.weight - m.mean.view(1, 3) / m.count  # type: ignore[operator]


def buffers_given_back(m: nn.Module, x: Tensor) -> Tensor:
    m.var.copy_(m.mean)  # type: ignore[operator, arg-type]
    m.mean.fill_(2.0)  # type: ignore[operator]
    with torch.no_grad():
        m.mean.add_(m.var)  # type: ignore[operator, arg-type]
        last = m.mean
    m.mean.mul_(x.sum())  # type: ignore[operator]
    return last * m.weight


def a_view_of_a_buffer(m: nn.Module, x: Tensor) -> Tensor:
    row = m.mean[:2]  # type: ignore[index]
    m.mean.add_(1.0)  # type: ignore[operator]
    return row.sum() * m.weight


def a_view_made_in_no_grad(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        row = m.mean.view(1, 3)  # type: ignore[operator]
    m.mean.add_(1.0)  # type: ignore[operator]
    return row * m.weight


def through_a_view(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean[0] = x.sum()  # type: ignore[operator]
    return m.mean * m.weight  # type: ignore[operator]


def one_storage(m: nn.Module, x: Tensor) -> Tensor:
    m.part.add_(1.0)  # type: ignore[operator]
    return m.mean * m.weight  # type: ignore[operator]


SHORT = (  # what is taken together is short if each is
    (no_grad, fresh, copies, random, constants, through_a_view),
    (layouts, twice, dropouts, a_buffer, a_view, a_batch_norm),
    (buffers_in_no_grad, a_product),
    (views_of_views,),
)
LONG = (
    narrower, of_a_view, perhaps_itself, norms, buffers_given_back, a_view_of_a_buffer, a_view_made_in_no_grad,
    a_view_used_later, a_view_of_a_view_used_later, a_view_written_and_used, a_mixed_view,
    a_view_given_back,
)  # fmt: skip


class Habit(nn.Module):
    """Several, one after the other."""

    def __init__(self, *habits: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("var", torch.ones(3, dtype=torch.float64))
        self.habits = habits

    def forward(self, x: Tensor) -> Tensor:
        total = self.habits[0](self, x).sum()
        for habit in self.habits[1:]:
            total = total + habit(self, x).sum()
        return total


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "habits", (*SHORT, *((habit,) for habit in LONG)), ids=lambda habits: " ".join(habit.__name__ for habit in habits)
)
def test_habits(monkeypatch: pytest.MonkeyPatch, habits: tuple[Callable[[nn.Module, Tensor], Tensor], ...]) -> None:
    model, x = Habit(*habits), torch.rand(4, 3, dtype=torch.float64)
    found, whole, short = both(monkeypatch, model, {"x": x})
    assert text(found) == text(whole) or views_of_views in habits  # the whole way makes views anew at each write
    assert short == (habits in SHORT)
    for a, b in zip(run(found), run(whole), strict=True):
        assert torch.equal(a, b)


def run(gm: GraphModule) -> list[Tensor]:
    """The results for inputs that are the same for every graph."""
    torch.manual_seed(0)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return list(Interpreter(gm).run(*(torch.rand(x.shape, dtype=x.dtype) for x in values)))


@pytest.mark.parametrize(("way", "refused"), [("written", True), ("trained", True), ("data", True), ("flat", False)])
def test_tensors_that_share_memory(way: str, refused: bool) -> None:
    """Steps would change one and not the other; neighbours in one storage share nothing."""
    model, x = Habit(one_storage), torch.rand(4, 3, dtype=torch.float64)
    mean = model.get_buffer("mean")
    flat = torch.rand(6, dtype=torch.float64)
    model.register_buffer("part", mean[:2] if way == "written" else mean[:2].clone())
    if way == "trained":
        model.register_buffer("view", model.weight.detach()[1:])
    if way == "data":
        model.tied = nn.Parameter(model.weight.data)
    if way == "flat":
        model.weight, model.other = nn.Parameter(flat[:3]), nn.Parameter(flat[3:])
    if refused:
        with pytest.raises(ValueError, match=r"need separate memory, found that .* share it"):
            capture(model, {"x": x})
    else:
        capture(model, {"x": x})
