"""Experts behind products with one-hot tensors [tokens, experts, capacity], as GShard and its followers write them.

They are exact where tokens, widths or experts are sharded: a capacity counts the tokens of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.testing.harness import check_model
from tests.support.ranks import run_ranks
from tests.support.steps_on_ranks import step_on_rank

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
        layers = {"slots": Slots, "switch": Switch, "heads": Heads}
        self.layers = nn.ModuleList(layers[spelling]() if spelling in layers else Layer(spelling) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, more = self.embed(ids), torch.zeros((), dtype=self.head.weight.dtype)
        for layer in self.layers:
            y, auxiliary = layer(self.norm(x))
            x, more = x + y, more + auxiliary
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + more / 100


def made(spelling: str) -> tuple[Model, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Model(spelling).double(), {"ids": torch.randint(0, 32, (4, 8))}


class Slots(nn.Module):
    """Soft MoE (Puigcerver et al., arXiv:2308.00951): slots of experts are weighted means of all tokens of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(WIDTH, EXPERTS - 1, 3))
        self.up, self.inner_bias = nn.Parameter(torch.randn(3, WIDTH, INNER) / 4), nn.Parameter(torch.randn(3, INNER))
        self.down, self.bias = nn.Parameter(torch.randn(3, INNER, WIDTH) / 4), nn.Parameter(torch.randn(3, 1, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.einsum("bnd,dep->bnep", x, self.phi)
        slots = torch.einsum("bnd,bnep->bepd", x, logits.softmax(1))
        hidden = F.gelu(torch.einsum("bepd,edf->bepf", slots, self.up) + self.inner_bias[:, None])
        y = torch.einsum("bepf,efd->bepd", hidden, self.down) + self.bias
        return torch.einsum("bepd,bnep->bnd", y, logits.flatten(2).softmax(-1).view_as(logits)), x.new_zeros(())


class Switch(nn.Module):
    """One of three experts with five places each, weights [E, out, in], gated; the last one never gets a token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.up, self.gate = nn.Parameter(torch.randn(3, INNER, WIDTH)), nn.Parameter(torch.randn(3, INNER, WIDTH))
        self.bias, self.down = nn.Parameter(torch.randn(3, INNER)), nn.Parameter(torch.randn(3, WIDTH, INNER))
        self.router.bias.data[2] = -1e9

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, WIDTH)
        gate, index = self.router(tokens).softmax(-1).max(-1)
        chosen = F.one_hot(index, 3)
        place = chosen.cumsum(0) * chosen - 1
        used = (F.one_hot(place.clamp(0, 4), 5) * ((place >= 0) & (place < 5)).unsqueeze(-1)).to(x.dtype)
        rows = (used.flatten(1).t() @ tokens).view(3, 5, WIDTH)
        hidden = F.silu(torch.baddbmm(self.bias.unsqueeze(1), rows, self.up.mT)) * rows.bmm(self.gate.mT)
        y = (used * gate[:, None, None]).flatten(1) @ hidden.bmm(self.down.mT).view(15, WIDTH)
        return y.view_as(x), x.new_zeros(())


FULL = pytest.mark.full
OFTEN = ("einsum", "switch")
MESHES = ["dp=2", "tp=2", "ep=2", "dp=2,ep=2", "ep=2,tp=2", "cp=2,ep=2"]
PRODUCTS = ["einsum", "products", "rows", "slots", "switch"]


@pytest.mark.parametrize("spelling", [x if x in OFTEN else pytest.param(x, marks=FULL) for x in [*PRODUCTS, "list"]])
@pytest.mark.parametrize("mesh", [x if x[:2] in ("tp", "ep") else pytest.param(x, marks=FULL) for x in MESHES])
def test_tokens_widths_and_experts_are_sharded(spelling: str, mesh: str) -> None:
    checked = check_model(*made(spelling), Mesh.parse(mesh))
    assert checked.worst < 1e-10
    plan = checked.compiled.plan
    by_expert = {name for name in plan.parameters if isinstance(plan.parameter(name, "ep").used, Shard)}
    named = {"slots": ("up", "down", "inner_bias", "bias"), "switch": ("up", "down", "gate", "bias")}
    listed = [f"experts.{e}.{i}.{x}" for e in range(EXPERTS) for i in (0, 2) for x in ("weight", "bias")]
    each = listed if spelling == "list" else named.get(spelling, ("up", "down"))
    assert by_expert == ({f"layers.{i}.{x}" for i in range(2) for x in each} if "ep" in mesh else set())


def test_exact_on_ranks() -> None:
    assert max(run_ranks(4, stepped, "switch", {"dp": 2, "ep": 2}, {"zero": 3})) < 1e-10


def stepped(spelling: str, sizes: dict[str, int], options: dict[str, int]) -> float:
    model, batch = made(spelling)
    return step_on_rank(model, batch, sizes, options)[0]


class Heads(nn.Module):
    """A product with one weight per head is none of experts: what has that dim is no sum over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        probabilities = (heads @ heads.mT).softmax(-1)
        y = torch.einsum("bhtd,hde->bhte", probabilities @ heads, self.weight)
        return (probabilities @ y).transpose(1, 2).flatten(2), x.new_zeros(())


def test_heads_are_no_experts() -> None:
    with pytest.raises(ValueError, match=r"^experts: nothing to shard on axis 'ep' of size 2: .*; use dp instead$"):
        check_model(*made("heads"), Mesh.of(ep=2))
