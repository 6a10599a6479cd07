"""Operators of others with a registered backward: one that is not linear in the gradient sees the whole gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import Checked, check_model

_library = torch.library.Library("autopar_tests", "DEF")
_library.define("largest(Tensor w) -> Tensor")
_library.impl("largest", lambda w: w * 1.0, "CPU")
_library.impl("largest", torch.empty_like, "Meta")


def _largest(ctx: Any, grad: Tensor) -> Tensor:
    """Of the gradient, what is as large as its fifth largest entry."""
    return grad * (grad.abs() >= grad.abs().flatten().topk(5).values[-1])


torch.library.register_autograd("autopar_tests::largest", _largest, lib=_library)


def _op(name: str, backward: Any) -> None:
    op = torch.library.custom_op(
        f"autopar_tests::{name}", lambda w: w * 1.0, mutates_args=(), schema="(Tensor w) -> Tensor"
    )
    op.register_fake(torch.empty_like)
    op.register_autograd(backward)


_op("clipped", lambda ctx, grad: grad.clamp(-3e-3, 3e-3))
_op("doubled", lambda ctx, grad: grad * 2.0)
NONLINEAR = ("largest", "clipped")


class Net(nn.Module):
    """``name``: of the operator; on a weight or on a value that is cut."""

    def __init__(self, name: str, on_weight: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op, self.on_weight = getattr(torch.ops.autopar_tests, name), on_weight
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x @ self.op(self.up.weight) if self.on_weight else self.op(x @ self.up.weight)
        return nn.functional.mse_loss(self.down(h.tanh()), y)


def check(name: str, on_weight: bool, mesh: str, **options: Any) -> Checked:
    g = torch.Generator().manual_seed(1)
    batch = {n: torch.randn(8, d, generator=g, dtype=torch.float64) for n, d in (("x", 8), ("y", 4))}
    result = check_model(Net(name, on_weight).double(), batch, Mesh.parse(mesh), Options(**options))
    assert result.worst < 1e-12
    return result


@pytest.mark.parametrize("name", NONLINEAR)
@pytest.mark.parametrize("on_weight", [True, False])
def test_a_backward_that_is_not_linear_sees_the_whole_gradient(name: str, on_weight: bool) -> None:
    """As far as replicate_ops lets the operator run on what is cut, or on copies."""
    check(name, on_weight, "dp=2", zero=3, replicate_ops=(f"autopar_tests.{name}.default",))
    check(name, on_weight, "tp=2")


def test_over_microbatches_it_is_refused_and_a_derivative_is_not() -> None:
    for name in NONLINEAR:
        with pytest.raises(ValueError, match=rf"^microbatches: .*autopar_tests.{name}.default is not linear in the gr"):
            check(name, True, "dp=1", microbatches=2)
    check("doubled", True, "dp=2", microbatches=2)


def test_what_cannot_be_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.rules.infer_rule.MOST_ELEMENTS", 16)
    with pytest.warns(
        UserWarning, match=r"backward of autopar_tests.doubled.default cannot be tried out .*64 elements"
    ):
        check("doubled", True, "dp=2")
