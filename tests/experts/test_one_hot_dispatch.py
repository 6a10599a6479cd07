"""Experts behind products with one-hot tensors [tokens, experts, capacity], as GShard and its followers write them.

They are exact where tokens or widths are sharded, since a capacity counts the tokens of the whole batch, and refused on
an axis of experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.ir.mesh import Mesh
from autopar.testing.harness import check_model

EXPERTS, WIDTH, INNER = 4, 16, 32


def top_two(logits: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Logits [S, E] -> auxiliary loss, weights [S, E, C] of the two experts of each token; those beyond the capacity of
    an expert are dropped, the second choices first."""
    gates = logits.softmax(1)
    first = F.one_hot(gates.argmax(1), EXPERTS)
    second = F.one_hot(logits.masked_fill(first.bool(), float("-inf")).argmax(1), EXPERTS)
    auxiliary = (gates.mean(0) * first.to(gates.dtype).mean(0)).mean() * EXPERTS
    places = first.cumsum(0) - 1, second.cumsum(0) - 1 + first.sum(0, keepdim=True)
    kept = [m * (at < capacity) for m, at in zip((first, second), places, strict=True)]
    shares = [torch.einsum("se,se->s", gates, m.to(gates.dtype)) for m in kept]
    total = (shares[0] + shares[1]).clamp(min=1e-12)
    combined = torch.zeros((), dtype=gates.dtype)
    for m, at, share in zip(kept, places, shares, strict=True):
        slot = F.one_hot((at * m).sum(1), capacity).to(gates.dtype)
        weight = torch.einsum("s,se->se", share / total, m.to(gates.dtype))
        combined = combined + torch.einsum("se,sc->sec", weight, slot)
    return auxiliary, combined


class Layer(nn.Module):
    """``spelling``: "einsum" (GShard), "products" (fairseq), "list" (DeepSpeed) or "rows" (mesh-tensorflow: a capacity
    for each row)."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling, self.router = spelling, nn.Linear(WIDTH, EXPERTS, bias=False)
        if spelling == "list":
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)) for _ in range(EXPERTS)
            )
        else:
            self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
            self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)

    def inner(self, x: Tensor) -> Tensor:
        """[E, C, M] -> [E, C, M]"""
        if self.spelling == "list":
            return torch.cat([expert(c) for expert, c in zip(self.experts, x.chunk(EXPERTS), strict=True)])
        return torch.einsum("ech,ehm->ecm", torch.einsum("ecm,emh->ech", x, self.up).relu(), self.down)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.spelling == "rows":
            made = [top_two(self.router(row), x.shape[1] // 2) for row in x.unbind()]
            weights = torch.stack([w for _, w in made])
            chosen = torch.einsum("gsec,gsm->egcm", (weights > 0).to(x.dtype), x)
            hidden = torch.einsum("egcm,emh->egch", chosen, self.up).relu()
            back = torch.einsum("egch,ehm->egcm", hidden, self.down)
            return torch.einsum("gsec,egcm->gsm", weights, back), torch.stack([a for a, _ in made]).mean()
        tokens = x.reshape(-1, WIDTH)
        capacity = tokens.shape[0] // 2
        auxiliary, weights = top_two(self.router(tokens), capacity)
        used = weights.bool().to(x.dtype)
        if self.spelling == "products":
            rows = used.permute(1, 2, 0).reshape(EXPERTS * capacity, -1).mm(tokens).view(EXPERTS, capacity, WIDTH)
        else:
            rows = torch.einsum("sec,sm->ecm", used, tokens)
        y = weights.flatten(1).mm(self.inner(rows).flatten(0, 1))
        return y.view(x.shape), auxiliary


class Model(nn.Module):
    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(32, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)
        self.layers = nn.ModuleList(Layer(spelling) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, more = self.embed(ids), torch.zeros((), dtype=self.head.weight.dtype)
        for layer in self.layers:
            y, auxiliary = layer(self.norm(x))
            x, more = x + y, more + auxiliary
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + more / 100


def made(spelling: str) -> tuple[Model, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Model(spelling).double(), {"ids": torch.randint(0, 32, (4, 8))}


FULL = pytest.mark.full
SPELLINGS = [
    "einsum",
    pytest.param("products", marks=FULL),
    pytest.param("list", marks=FULL),
    pytest.param("rows", marks=FULL),
]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_tokens_and_widths_are_sharded(spelling: str, mesh: str) -> None:
    assert check_model(*made(spelling), Mesh.parse(mesh)).worst < 1e-10


def test_refused_on_an_axis_of_experts() -> None:
    with pytest.raises(ValueError, match=r"^experts: nothing to shard on axis .*; use dp instead$"):
        check_model(*made("einsum"), Mesh.of(ep=2))
