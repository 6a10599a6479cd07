"""What differentiation spells out becomes short again, and stays the same number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.ir.mesh import Mesh
from autopar.passes.step.simplify import Simplify
from autopar.rewrite.compilation import Compilation

aten = torch.ops.aten


def names(gm: GraphModule) -> list[str]:
    return [str(n.target).removeprefix("aten.") for n in gm.graph.nodes if n.op == "call_function"]


def simplified(function: Callable[..., Tensor], *inputs: Tensor) -> GraphModule:
    """The graph of a function after the pass, which must give the same numbers."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    expected = gm(*inputs)
    gm = Simplify().apply(gm, Compilation(Mesh.of(dp=2)))
    torch.testing.assert_close(gm(*inputs), expected, rtol=1e-12, atol=1e-12)
    return gm


def test_a_quotient_is_taken_before_the_expansion() -> None:
    gm = simplified(lambda x: aten.div.Scalar(aten.expand.default(x, [3, 8]), 8), torch.randn(3, 1).double())
    assert names(gm) == ["expand.default", "div.Scalar"]  # the result is an output, which owns its storage
    gm = simplified(lambda x: aten.div.Scalar(aten.expand.default(x, [3, 8]), 8).exp(), torch.randn(3, 1).double())
    assert names(gm) == ["div.Scalar", "expand.default", "exp.default"]


def test_a_kernel_gets_what_was_dense_when_it_was_traced() -> None:
    """The backward of group_norm reads its gradient as it lies in memory."""
    x, w = torch.randn(2, 4, 3, 3).double(), torch.randn(4).double()
    _, mean, deviation = aten.native_group_norm(x, w, w, 2, 4, 9, 1, 1e-5)
    grad = torch.randn(2, 4, 1, 1).double()

    def backward(call: Any, g: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, w: Tensor) -> Tensor:
        dense = call(aten.expand.default(g, [2, 4, 3, 3]))
        made: Tensor = aten.native_group_norm_backward(dense, x, mean, deviation, w, 2, 4, 9, 1, [True] * 3)[0]
        return made

    simplified(lambda *given: backward(lambda g: aten.div.Scalar(g, 9), *given), grad, x, mean, deviation, w)
    simplified(lambda *given: backward(lambda g: aten.mul.Tensor(g, 1.0), *given), grad, x, mean, deviation, w)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: aten.pow.Tensor_Scalar(x, 1.0),
        lambda x: aten.mul.Tensor(x, 1.0),
        lambda x: aten.div.Scalar(x, 1),
        lambda x: aten.t.default(aten.t.default(x)),
    ],
)
def test_what_changes_nothing_goes(call: Callable[[Tensor], Tensor]) -> None:
    assert names(simplified(lambda x: call(x).exp(), torch.randn(3, 4).double())) == ["exp.default"]


def test_integer_zeros_go_and_float_zeros_stay() -> None:
    assert names(simplified(lambda x: aten.add.Tensor(x, 0).neg(), torch.arange(3))) == ["neg.default"]
    gm = simplified(lambda x: aten.add.Tensor(x, 0.0).neg(), torch.tensor([-0.0], dtype=torch.float64))
    assert names(gm) == ["add.Tensor", "neg.default"]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: aten.mul.Tensor(x, 1.5).exp(),
        lambda x: aten.mul.Tensor(x, 1.0),  # an output
        lambda x: aten.div.Scalar(x.to(torch.int64), 1).exp(),  # another dtype
    ],
)
def test_the_rest_stays(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(3.0, dtype=torch.float64)
    before = names(make_fx(call, tracing_mode="fake")(x))
    assert names(simplified(call, x)) == before
