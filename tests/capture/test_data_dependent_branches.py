"""Branches on values: checks are left out, clamps to the largest numbers run always, all others are refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.front_end import capture
from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.testing.harness import check_model

F = nn.functional


class Net(nn.Module):
    """A function between two linears."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.middle = nn.Linear(8, 16), nn.Linear(16, 4), middle

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.middle(self, self.up(x))), y)


def detr(self: Any, h: Tensor) -> Tensor:
    if self.training:  # noqa: SIM102  (as it is written there)
        if not torch.isfinite(h).all():
            clamp_value = torch.finfo(h.dtype).max - 1000
            h = torch.clamp(h, min=-clamp_value, max=clamp_value)
    return h


def longt5(self: Any, h: Tensor) -> Tensor:
    if h.dtype == torch.float64 and (torch.isinf(h).any() or torch.isnan(h).any()):
        most = torch.finfo(h.dtype).max
        h = h.clamp(min=-most, max=most)
    return h


def checks(self: Any, h: Tensor) -> Tensor:
    if (h > 1e6).any():
        raise ValueError("too large")
    assert (h < 1e6).all(), "too large"
    assert not (h > 1e6).any()
    assert torch.all(h < 1e6).item(), "too large"
    if not (h < 1e6).all():
        warnings.warn("too large", stacklevel=1)
    if torch.equal(h, h * 0):
        raise RuntimeError("all zeros")
    return h


def counts(self: Any, h: Tensor) -> Tensor:
    if (h > 0).any():
        h = -h
    return h


def compared_item(self: Any, h: Tensor) -> Tensor:
    if (h > 1e6).any().item() == False:  # noqa: E712
        h = -h
    return h


def narrow(self: Any, h: Tensor) -> Tensor:
    if not torch.isfinite(h).all():
        h = torch.clamp(h, min=-10.0, max=10.0)
    return h


def another(self: Any, h: Tensor) -> Tensor:
    if not torch.isfinite(h).all():
        most = torch.finfo(h.dtype).max
        h = torch.clamp(self.up.bias, min=-most, max=most)
    return h


def otherwise(self: Any, h: Tensor) -> Tensor:
    if (h > 1e6).any():
        raise ValueError("too large")
    else:
        h = h * 2
    return h


def expression(self: Any, h: Tensor) -> Tensor:
    return -h if (h > 0).any() else h


def loop(self: Any, h: Tensor) -> Tensor:
    while (h > 1).any():
        h = h / 2
    return h


def caught(self: Any, h: Tensor) -> Tensor:
    try:
        if (h > 0).any():
            raise ValueError("positive")
    except ValueError:
        h = -h
    return h


def mixed(self: Any, h: Tensor) -> Tensor:
    if not (h < 1e6).all() or h.isnan().any():
        raise ValueError("too large")
    return h


def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {n: torch.randn(8, d, generator=g, dtype=torch.float64) for n, d in (("x", 8), ("y", 4))}


@pytest.mark.parametrize("middle", [detr, longt5, checks], ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:capture:UserWarning")
def test_what_means_the_same_either_way(middle: Any) -> None:
    assert check_model(Net(middle).double(), batch(), Mesh.of(dp=2)).worst < 1e-12


@pytest.mark.parametrize("middle", [counts, narrow, another, otherwise, expression, loop, caught, mixed,
                                    compared_item],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_what_counts_is_refused(middle: Any) -> None:
    with pytest.raises(ValueError, match=rf"branches.py:\d+ in {middle.__name__}, .*instead of a branch"):
        compile_model(Net(middle), {n: x.float() for n, x in batch().items()}, Mesh.of(dp=2))


def test_numbers_that_are_not_finite_are_clamped_as_in_one_process() -> None:
    """The graph, on an infinite number and on none."""
    model = Net(detr).double()
    gm = capture(model, batch())
    found = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.clamp.default)
    largest = torch.finfo(torch.float64).max
    assert found.args[1:] == (-largest, largest)
    for h in (torch.tensor([1.0, math.inf, math.nan, -math.inf]).double(), torch.tensor([largest, -0.0]).double()):
        expected = detr(model, h)
        torch.testing.assert_close(h.clamp(*found.args[1:]), expected, rtol=0, atol=0, equal_nan=True)


def test_what_is_left_out_is_said() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        capture(Net(checks), {n: x.float() for n, x in batch().items()})
        capture(Net(detr).half(), {n: x.half() for n, x in batch().items()})
    texts = [str(w.message) for w in said]
    assert sum("a check of tensor values is skipped in compiled steps" in text for text in texts) >= 4
    assert sum("h is clamped in every step, which changes values above 64504" in text for text in texts) == 1
