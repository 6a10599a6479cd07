"""What a forward does to its own modules: new buffers and casts count as values, and the model stays as it was."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.front_end import LiftFloat32, capture
from autopar.ir.mesh import Mesh
from autopar.testing.harness import check_model

F = nn.functional


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.middle(self.up(x), x)), y)

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        return h


class LastLoss(Net):
    """A value with a gradient, kept from step to step."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.last_loss = super().forward(x, y)
        return self.last_loss


class LatePositions(Net):
    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        if not hasattr(self, "positions"):
            self.register_buffer("positions", torch.arange(16, dtype=h.dtype), persistent=False)
        return h + self.positions


class Seen(Net):
    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        self.register_buffer("seen", x.detach() * 2.0)
        return h * self.seen.mean()


class Router(Net):
    """As in Switch and NLLB: a module in float32 whatever the model is."""

    def middle(self, h: Tensor, x: Tensor) -> Tensor:
        self.down = self.down.to(torch.float32)
        return h.to(torch.float32)


def batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {n: torch.randn(8, d, generator=g).to(dtype) for n, d in (("x", 8), ("y", 4))}


def copied(model: nn.Module) -> Any:
    return {name: (x.dtype, x.clone()) for name, x in model.state_dict().items()}


@pytest.mark.parametrize("ran", [False, True], ids=["new", "after an eager step"])
@pytest.mark.parametrize("kind", [LastLoss, LatePositions, Seen, Router], ids=lambda c: c.__name__)
@pytest.mark.filterwarnings("ignore:capture:UserWarning")
def test_models(kind: type[Net], ran: bool) -> None:
    model = kind().double()
    if ran:
        with LiftFloat32():
            model(**batch())
    before = copied(model)
    assert check_model(model, batch(), Mesh.of(dp=2)).worst < 1e-12
    model = kind().double()
    before = copied(model)
    capture(model, batch(), lift_to_float64=True)
    after = copied(model)
    assert before.keys() == after.keys() and all(before[n][0] == after[n][0] for n in before)


def test_casts_are_part_of_the_graph_and_are_said() -> None:
    model, given = Router().bfloat16(), batch(torch.bfloat16)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gm = capture(model, given)
    assert any("casts Linear.weight to torch.float32: steps compute with a cast" in str(w.message) for w in said)
    assert model.down.weight.dtype == torch.bfloat16
    product = [n for n in gm.graph.nodes if n.target is torch.ops.aten.linear.default][-1]
    assert product.meta["val"].dtype == torch.float32
    expected = model(**given)
    values = {**dict(Router().bfloat16().named_parameters()), **given}
    specs = {s.node: s.name for s in gm.meta["signature"].inputs}
    found = gm(*(values[specs[n.name]] for n in gm.graph.nodes if n.op == "placeholder"))
    torch.testing.assert_close(found[0], expected)


def test_afterwards_modules_change_as_they_do() -> None:
    methods = nn.Module.to, nn.Module.register_buffer
    capture(Net(), batch(torch.float32), lift_to_float64=False)
    with LiftFloat32():
        assert nn.Linear(2, 2).to(torch.float32).weight.dtype == torch.float64
    assert (nn.Module.to, nn.Module.register_buffer) == methods
    assert nn.Linear(2, 2).to(torch.float16).weight.dtype == torch.float16
