"""A forward may ask for values in which no input has a part: the graph is the one that these values make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.front_end import capture
from tests.support.plain_models import gap

Body = Callable[[Tensor], Tensor]


def branch_on_a_mask(y: Tensor) -> Tensor:
    mask = torch.ones(y.shape[0], 3, dtype=torch.bool)
    return y * 2 if mask.all() else y * 3


def counts_as_numbers(y: Tensor) -> Tensor:
    lengths = torch.tensor([1, 3]).cumsum(0)
    first, second = y.split(lengths.tolist(), 1)[:2]
    return first.sum() * second


def masked_rows(y: Tensor) -> Tensor:
    mask = torch.arange(8).view(4, 2) % 3 == 0
    return y[:, :2][mask]


def masked_in_a_tuple(y: Tensor) -> Tensor:
    return y[1:, torch.arange(5) > 1]


def written_under_a_mask(y: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    out[torch.arange(4) % 2 == 0] = y[:2] * 3
    return out + y


def repeated(y: Tensor) -> Tensor:
    return torch.repeat_interleave(y, torch.arange(4), dim=0) * torch.arange(6).unsqueeze(1)


def sizes_of_tensors(y: Tensor) -> Tensor:
    count = torch.tensor([1, 2]).max()
    return y.new_zeros(count, 5) + y[:2] * torch.arange(count).unsqueeze(1)


def filled_later(y: Tensor) -> Tensor:
    starts = torch.empty(3, dtype=torch.int64)
    starts[0] = 0
    starts[1:] = torch.tensor([1, 2, 4]).cumsum(0)[:-1]
    return y[torch.arange(starts[1], starts[2])] * starts[2]


def resized(y: Tensor) -> Tensor:
    sizes = torch.tensor([[4, 10]]) // 2
    return torch.nn.functional.interpolate(y[None, None], size=tuple(sizes[0]), mode="bilinear")


def tensor_of_tensors(y: Tensor) -> Tensor:
    largest = torch.arange(4).max()
    return y * torch.tensor([[largest, largest + 1, 0, 1, 2]])


def written_to(y: Tensor) -> Tensor:
    x = torch.zeros(6, dtype=torch.int64)
    x.add_(3)
    x[0] += 1
    later = x[1:].view(5)
    later[1:] -= 2
    assert x.tolist() == [4, 3, 1, 1, 1, 1] and later.tolist() == x.tolist()[1:]
    return y * int(x[2]) * int(later[0])


def written_behind_a_use(y: Tensor) -> Tensor:
    at = torch.tensor(1)
    before = torch.arange(2) + at
    at += 5
    return y * before.tolist()[1] * int(at)


BODIES = [
    branch_on_a_mask,
    counts_as_numbers,
    masked_rows,
    masked_in_a_tuple,
    written_under_a_mask,
    repeated,
    sizes_of_tensors,
    filled_later,
    resized,
    tensor_of_tensors,
    written_to,
    written_behind_a_use,
]


class Around(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.inner, self.body = nn.Linear(3, 5).double(), body

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(self.inner(x)) ** 2).sum()


def graph_and_eager(model: nn.Module, x: Tensor) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Gradients of the graph, run as it is, and of the model."""
    gm = capture(model, {"x": x})
    values = dict(model.named_parameters()) | gm.meta["constants"] | {"x": x}
    found = []
    for loss in (gm(*(values[s.name] for s in gm.meta["signature"].inputs))[0], model(x)):
        model.zero_grad()
        loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters()} | {"loss": loss.detach()})
    return found[0], found[1]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_graph_is_the_one_that_the_values_make(body: Body) -> None:
    torch.manual_seed(0)
    found, expected = graph_and_eager(Around(body), torch.randn(4, 3).double())
    assert gap(found, expected) < 1e-12


class Blocks(nn.Module):
    """Alike, and each asks for another value of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block, scale in zip(self.blocks, torch.arange(2, 6), strict=True):
            x = block(x, scale)
        return (x**2).sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3).double()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.inner(x).tanh() * int(scale)


def test_modules_that_ask_for_values_are_no_copies_of_each_other() -> None:
    torch.manual_seed(0)
    found, expected = graph_and_eager(Blocks(), torch.randn(4, 3).double())
    assert gap(found, expected) < 1e-12


def drawn(y: Tensor) -> Tensor:
    return y * 2 if torch.rand(()) < 0.5 else y


def drawn_from_known(y: Tensor) -> Tensor:
    return y * 2 if torch.bernoulli(torch.full((), 0.5)).bool() else y


def of_the_input(y: Tensor) -> Tensor:
    mask = torch.ones(4, dtype=torch.bool)
    mask &= y.sum(1) > 0
    return y * 2 if mask.any() else y


def written_through_the_input(y: Tensor) -> Tensor:
    x = torch.zeros(5)
    x[0] = y.detach()[0, 0]
    return y * 2 if x[0] > 0 else y


@pytest.mark.parametrize(
    "body", [drawn, drawn_from_known, of_the_input, written_through_the_input], ids=lambda body: body.__name__
)
def test_what_is_drawn_or_made_of_inputs_is_not_known(body: Body) -> None:
    with pytest.raises(ValueError, match=r"test_known_values.py:\d+ in .*instead of a branch"):
        capture(Around(body), {"x": torch.randn(4, 3).double()})


def filled_by_parts(x: Tensor) -> Tensor:
    """10 TB, as a forward of many rows may make on all ranks together."""
    wide = x.expand(2**19, 2**19, -1)
    whole = wide.new_empty(*wide.shape[:-1], 8)
    whole[..., :5].copy_(wide)
    whole[..., 5:].copy_(wide[..., :3])
    return whole


def sized_by_the_input(x: Tensor) -> Tensor:
    """Only the shape and the dtype of the large tensor matter."""
    wide = x.expand(2**19, 2**19, -1)
    return x * 2 if wide.new_ones(3).all() else x


@pytest.mark.parametrize("body", [filled_by_parts, sized_by_the_input], ids=lambda body: body.__name__)
def test_large_tensors_take_no_memory(body: Body) -> None:
    gm = capture(Around(body), {"x": torch.randn(1, 3).double()})
    assert gm.meta["signature"].outputs
