"""Each shorter way gives exactly what the operator gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_leaves

from autopar import ops as ops  # registers autopar::
from autopar.runtime.exec.lowering import FUNCTIONS, IN_PLACE, METHODS, bypass_dispatch

aten = torch.ops.aten
A = torch.linspace(0.1, 2.0, 12).view(3, 4)
B = torch.linspace(-1.0, 3.0, 12).view(3, 4)

SAMPLES: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
    aten.add.Tensor: ((A, B), {"alpha": 2}),
    aten.add.Scalar: ((A, 1), {}),
    aten.sub.Tensor: ((A, B), {}),
    aten.mul.Tensor: ((A, 0.3), {}),
    aten.mul.Scalar: ((A, -0.5), {}),
    aten.div.Tensor: ((A, B), {}),
    aten.div.Scalar: ((A, 7), {}),
    aten.pow.Tensor_Scalar: ((A, 3), {}),
    aten.mm.default: ((A, B.t()), {}),
    aten.bmm.default: ((A[None], B.t()[None]), {}),
    aten.addmm.default: ((A[:, 0], A, B.t()), {"beta": 2, "alpha": 3}),
    aten.transpose.int: ((A, 0, 1), {}),
    aten.unsqueeze.default: ((A, 1), {}),
    aten.squeeze.dim: ((A[None], 0), {}),
    aten.permute.default: ((A, [1, 0]), {}),
    aten.cat.default: (([A, B], 1), {}),
    aten.sum.dim_IntList: ((A, [0], True), {"dtype": torch.float64}),
    aten.mean.dim: ((A, [-1], True), {}),
    aten.split_with_sizes.default: ((A, [1, 3], 1), {}),
    aten.where.self: ((B > 0, A, B), {}),
    aten.linear.default: ((A, B), {"bias": A[:, 0]}),
    aten.gelu.default: ((A,), {"approximate": "tanh"}),
    aten.layer_norm.default: ((A, [4], B[0], B[1], 1e-4, False), {}),
    aten.index_select.default: ((A, 0, torch.tensor([2, 0])), {}),
    aten.embedding.default: ((A, torch.tensor([2, 0]), 1), {}),
    aten.clone.default: ((A.t(),), {"memory_format": torch.contiguous_format}),
    aten.reshape.default: ((A.t(), [-1]), {}),
    aten.view.default: ((A, [2, 6]), {}),
    aten._unsafe_view.default: ((A, [12]), {}),
    aten.expand.default: ((A[:, :1], [3, 5]), {}),
}


@pytest.mark.parametrize("op", [*FUNCTIONS, *METHODS], ids=str)
def test_the_same_values_strides_and_dtypes(op: Any) -> None:
    args, kwargs = SAMPLES.get(op, ((A,), {}))
    graph = Graph()
    node = graph.call_function(op, args, kwargs)
    bypass_dispatch(node)
    assert node.target is not op
    call = getattr(args[0], node.target) if node.op == "call_method" else None
    found = call(*args[1:], **kwargs) if call else node.target(*args, **kwargs)  # type: ignore[operator]
    for a, b in zip(tree_leaves(found), tree_leaves(op(*args, **kwargs)), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype


def test_our_operators_become_their_kernels() -> None:
    graph = Graph()
    logits, target = graph.placeholder("logits"), graph.placeholder("target")
    loss = graph.call_function(torch.ops.autopar.cross_entropy.default, (logits, target, -100, 0.0))
    graph.output(loss)
    bypass_dispatch(loss)
    assert loss.target is not torch.ops.autopar.cross_entropy.default
    inputs = torch.randn(5, 7), torch.tensor([1, 2, -100, 0, 6])
    found = GraphModule(torch.nn.Module(), graph)(*inputs)
    expected = torch.ops.autopar.cross_entropy(*inputs, -100, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_other_operators_stay() -> None:
    graph = Graph()
    node = graph.call_function(aten.silu.default, (A,))
    bypass_dispatch(node)
    assert node.target is aten.silu.default


def test_a_view_of_what_is_stored_otherwise_than_tracing_thought_is_a_copy() -> None:
    node = Graph().call_function(aten.view.default, (A, [12]))
    bypass_dispatch(node)
    assert torch.equal(getattr(A.t(), str(node.target))([12]), A.t().reshape(12))


@pytest.mark.parametrize(
    ("op", "over", "args"),
    [
        (aten.add.Tensor, 0, (A, B)),
        (aten.add.Tensor, 1, (B[:1], A)),
        (aten.addmm.default, 0, (torch.ones(3, 3), A, B.t())),
    ],
    ids=["first", "second", "product"],
)
def test_a_sum_is_written_over_an_operand(op: Any, over: int, args: tuple[Tensor, ...]) -> None:
    expected, given = op(*args), [x.clone() for x in args]
    node = Graph().call_function(op, tuple(range(len(args))))  # type: ignore[arg-type]
    bypass_dispatch(node, over)
    assert node.op == "call_method" and node.target == IN_PLACE[op]
    found = getattr(given[node.args[0]], node.target)(*(given[i] for i in node.args[1:]))  # type: ignore
    assert found.data_ptr() == given[over].data_ptr() and torch.equal(found, expected)
    assert all(torch.equal(x, y) for i, (x, y) in enumerate(zip(args, given, strict=True)) if i != over)
