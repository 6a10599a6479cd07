"""Captured with alike modules traced once, or each: the same graph, names included, for models and for habits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autopar.capture.front_end import capture
from autopar.capture.layer_dedup import layer_dedup
from autopar.capture.layer_dedup.layer_template import Template, path_of_call
from autopar.models.tiny import TINY
from tests.capture.test_decompose import text
from tests.support.layer_dedup_cases import (
    BATCH,
    CALLED,
    HABITS,
    MIDDLE,
    Calls,
    Layer,
    Result,
    Stack,
    draws,
    forget,
    plain,
    reads_its_number,
)  # fmt: skip

COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
DEEP = 4
SOME = ("gemma3", "t5", "mixtral")  # layers of two kinds, in two stacks, with experts


def deeper(name: str) -> nn.Module:
    """A tiny model with so many layers in each stack."""
    tiny = TINY[name]
    sizes = {key: DEEP if key in COUNTS else value for key, value in tiny.sizes.items()}
    sizes = {key: (value * DEEP)[:DEEP] if key.endswith("layer_types") else value for key, value in sizes.items()}
    return replace(tiny, sizes=sizes).build()


@contextmanager
def copies() -> Iterator[list[str]]:
    """The paths that are copied, in order."""
    found: list[str] = []
    copy = Template.copy

    def noted(self: Template, tracer: Any, given: Any) -> Any:
        found.append(path_of_call(tracer).removeprefix("_export_root."))
        return copy(self, tracer, given)

    patch = pytest.MonkeyPatch()
    patch.setattr(Template, "copy", noted)
    try:
        yield found
    finally:
        patch.undo()


def names(gm: GraphModule) -> list[tuple[str, list[str]]]:
    """Of nodes, and where they come from."""
    stacks = [[path for path, _ in node.meta.get("nn_module_stack", {}).values()] for node in gm.graph.nodes]
    return [(node.name, stack) for node, stack in zip(gm.graph.nodes, stacks, strict=True)]


def both(model: nn.Module, batch: dict[str, Any], **how: Any) -> list[str]:
    """Holds the two ways against each other; which modules were copied, in the graph that was kept."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with copies() as found:
            memo = capture(model, batch, **how)
        each = capture(model, batch, **how, memo=False)
    assert text(memo) == text(each) and names(memo) == names(each)
    assert memo.meta["signature"] == each.meta["signature"]
    return found


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.full) for n in TINY])
def test_models(name: str) -> None:
    found = both(deeper(name), TINY[name].batch(2, 8))
    assert len(found) > DEEP or name not in SOME  # modules within layers as well


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_habits(habit: Callable[[Any, Tensor], Tensor]) -> None:
    model = Stack(habit)
    forget()
    model.layers[0].register_forward_pre_hook(forget)  # a module with hooks is traced; the others are four then
    found = both(model, BATCH)
    assert found == (["layers.2", "layers.3"] if HABITS[habit] else [])


def test_first_and_last_are_traced() -> None:
    assert both(Stack(plain), BATCH) == MIDDLE
    assert both(Stack(plain, 2), BATCH) == []


def test_layers_that_differ() -> None:
    """In a mode, a flag, a size, a type; those that are alike are still copied."""
    model = Stack(draws, 12)
    model.layers[2].eval()
    model.layers[4].linear.weight.requires_grad_(False)
    model.layers[6].extra = "text"
    model.layers[8] = Layer(8, plain)
    assert both(model, BATCH) == [f"layers.{i}" for i in (1, 3, 5, 7, 9, 10)]


def test_zeros_that_differ() -> None:
    """0.0 == -0.0, and a layer with the one is not like a layer with the other."""

    def signed(m: Any, x: Tensor) -> Tensor:
        return m.linear(x) + torch.where(x > 0, x, m.zero)

    model = Stack(signed)
    for i, layer in enumerate(model.layers):
        layer.zero = -0.0 if i == 2 else 0.0
    assert both(model, BATCH) == ["layers.1", "layers.3"]


@pytest.mark.parametrize(("run", "loop", "copied"), CALLED, ids=[loop.__name__ for _, loop, _ in CALLED])
def test_calls(run: Callable[..., Any], loop: Callable[..., Any], copied: list[str]) -> None:
    assert both(Calls(run, loop), BATCH) == copied


def test_tensors_handed_on_behind_the_back() -> None:
    """The list is no argument, and of a file that no layer is from; only its first entry would be right."""
    kept: list[Tensor] = []
    holder = (lambda: kept,)

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.linear(x)
        holder[0]().append(y.exp())
        return y

    def loop(m: Any, x: Tensor) -> Tensor:
        kept.clear()
        for layer in m.layers:
            x = layer(x)
        x = x + torch.stack(kept).sum()
        kept.clear()
        return x

    both(Calls(run, loop), BATCH)


def test_results_of_many_kinds() -> None:
    def run(m: Any, x: Tensor) -> Any:
        y = m.linear(x)
        return {"y": y, "again": [y, None, 2, "text"], "x": (x, (y * 2.0).detach())}

    def loop(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            out = layer(x)
            assert out["y"] is out["again"][0] and out["x"][0] is x and out["again"][1:] == [None, 2, "text"]
            assert out["y"].requires_grad and not out["x"][1].requires_grad and out["y"].grad_fn is not None
            x = out["y"] + out["x"][1]
        return x

    assert both(Calls(run, loop), BATCH) == MIDDLE


def test_results_that_are_unknown() -> None:
    def run(m: Any, x: Tensor) -> Any:
        return Result(m.linear(x))

    def loop(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x).hidden
        return x

    assert both(Calls(run, loop), BATCH) == []


def test_a_number_read_by_what_was_copied() -> None:
    """The attention of the second stack's first layer is a copy; its number counts for the layer around it."""

    class Inner(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number, self.linear = number, nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.number  # type: ignore[no-any-return]

    class Outer(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.inner = Inner(number)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).relu()  # type: ignore[no-any-return]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleList(Inner(i) for i in range(1, 3))
            self.second = nn.ModuleList(Outer(i) for i in range(1, 5))
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            for layer in (*self.first, *self.second):
                x = layer(x)
            return x.sum()

    assert both(Two(), BATCH) == ["second.0.inner", "second.1.inner"]


def test_one_layer_called_often() -> None:
    """Its own weights each time; shared modules have another path at each place."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.layers = Stack(plain).layers
            self.again = nn.ModuleList([*self.layers[1:4], *self.layers[1:4]])

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            for layer in (*self.layers, *self.again):
                x = layer(x)
            return x.sum()

    assert both(Shared(), BATCH)[:3] == MIDDLE


def test_planted_copies_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were reads of numbers not noticed, the last layer would tell."""

    @contextmanager
    def blind(*_: Any) -> Iterator[set[tuple[str, str]]]:
        yield set()

    monkeypatch.setattr(layer_dedup, "noticed_reads", blind)
    assert both(Stack(reads_its_number), BATCH) == MIDDLE  # and traced anew


def test_errors_are_those_of_a_whole_trace() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.linear(x)  # type: ignore[no-any-return]

    def loop(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x)
        return x if x.sum() > 0 else -x

    with pytest.raises(ValueError, match="instead of a branch"):
        capture(Calls(run, loop), BATCH)
