"""torch.linalg in a model: exact on meshes, a matrix that is refused is refused as by torch, and no effect is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.adapters.copying.fake import new_mode
from autopar.ir.graph import placeholders
from autopar.ir.mesh import Mesh
from autopar.passes.autodiff.trace_joint import joint_graph
from autopar.steps.of_rank import backwards
from autopar.testing.harness import check_model
from tests.support.plain_models import EXACT
from tests.support.ranks import run_ranks

L = torch.linalg


class Matrices(nn.Module):
    """A batch of matrices made of the examples, and one made of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight = nn.Linear(6, 9), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        eye = torch.eye(3, dtype=x.dtype)
        h = self.up(x).unflatten(-1, (3, 3))
        h, w = h @ h.mT + eye, self.weight @ self.weight.mT + eye
        each = [
            L.solve(h, w.expand_as(h)), L.solve(w, h), L.solve(h, h[..., 0]), L.inv(h), h @ torch.inverse(w),
            L.cholesky(h), L.lu_factor(h)[0], L.det(h), L.slogdet(h)[1], L.eigvalsh(h), L.svdvals(h), L.qr(h)[1],
            L.pinv(h), L.solve_triangular(h, w, upper=True), L.matrix_norm(h, 2), L.cross(h, w.expand_as(h)),
            torch.cholesky_solve(h, L.cholesky(w)), L.matrix_exp(0.1 * h),
        ]  # fmt: skip
        return torch.stack([(value * (i + 1)).square().mean() for i, value in enumerate(each)]).sum()


def test_matrices_are_exact() -> None:
    torch.manual_seed(0)
    result = check_model(Matrices().double(), {"x": torch.randn(4, 6, dtype=torch.float64)}, Mesh.of(dp=2, tp=2))
    assert result.worst < EXACT
    graphs = [step.graph for step in (result.compiled.stage.forward, *backwards(result.compiled.stage))]
    assert not any("token" in n.name for graph in graphs for n in placeholders(graph))


class Solves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return L.solve(a * self.scale, b).square().mean()


def singular() -> tuple[str, str]:
    """What the step of the rank with a singular matrix says, in training and in evaluation; the next step runs."""
    a, b = torch.eye(3, dtype=torch.float64).repeat(4, 1, 1), torch.ones(4, 3, 1, dtype=torch.float64)
    model = Solves().double()
    parallel = autopar.parallelize(model, autopar.init_mesh("cpu", dp=1), example_batch={"a": a, "b": b})
    bad = a.clone()
    bad[2, 1, 1] = 0.0
    said = []
    for step in (parallel.train_step, parallel.eval_step):
        with pytest.raises(L.LinAlgError) as raised:
            step(a=bad, b=b)
        said.append(str(raised.value))
    assert all(p.grad is None for p in parallel.parameters())
    assert abs(float(parallel.train_step(a=a, b=b)) - float(model(a, b))) < EXACT
    return said[0], said[1]


def test_a_singular_matrix_is_refused_as_by_torch() -> None:
    for text in run_ranks(1, singular)[0]:
        assert text.startswith("step: aten._linalg_solve_ex.default at ") and "test_linalg.py" in text
        assert "torch.linalg.solve: (Batch element 2): The solver failed because the input matrix is singular" in text


def graph_of(function: Any, *values: Tensor) -> torch.fx.GraphModule:
    graph, mode = torch.fx.Graph(), new_mode()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(values))]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = mode.from_tensor(value)
    graph.output((graph.call_function(function, tuple(nodes)),))
    return torch.fx.GraphModule(nn.Module(), graph)


def test_an_effect_that_cannot_be_kept_is_refused() -> None:
    @torch.library.custom_op("autopar_test::shout", mutates_args=())
    def shout(x: Tensor) -> Tensor:
        return x.clone()

    shout.register_fake(torch.empty_like)
    shout.register_effect(torch.library.EffectType.ORDERED)
    with pytest.raises(ValueError, match=r"capture: .*shout.* has a side effect"):
        joint_graph(graph_of(torch.ops.autopar_test.shout.default, torch.ones(2)), [False])


def test_what_torch_cannot_differentiate_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"differentiate: .*linalg_ldl_factor_ex.*; torch has no backward for it"):
        joint_graph(graph_of(lambda x: L.ldl_factor(x)[0].sum(), torch.eye(3)), [True])
