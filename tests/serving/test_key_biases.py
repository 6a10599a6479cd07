"""Biases of attention that are numbers per key token, or learned: requests get what the whole forward gives."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.models.hf_generation import generation_facts
from autopar.serve_model import check_positions
from tests.hf.zoo import make
from tests.serving.served import GREEDY, PROMPTS, SIZES, Generated, worst
from tests.support.ranks import refusal, run_ranks

V, D, HEADS, WIDTH = 64, 32, 4, 8
LENGTH: int = SIZES["max_length"]
LEAST = -1e30


class Model(nn.Module):
    """Two layers of attention. ``kind``: what is added to the scores; ``key_heads``: heads of keys and values."""

    def __init__(self, kind: str, key_heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.key_heads = kind, key_heads
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.q = nn.ModuleList([nn.Linear(D, HEADS * WIDTH) for _ in range(2)])
        self.kv = nn.ModuleList([nn.Linear(D, 2 * key_heads * WIDTH) for _ in range(2)])
        numbers = key_heads if kind == "repeated" else HEADS
        self.numbers = nn.ModuleList([nn.Linear(D, numbers) for _ in range(2)])
        self.by_distance, self.by_token = nn.Embedding(16, HEADS), nn.Embedding(V, HEADS)
        self.double().eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for q, kv, numbers in zip(self.q, self.kv, self.numbers):
            h = F.layer_norm(x, (D,))
            queries = q(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            keys, values = (y.unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for y in kv(h).chunk(2, -1))
            made = self.attend(queries, keys, values, numbers(h).transpose(1, 2), input_ids)
            x = x + made.transpose(1, 2).flatten(2)
        return self.head(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, ids: Tensor) -> Tensor:
        n, group = q.shape[2], HEADS // self.key_heads
        i = torch.arange(n)
        later, apart = i > i[:, None], (i[:, None] - i).clamp(0, 63)
        bias = 3 * F.softplus(numbers)[:, :, None, :]
        if self.kind == "repeated":  # as doge
            bias = bias.expand(-1, -1, n, -1).masked_fill(later, LEAST)
            bias = bias[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)
        elif self.kind == "filled":
            bias = bias.expand(-1, -1, n, -1).masked_fill(later, LEAST)
        elif self.kind == "added":
            bias = bias + torch.zeros(n, n).masked_fill(later, -math.inf)
        elif self.kind == "chosen":
            bias = torch.where(later, LEAST, bias)
        elif self.kind == "one for all heads":
            bias = bias[:, :1] + torch.where(later, -math.inf, 0.0)
        elif self.kind == "of queries":  # which a softmax does not see
            bias = bias.transpose(2, 3) + bias + torch.where(later, -math.inf, 0.0)
        elif self.kind == "of ids":
            bias = self.by_token(ids).transpose(1, 2)[:, :, None, :] + torch.where(later, -math.inf, 0.0)
        elif self.kind == "in a window":
            bias = bias + torch.where(later | (apart > 5), -math.inf, 0.0)
        elif self.kind == "learned":  # as T5
            bias = self.by_distance(apart.double().add(1).log2().mul(2).long())
            bias = bias.permute(2, 0, 1) + torch.where(later, LEAST, 0.0)
        elif self.kind == "learned and of keys":
            bias = bias + self.by_distance(apart.clamp(max=15)).permute(2, 0, 1) + torch.where(later, LEAST, 0.0)
        elif self.kind == "mean":
            bias = (bias - bias.mean(-1, keepdim=True)).expand(-1, -1, n, -1).masked_fill(later, -math.inf)
        elif self.kind == "next":
            bias = bias.roll(-1, -1).expand(-1, -1, n, -1).masked_fill(later, -math.inf)
        elif self.kind == "hidden":
            bias = bias.masked_fill(bias < 1, -math.inf) + torch.where(later, -math.inf, 0.0)
        elif self.kind == "best":
            best = torch.zeros_like(bias).scatter(-1, bias.topk(2, -1).indices, 1.0)
            bias = bias.masked_fill(best == 0, LEAST).masked_fill(later, LEAST)
        elif self.kind.startswith("written"):
            return self.written(q, k, v, bias, later, apart)
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def written(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, later: Tensor, apart: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // self.key_heads, 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
        if "learned" in self.kind:
            bias = self.by_distance(apart.clamp(max=15)).permute(2, 0, 1)
        scores = scores + bias
        least = LEAST if "numbers" in self.kind else -math.inf
        return scores.masked_fill(later, least).softmax(-1) @ v


SERVED = [
    ("repeated", 2), ("repeated", 4), ("filled", 4), ("filled", 2), ("filled", 1), ("added", 2), ("chosen", 2),
    ("one for all heads", 2), ("of ids", 4), ("of queries", 4), ("in a window", 4), ("learned", 4),
    ("learned and of keys", 2), ("written", 4), ("written, numbers", 2), ("written, learned", 4),
    ("written, learned, numbers", 4),
]  # fmt: skip


def serves(sizes: dict[str, int], cases: list[tuple[str, int]]) -> dict[Any, float]:
    """How far logits are from the whole forward."""
    mesh, found = autopar.init_mesh("cpu", 60.0, **sizes), {}
    for kind, key_heads in cases:
        model = Model(kind, key_heads)
        example = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.int64)}
        with autopar.serve(model, mesh, example_batch=example, lift_to_float64=True, **SIZES) as server:
            tickets = server.complete(PROMPTS, GREEDY, want_logits=True)
            found[kind, key_heads] = worst(model, Generated([t.result() for t in tickets], [t.logits for t in tickets]))
    return found


def test_equals_the_whole_forward() -> None:
    (found,) = run_ranks(1, serves, {"dp": 1}, SERVED)
    assert max(found.values()) < 1e-12, found


def test_on_two_ranks() -> None:
    found = run_ranks(2, serves, {"tp": 2}, [("repeated", 2), ("filled", 2), ("learned and of keys", 2)])
    assert max(found[0].values()) < 1e-12, found


def test_a_forward_that_chooses_among_all_keys() -> None:
    """Doge drops keys where there are more than this."""
    model = make("doge", "causal")[0]
    model.config.keep_window_size = 32
    facts = generation_facts(model)
    assert refusal(lambda: check_positions(model, facts, 33)) == (
        "serve: max_length 33 is beyond the 32 positions of DogeForCausalLM; lower it to 32"
    )


def refused() -> dict[str, str]:
    mesh, found = autopar.init_mesh("cpu", 60.0, dp=1), {}
    example = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.int64)}
    for kind in ("mean", "next", "hidden", "best"):
        model = Model(kind)
        found[kind] = refusal(lambda: autopar.serve(model, mesh, example_batch=example, **SIZES))  # noqa: B023
    return found


def test_biases_of_other_tokens_are_refused() -> None:
    (found,) = run_ranks(1, refused)
    for kind, text in found.items():
        assert text.startswith("serve: ") and text.endswith("; generate with the model itself"), (kind, text)
