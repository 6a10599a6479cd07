"""Weights that multiply their own result: sharded on tp, and their input is gathered, once for each time step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compile.model import compile_model
from autopar.cost.traffic import communication
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.steps.graphs import Compiled
from autopar.testing.harness import check_model
from tests.support.cases import Cell, called, check
from tests.support.subjects import SPECIAL

ROWS, STEPS, WIDTH = 4, 3, 8


class Recurrent(nn.Module):
    """A recurrence over a sequence, and a head."""

    def __init__(self, kind: Any, **more: Any) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True, **more)
        self.head = nn.Linear(WIDTH * (2 if more.get("bidirectional") else 1), WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0]).square().mean()


class Looped(nn.Module):
    """One layer, called again and again."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(width, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(STEPS):
            x = torch.tanh(self.layer(x))
        return self.head(x).square().mean()


def _sequence() -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, STEPS, WIDTH, dtype=torch.float64)}


KINDS: dict[str, Any] = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "two layers": lambda: Recurrent(nn.LSTM, num_layers=2),
    "both ways": lambda: Recurrent(nn.GRU, bidirectional=True),
    "without biases": lambda: Recurrent(nn.GRU, bias=False),
    "RNN": lambda: Recurrent(nn.RNN, nonlinearity="relu"),
    "loop": Looped,
}


def _made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = KINDS[kind]().double()
    return model


SPECIAL["recurrence"] = lambda: (_made("LSTM"), _sequence())


def _moves(made: Compiled, axis: str = "tp") -> dict[str, Counter[str]]:
    """Calls and bytes of one step on an axis, by kind."""
    found: dict[str, Counter[str]] = {"calls": Counter(), "bytes": Counter()}
    assert made.stage.backward_reduce is not None
    for gm in (made.stage.forward.graph, made.stage.backward_reduce.graph):
        for (on, kind), volume in communication(gm, made.plan.mesh).items():
            if on == axis:
                found["calls"][kind] += volume.calls
                found["bytes"][kind] += volume.bytes
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_all_weights_are_cut_and_exact(kind: str) -> None:
    mesh = Mesh.of(dp=2, tp=4 if kind == "RNN" else 2)
    result = check_model(_made(kind), _sequence(), mesh, Options(zero=3))
    assert result.worst < 1e-10, str(result)
    (share,) = (s for s in result.compiled.plan.shares if s.axis == "tp")
    assert share.parameters > 0.98, share


def test_frozen_recurrent_weights() -> None:
    model = _made("LSTM")
    assert isinstance(model.rnn, nn.LSTM)
    model.rnn.weight_hh_l0.requires_grad_(False)
    assert check_model(model, _sequence(), Mesh.of(dp=2, tp=2), Options(zero=3)).worst < 1e-10


def test_real_ranks() -> None:
    check(called(Cell("recurrence", Mesh.of(tp=2))))


def test_what_is_gathered() -> None:
    """h before each of its products: STEPS - 1 times in the recurrence (the first h is no weight's), and once, all of
    them, before the head if that is a column. Its gradient is scattered as often."""
    made = compile_model(_made("LSTM"), _sequence(), Mesh.of(tp=2), Options(), outputs=())
    head = made.plan.parameter("head.weight", "tp").stored
    found, more = _moves(made), int(getattr(head, "dim", None) == 0)
    assert found["calls"]["all_gather"] == found["calls"]["reduce_scatter"] == STEPS - 1 + more
    half = ROWS * WIDTH * 8 // 2  # what each rank sends of one h
    assert found["bytes"]["all_gather"] == (STEPS - 1 + more * STEPS) * half
    assert "gathered before products" in made.plan.parameter("rnn.weight_hh_l0", "tp").reason


def test_a_width_that_does_not_divide_stays_whole_and_says_so() -> None:
    model = Looped(7).double()
    made = compile_model(model, {"x": torch.randn(4, 7, dtype=torch.float64)}, Mesh.of(tp=2), Options(), outputs=())
    assert "does not divide over 2 ranks" in dict(made.plan.notes)["layer.weight"]
