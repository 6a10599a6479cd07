"""Which layers a sample has: the fewest with which a model does what it does with all that come before them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot

from autopar.auto.costed_model import CostedModel
from autopar.auto.layer_lists import Entries, LayerList, first, layer_lists, samples, with_layers
from autopar.cost.layer_costs import SCALARS
from autopar.cost.layout import Placement

WIDTH, CLASSES, TOKENS = 8, 16, 4
EXACT = [i for i, name in enumerate(SCALARS) if "fused" not in name]  # what is fused depends a little on what is beside


class Layer(nn.Module):
    """A residual product, with one more of another width where ``wide``."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)) if wide else nn.Identity()

    def forward(self, x: Tensor, scale: Tensor | None = None, made: Tensor | None = None) -> tuple[Tensor, Tensor]:
        made = linear(x, self.inner.weight) if made is None else made  # the first layer makes it, all read it
        y = self.wide(self.inner(x))
        return x + (y if scale is None else y * scale), made


Call = Callable[["Model", Tensor], Tensor]


def alone(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x, _ = layer(x)
    return x


def by_number(model: Model, x: Tensor) -> Tensor:
    """Each layer is called with what a list has at its number."""
    narrow, wide = torch.tanh(model.scale), torch.sigmoid(model.scale)
    for i, layer in enumerate(model.layers):
        x, _ = layer(x, wide if model.is_wide[i] else narrow)
    return x


def by_kind(model: Model, x: Tensor) -> Tensor:
    """Each layer is called with what belongs to its kind."""
    narrow, wide = torch.tanh(model.scale), torch.sigmoid(model.scale)
    for layer in model.layers:
        x, _ = layer(x, narrow if isinstance(layer.wide, nn.Identity) else wide)
    return x


def from_the_first(model: Model, x: Tensor) -> Tensor:
    """The first layer hands a value to all."""
    made = None
    for layer in model.layers:
        x, made = layer(x, None, made)
    return x if made is None else x + made


def by_place(model: Model, x: Tensor) -> Tensor:
    """All places of the list are read."""
    for i in range(len(model.is_wide)):
        x, _ = model.layers[i](x)
    return x


class Model(nn.Module):
    """Layers of two kinds, of which the last is the first of its own."""

    is_wide = (False, False, False, True, True)

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call, self.embed, self.head = call, nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(map(Layer, self.is_wide))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.call(self, self.embed(ids)))
        return {"loss": (logits - one_hot(ids, CLASSES)).square().mean()}


def costed(call: Call) -> CostedModel:
    return CostedModel(
        Model(call).double(), lambda rows: {"ids": torch.arange(rows * TOKENS).view(rows, TOKENS) % CLASSES}
    )


@pytest.mark.parametrize(
    ("call", "wide"),
    [
        pytest.param(alone, (0, 3), id="layers that depend on nothing else"),
        pytest.param(by_number, (0, 1, 2, 3), id="a layer's number decides what it reads"),
        pytest.param(by_kind, (0, 3), id="its kind does: values of both kinds are made outside of layers"),
        pytest.param(from_the_first, (0, 3), id="the first layer of all makes what the next ones read"),
        pytest.param(by_place, (0, 1, 2, 3), id="places of the list that are empty"),
    ],
)
def test_layers_of_a_sample(call: Call, wide: tuple[int, ...]) -> None:
    model = costed(call)
    found = model._samples(())
    assert found == sorted([((0,),), ((0, 1),), (wide,)], key=lambda x: (len(x[0]), x))


@pytest.mark.parametrize("call", [alone, by_kind, from_the_first])
def test_costs_are_those_of_first_layers(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    fewest, all_first = costed(call), costed(call)
    monkeypatch.setattr(all_first, "_is_part", lambda fewer, entries: False)
    one, other = fewest.costs(Placement()), all_first.costs(Placement())
    for found, expected in zip((one.rest, *one.layers), (other.rest, *other.layers), strict=True):
        assert (found.saved == expected.saved).all() and found.dense == expected.dense
        for name in ("forward", "backward", "again"):
            mine, its = getattr(found, name), getattr(expected, name)
            assert (mine.scalars == its.scalars)[EXACT].all()
            assert sorted(map(tuple, mine.products)) == sorted(map(tuple, its.products))


def test_the_model_is_left_as_it_was() -> None:
    model = Model(alone)
    lists, names = layer_lists(model), [name for name, _ in model.named_modules()]
    with with_layers(model, lists, ((1, 4),)):
        assert [name for name, _ in model.layers.named_children()] == ["1", "4"]
    assert [name for name, _ in model.named_modules()] == names


def test_several_lists_and_kinds() -> None:
    lists = (LayerList("encoder", (0, 0, 0)), LayerList("decoder", (1, 1, 2, 1, 2)))

    def always(fewer: Entries, entries: Entries) -> bool:
        return True

    found = samples(lists, (), always)
    assert len(found) == 4  # the rest and three kinds
    assert max(sum(map(len, entries)) for entries in found) == 3
    assert samples(lists, (), lambda fewer, entries: False)[-1] == first((1, 3))
