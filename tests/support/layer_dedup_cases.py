"""Layers and loops over them for test_block_memo: what a layer does, and which of five in a row are copied."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.custom_functions import Clipped

LAYERS = 5


class Layer(nn.Module):
    counter = 0

    def __init__(self, index: int, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.index, self.run = index, run
        self.linear = nn.Linear(3, 3, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor, *args: Any) -> Any:
        return self.run(self, x, *args)  # type: ignore[call-arg]


class Stack(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Any], count: int = LAYERS) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.layers = nn.ModuleList(Layer(i, run) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x.sum()


MIDDLE = ["layers.1", "layers.2", "layers.3"]
BATCH = {"x": torch.rand(4, 3, dtype=torch.float64)}
WHERE = contextvars.ContextVar("where", default=0)
CALLS = 0
SEEN: list[Any] = []


def plain(m: Any, x: Tensor) -> Tensor:
    return x + m.linear(x).relu()


def reads_its_number(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) / (m.index + 1)


def reads_it_sometimes(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * 2.0 if m.index == 2 else m.linear(x)


def asks_for_it(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * getattr(m, "index", 1)


def counts_calls(m: Any, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return m.linear(x) * CALLS


def counts_on_the_class(m: Any, x: Tensor) -> Tensor:
    Layer.counter += 1
    return m.linear(x) * (Layer.counter % 7)


def keeps_a_list(m: Any, x: Tensor) -> Tensor:
    SEEN.append(0)
    return m.linear(x) * (len(SEEN) % 7)


def remembers(m: Any, x: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return m.linear(x)


def updates_a_buffer(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.seen.mul_(0.9).add_(x.mean(0))
    return m.linear(x) + m.seen


def replaces_a_buffer(m: Any, x: Tensor) -> Tensor:
    m.seen = m.seen + 1.0
    return m.linear(x) + m.seen


def in_place(m: Any, x: Tensor) -> Tensor:
    x = x + m.linear(x)
    x.mul_(2.0)[0].add_(1.0)
    return x


def sets_an_item(m: Any, x: Tensor) -> Tensor:
    x = x + m.linear(x)
    x[0] = 1.0  # a new constant, too
    return x


def gives_back(m: Any, x: Tensor) -> Tensor:
    return x


def a_view(m: Any, x: Tensor) -> Tensor:
    return x.t().t()


def draws(m: Any, x: Tensor) -> Tensor:
    return nn.functional.dropout(m.linear(x), 0.5, m.training)


def a_function(m: Any, x: Tensor) -> Tensor:
    return Clipped.apply(m.linear(x))  # type: ignore[no-any-return]


def checkpointed(m: Any, x: Tensor) -> Tensor:
    return checkpoint(m.linear, x, use_reentrant=False)  # type: ignore[no-any-return]


def a_new_constant(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * torch.tensor([1.0, 2.0, 3.0])


def a_plain_sum(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) + torch.arange(3) * 0.5


HABITS: dict[Callable[[Any, Tensor], Tensor], list[str]] = {
    plain: MIDDLE,
    reads_its_number: [],
    reads_it_sometimes: [],
    asks_for_it: [],
    counts_calls: [],
    counts_on_the_class: [],
    keeps_a_list: [],
    remembers: [],
    updates_a_buffer: MIDDLE,
    replaces_a_buffer: [],
    in_place: MIDDLE,
    sets_an_item: [],
    gives_back: MIDDLE,
    a_view: [],
    draws: MIDDLE,
    a_function: MIDDLE,
    checkpointed: MIDDLE,
    a_new_constant: [],
    a_plain_sum: MIDDLE,
}


def forget(*_: Any) -> None:
    """Begin anew to count."""
    global CALLS
    CALLS, Layer.counter = 0, 0
    SEEN.clear()


# --- how layers are called --------------------------------------------------------------------------------


class Calls(Stack):
    """Layers that are called in other ways."""

    def __init__(self, run: Callable[..., Any], loop: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(run, 2 * LAYERS if loop is half_without_gradient else LAYERS)
        self.loop = loop
        self.config = Settings()

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(self, x * self.scale).sum()


@dataclass
class Settings:
    scale: float = 1.0


@dataclass
class Result:
    hidden: Tensor
    extra: Any = None


def with_numbers(m: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(m.layers):
        x = layer(x, i % 2)
    return x


def half_without_gradient(m: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(m.layers):
        with torch.set_grad_enabled(i >= LAYERS):
            x = layer(x, 1.0)
    return x


def a_changed_setting(m: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(m.layers):
        m.config.scale = float(i % 2)
        layer.config = m.config
        x = layer(x, 1.0) * m.config.scale
        del layer.config
    m.config.scale = 1.0
    return x


def a_list_that_grows(m: Any, x: Tensor) -> Tensor:
    kept: list[Tensor] = []
    for layer in m.layers:
        x = layer(x, kept)
    return x + sum(kept)


def a_changed_variable(m: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(m.layers):
        WHERE.set(i)
        x = layer(x)
    return x


def a_changed_variable_of_two(m: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(m.layers):  # the last is as the first
        WHERE.set(i % 2)
        x = layer(x)
    return x


class Elsewhere:
    factor = 1.0


def a_changed_class(m: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(m.layers):
        Elsewhere.factor = 1.0 + i % 2
        x = layer(x)
    return x


def functions_of_their_own(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        layer.function = lambda y: y * Elsewhere.factor
        layer.itself = [1.0]
    for layer in m.layers:
        x = layer(x)
    for layer in m.layers:
        del layer.function, layer.itself
    return x


def lists_that_hold_themselves(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        layer.itself = [1.0]
        layer.itself.append(layer.itself)
        x = layer(x)
        del layer.itself
    return x


def twice_the_same_tensor(m: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(m.layers):
        x = layer(x, x if i % 2 else x + 0.0)
    return x


def the_weights_of_another(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x, m.layers[0].linear.weight)
    return x


def with_factor(m: Any, x: Tensor, factor: Any) -> Tensor:
    return m.linear(x) * (factor if factor else 3.0)


def with_scale(m: Any, x: Tensor, factor: Any) -> Tensor:
    return m.linear(x) * (factor * m.config.scale if hasattr(m, "config") else factor)


def with_list(m: Any, x: Tensor, kept: list[Tensor]) -> Tensor:
    kept.append(m.linear(x))
    return kept[-1].relu()


def with_variable(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * (WHERE.get() + 1.0)


def with_a_class(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * Elsewhere.factor


def with_a_function(m: Any, x: Tensor) -> Tensor:
    return m.linear(m.function(x))


def with_a_list(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * m.itself[0]


def with_matrix(m: Any, x: Tensor, matrix: Tensor) -> Tensor:
    return m.linear(x) + (x @ matrix if matrix.shape[0] == 3 else matrix)


CALLED: list[tuple[Callable[..., Any], Callable[..., Any], list[str]]] = [
    (with_factor, with_numbers, ["layers.2", "layers.3"]),
    (with_factor, half_without_gradient, [f"layers.{i}" for i in (2, 3, 4, 7, 8)]),
    (with_scale, a_changed_setting, ["layers.2", "layers.3"]),
    (with_list, a_list_that_grows, []),
    (with_variable, a_changed_variable, []),
    (with_variable, a_changed_variable_of_two, ["layers.2", "layers.3"]),
    (with_a_class, a_changed_class, ["layers.2", "layers.3"]),
    (with_a_function, functions_of_their_own, MIDDLE),
    (with_a_list, lists_that_hold_themselves, []),
    (with_matrix, twice_the_same_tensor, ["layers.2", "layers.3"]),
    (with_matrix, the_weights_of_another, ["layers.2", "layers.3"]),
]
