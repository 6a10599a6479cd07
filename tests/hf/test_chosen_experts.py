"""Loops over the experts that any token chose, as in transformers 4.48 to 4.57 and in remote code of many models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import check_model

EXPERTS, WIDTH = 4, 8


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12, bias=False), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(x)))
        return out


class _Model(nn.Module):
    """One layer of experts; ``run(layer, x, index, weights)`` is what is tested."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.gate, self.head = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(_Expert() for _ in range(EXPERTS))
        self.stacked = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)
        with torch.no_grad():
            self.gate.bias[-1] = -100.0  # nobody asks the last

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, index = F.softmax(self.gate(flat), -1).topk(2, -1)
        y = self.run(self, flat, index, weights / weights.sum(-1, keepdim=True))
        return F.cross_entropy(self.head(y), labels.flatten())


def mixtral(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    expert_mask = F.one_hot(index, num_classes=EXPERTS).permute(2, 1, 0)
    expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in expert_hit:
        expert_layer = layer.experts[expert_idx]
        idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
        current_state = x[None, top_x].reshape(-1, WIDTH)
        current_hidden_states = expert_layer(current_state) * weights[top_x, idx, None]
        y.index_add_(0, top_x, current_hidden_states.to(x.dtype))
    return y


def stacked(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    final = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(index, num_classes=EXPERTS + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert_idx in hit:
        expert_idx = expert_idx[0]
        if expert_idx == EXPERTS:
            continue
        top_k_pos, token_idx = torch.where(mask[expert_idx])
        current = F.silu(F.linear(x[token_idx], layer.stacked[expert_idx])) * weights[token_idx, top_k_pos, None]
        final.index_add_(0, token_idx, current.to(final.dtype))
    return final


def masked(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in (F.one_hot(index, EXPERTS).sum((0, 1)) >= 1).nonzero().flatten():
        token, k = torch.where(index == e)
        y[token] += layer.experts[e](x[token]) * weights[token, k, None]
    return y


def anywhere(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    chosen = F.one_hot(index, EXPERTS).bool()
    for e in chosen.any(1).any(0).nonzero(as_tuple=True)[0]:
        token, k = torch.where(chosen[:, :, e])
        rows = layer.experts[int(e)](x[token]) * weights[token, k].unsqueeze(-1)
        y = y.index_add(0, token, rows)
    return y


def enumerated(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    counts = F.one_hot(index, EXPERTS).sum(1).sum(0)
    for _, e in enumerate((counts > 0).nonzero().squeeze(-1)):
        token, k = (index == e).nonzero(as_tuple=True)
        y.index_add_(0, token, layer.experts[e.item()](x[token]) * weights[token, k, None])
    return y


def popular(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Experts with few tokens are left out, though they have rows."""
    y = torch.zeros_like(x)
    for e in (F.one_hot(index, EXPERTS).sum((0, 1)) > 9).nonzero().flatten():
        token, k = torch.where(index == e)
        y.index_add_(0, token, layer.experts[e](x[token]) * weights[token, k, None])
    return y


def others(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Rows of the next expert."""
    y = torch.zeros_like(x)
    for e in (F.one_hot(index, EXPERTS).sum((0, 1)) > 0).nonzero().flatten():
        token, k = torch.where(index == (e + 1) % EXPERTS)
        y.index_add_(0, token, layer.experts[e](x[token]) * weights[token, k, None])
    return y


GROUPED = [mixtral, stacked, masked, anywhere, enumerated]
MESHES = ["dp=2", "tp=2", "ep=2", "dp=2,ep=2"]


def _made(run: Callable[..., Tensor], rows: int = 4) -> tuple[nn.Module, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, WIDTH, generator=g, dtype=torch.float64)
    labels = torch.randint(0, 3, (rows, 6), generator=g)
    return _Model(run).double(), {"x": x, "labels": labels}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("run", GROUPED)
def test_loops_over_chosen_experts_are_a_dispatch(run: Any, mesh: str) -> None:
    model, batch = _made(run)
    found = check_model(model, batch, Mesh.parse(mesh))
    assert found.worst < 1e-10
    nodes = [str(n.target) for n in found.compiled.stage.forward.graph.graph.nodes]
    assert any("moe_dispatch" in name for name in nodes)


@pytest.mark.parametrize("run", [popular, others])
def test_turns_that_are_skipped_do_nothing(run: Any) -> None:
    """Experts that have rows, but whose turn torch does not run."""
    model, batch = _made(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mesh in (Mesh.of(dp=2), Mesh.of(tp=2)):
            assert check_model(model, batch, mesh).worst < 1e-10


def test_a_loop_over_chosen_experts_with_microbatches() -> None:
    model, batch = _made(mixtral, 8)
    assert check_model(model, batch, Mesh.of(dp=2), Options(microbatches=2)).worst < 1e-10


def breaks(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in (F.one_hot(index, EXPERTS).sum((0, 1)) > 0).nonzero().flatten():
        token, k = torch.where(index == e)
        y.index_add_(0, token, layer.experts[e](x[token]) * weights[token, k, None])
        break
    return y


def counts(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y, turn = torch.zeros_like(x), 0
    for e in (F.one_hot(index, EXPERTS).sum((0, 1)) > 0).nonzero().flatten():
        turn = turn + 1
        token, _ = torch.where(index == e)
        y.index_add_(0, token, layer.experts[e](x[token]) * turn)
    return y


def scales(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = torch.ones_like(x)
    for e in (F.one_hot(index, EXPERTS).sum((0, 1)) > 0).nonzero().flatten():
        token, _ = torch.where(index == e)
        y.mul_(0.5)
        y.index_add_(0, token, layer.experts[e](x[token]))
    return y


def listed(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    found = []
    for e in (F.one_hot(index, EXPERTS).sum((0, 1)) > 0).nonzero().flatten():
        found.append(layer.experts[e].up.weight.sum())
    return x * torch.stack(found).mean()


def ends(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in (F.one_hot(index, EXPERTS).sum((0, 1)) > 0).nonzero().flatten():
        token, _ = torch.where(index == e)
        y.index_add_(0, token, layer.experts[e](x[token]))
    return y * int(e)


def comprehended(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    hit = (F.one_hot(index, EXPERTS).sum((0, 1)) > 0).nonzero().flatten()
    return x * torch.stack([layer.experts[e].up.weight.sum() for e in hit]).sum()


@pytest.mark.parametrize("run", [breaks, counts, scales, listed, ends, comprehended])
def test_loops_whose_turns_do_more_are_refused(run: Any) -> None:
    model, batch = _made(run)
    with pytest.raises(ValueError, match=r"capture: .*test_chosen_experts.py"):
        compile_model(model, batch, Mesh.of(dp=2), lift_to_float64=True)


def in_a_dict(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    outs = {}
    for e in range(EXPERTS):
        mask = index == e
        if mask.any():
            outs[e] = layer.experts[e](x).mean()
    return x * sum(outs.values())


def in_a_list(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    outs = []
    for e in range(EXPERTS):
        mask = index == e
        if mask.any():
            outs.append(layer.experts[e](x).mean())
    return x * torch.stack(outs).mean()


def by_a_function(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    outs = [x.mean()] * EXPERTS

    def keep(e: int, value: Tensor) -> int:
        outs[e] = value
        return e

    for e in range(EXPERTS):
        mask = index == e
        if mask.any():
            _ = keep(e, layer.experts[e](x).mean())
    return x * torch.stack(outs).sum()


def of_rows(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    outs = {-1: x.mean()}
    for e in range(EXPERTS):
        token, _ = torch.where(index == e)
        if token.numel():
            outs[e] = layer.experts[e](x[token]).mean()
    return x * sum(outs.values())


@pytest.mark.parametrize("run", [in_a_dict, in_a_list, by_a_function, of_rows])
def test_values_that_are_there_only_for_chosen_experts_are_refused(run: Any) -> None:
    """Nobody asks the last: in torch its value does not exist."""
    model, batch = _made(run)
    with pytest.raises(ValueError, match=r"capture: .*test_chosen_experts.py"):
        compile_model(model, batch, Mesh.of(dp=2), lift_to_float64=True)
