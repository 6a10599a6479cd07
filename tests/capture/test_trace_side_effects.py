"""What a capture would freeze without an operator to show for it is refused, or told."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.adapters.copying.fake import skeleton_of
from autopar.capture.front_end import capture


class Net(nn.Module):
    def __init__(self, factor: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 4), factor
        self.count, self.kept, self.mean = 0, [], torch.zeros(4)
        self.draws, self.generator = random.Random(0), np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return (h * self.factor(self, h)).sum()


def captured(factor: Callable[[Net, Tensor], Any]) -> Any:
    return capture(skeleton_of(Net(factor)), {"x": torch.ones(2, 4)})


@pytest.mark.parametrize(
    "factor, message",
    [
        (lambda m, h: random.random(), r"test_trace_side_effects\.py:\d+ in .*the forward calls random\.random"),
        (lambda m, h: float(np.random.rand()), r"side_effects\.py:\d+ in .*the forward calls numpy\.random\.rand"),
        (lambda m, h: torch.initial_seed() % 7, r"the forward calls torch\.initial_seed"),
        (lambda m, h: uniform(0, 1), r"test_trace_side_effects\.py:\d+ in .*the forward calls random\.uniform"),
        (lambda m, h: m.draws.random(), r"test_trace_side_effects\.py:\d+ in .*the forward calls random\.random"),
        (lambda m, h: m.generator.random(), r"the forward draws from generator"),
    ],
    ids=["random", "numpy", "torch", "imported", "own", "own numpy"],
)
def test_draws_are_refused(factor: Callable[[Net, Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"capture: .*{message} while it is captured, .*the same in every step"):
        captured(factor)


def test_functions_that_draw_are_put_back() -> None:
    before = open, np.random.rand, torch.initial_seed, sys.getprofile()
    captured(lambda m, h: 1)
    assert before == (open, np.random.rand, torch.initial_seed, sys.getprofile())


def moves_a_counter(m: Net, h: Tensor) -> int:
    m.count += 1
    m.kept.append(h)
    m.seen = h  # type: ignore[assignment]
    return 2 if m.count > 3000 else 1


def test_changes_of_python_state_are_told() -> None:
    with pytest.warns(UserWarning, match="the forward changes Python state: count, kept, seen; compiled steps keep"):
        captured(moves_a_counter)


def test_a_number_taken_out_of_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"side_effects\.py:\d+ in .*item\(\) reads a number from a tensor"):
        captured(lambda m, h: h.abs().max().item())


def moves_a_mean(m: Net, h: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return m.mean


def test_a_running_mean_that_is_no_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the forward reads and replaces mean.*register_buffer"):
        captured(moves_a_mean)


def test_other_models_are_not_told_anything() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        captured(lambda m, h: m.count + float(len(m.kept)) + h.detach().mean())
    assert not [w for w in told if "capture:" in str(w.message)]
