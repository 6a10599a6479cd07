"""Random small transformers on random meshes: exact, or refused with a clear message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import check_model

ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu, "tanh": torch.tanh}


class Rms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.c = c
        width, bias, d = c["width"], c["bias"], c["head_dim"]
        q, kv = c["kv_heads"] * c["groups"] * d, c["kv_heads"] * d
        norm = Rms if c["norm"] == "rms" else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.sizes = [q, kv, kv]
        self.qkv = nn.ModuleList([nn.Linear(width, s, bias) for s in ([sum(self.sizes)] if c["fused"] else self.sizes)])
        self.out = nn.Linear(q, width, bias)
        self.up, self.down = nn.Linear(width, 24 * (2 if c["gated"] else 1), bias), nn.Linear(24, width, bias)

    def attention(self, x: Tensor) -> Tensor:
        c = self.c
        q, k, v = self.qkv[0](x).split(self.sizes, -1) if c["fused"] else (p(x) for p in self.qkv)
        q, k, v = (t.unflatten(-1, (-1, c["head_dim"])).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(c["groups"], 1) for t in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=c["causal"]).transpose(1, 2).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        h, act = self.up(x), ACTIVATIONS[self.c["activation"]]
        if self.c["gated"]:
            gate, h = h.chunk(2, -1)
            return self.down(act(gate) * h)
        return self.down(act(h))

    def forward(self, x: Tensor) -> Tensor:
        if self.c["parallel"]:
            return x + self.attention(self.norm1(x)) + self.mlp(self.norm2(x))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(c["vocabulary"], c["width"]), Block(c)
        self.head = nn.Linear(c["width"], c["vocabulary"], bias=False)
        if c["tied"]:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.block(self.embed(ids))).flatten(0, 1), ids.flatten())


models = st.fixed_dictionaries(
    {
        "width": st.sampled_from([8, 12, 16]),
        "head_dim": st.sampled_from([2, 4]),
        "kv_heads": st.sampled_from([1, 2, 3, 4]),
        "groups": st.sampled_from([1, 2]),
        "norm": st.sampled_from(["layer", "rms"]),
        "activation": st.sampled_from(list(ACTIVATIONS)),
        "fused": st.booleans(),
        "gated": st.booleans(),
        "parallel": st.booleans(),
        "tied": st.booleans(),
        "bias": st.booleans(),
        "causal": st.booleans(),
        "vocabulary": st.sampled_from([12, 13, 16]),
    }
)
runs = st.fixed_dictionaries(
    {"zero": st.sampled_from([0, 3]), "sequence_parallel": st.booleans(), "microbatches": st.sampled_from([1, 2])}
)


meshes = st.sampled_from(["tp=2", "tp=3", "tp=4", "dp=2", "dp=2,tp=2", "dp=4"])
always = settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@settings(always, max_examples=8)
@given(models, meshes, runs)
def test_random_transformer(config: dict[str, Any], mesh: str, options: dict[str, Any]) -> None:
    check(config, mesh, options)


@pytest.mark.full
@settings(always, max_examples=40)
@given(models, meshes, runs)
def test_many_random_transformers(config: dict[str, Any], mesh: str, options: dict[str, Any]) -> None:
    check(config, mesh, options)


def check(config: dict[str, Any], mesh: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net(config).double().train()
    options["zero"] *= "dp" in mesh
    options["sequence_parallel"] &= "tp" in mesh
    ids = torch.randint(config["vocabulary"], (8, 6), generator=torch.Generator().manual_seed(1))
    try:
        result = check_model(model, {"ids": ids}, Mesh.parse(mesh), Options(**options))
    except ValueError as error:
        assert any(word in str(error) for word in ("divide", "no weight can be sharded")), error
        return
    assert result.worst < 1e-10, result
