"""Modules written by hand: requests get what the whole forward gives, for idioms of masks, heads and positions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Sampling
from autopar.compile import known_masks, soft_masks
from autopar.passes.canonicalize import constant_masks
from tests.serving.served import GREEDY, PROMPTS, SIZES, Generated, worst
from tests.support.ranks import run_ranks

N, V, D, HEADS = 128, 64, 32, 4
LENGTH: int = SIZES["max_length"]
LATER = torch.ones(N, N, dtype=torch.bool).triu(1)
FAR = LATER | LATER.roll(-6, 0).T.tril(-1)


class Model(nn.Module):
    """Two layers of attention; ``mask``: how they hide later tokens."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.embed, self.position = mask, nn.Embedding(V, D), nn.Embedding(N, D)
        self.qkv = nn.ModuleList([nn.Linear(D, 3 * D) for _ in range(2)])
        self.head = nn.Linear(D, V, bias=False)
        if mask in BUFFERS:
            self.register_buffer("hidden", BUFFERS[mask])
        self.double().eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        for qkv in self.qkv:
            q, k, v = qkv(F.layer_norm(x, (D,))).chunk(3, -1)
            x = x + (self.in_rows(q, k, v) if self.mask == "rows" else self.in_heads(q, k, v))
        return self.head(x)

    def in_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(D / HEADS)
        return (self.masked(scores).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def in_rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As fairseq: [B * heads, T, D / heads]."""
        rows, n, _ = q.shape
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)).masked_fill(LATER[:n, :n], -math.inf)
        return torch.bmm(scores.softmax(-1), v).unflatten(0, (rows, HEADS)).transpose(1, 2).flatten(2)

    def masked(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        i = torch.arange(n)
        if self.mask == "window":
            return scores.masked_fill((i > i[:, None]) | (i <= i[:, None] - 6), -math.inf)
        if self.mask in ("ones", "integers"):
            return scores.masked_fill(self.hidden[:n, :n] == 0, -math.inf)
        if self.mask in ("added", "added numbers", "added small", "alibi and mask"):
            return scores + self.hidden[:n, :n]
        if self.mask == "product":  # as GPT
            b = self.hidden[:n, :n]
            return scores * b + -1e4 * (1 - b)
        if self.mask == "product less":
            b = torch.ones(n, n).tril()
            return scores * b - 1e4 * (1 - b)
        if self.mask == "chosen small":
            return torch.where(self.hidden[:n, :n].bool(), scores, torch.tensor(-1e4).double())
        if self.mask == "filled small":
            return scores.masked_fill(i > i[:, None], -1e4)
        if self.mask == "alibi from the last":
            return (scores + 0.1 * torch.arange(1 - n, 1).double()).masked_fill(i > i[:, None], -math.inf)
        return scores.masked_fill(self.hidden[:n, :n], -math.inf)


BUFFERS = {
    "ones": (~LATER).float(),
    "integers": (~LATER).to(torch.uint8),
    "added": torch.zeros(N, N).masked_fill(LATER, -math.inf),
    "added numbers": torch.zeros(N, N).masked_fill(LATER, -1e9),
    "added small": torch.zeros(N, N).masked_fill(LATER, -1e4),
    "product": (~LATER).float(),
    "chosen small": (~LATER).float(),
    "alibi and mask": torch.arange(N).mul(0.1).expand(N, N).masked_fill(LATER, -math.inf),
    "far": FAR,
}
LARGE = ["ones", "integers", "far", "window", "rows", "filled small"]
MASKS = [*BUFFERS, "window", "rows", "product less", "filled small", "alibi from the last"]


def serves(largest: int) -> dict[str, float]:
    """How far logits are from the whole forward, by mask."""
    mesh, found = autopar.init_mesh("cpu", 60.0, dp=1), {}
    for module in (constant_masks, known_masks, soft_masks):
        module.LARGEST = largest  # type: ignore[attr-defined]
    for mask in MASKS if largest > LENGTH * LENGTH else LARGE:
        model = Model(mask)
        example = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.int64)}
        with autopar.serve(model, mesh, example_batch=example, lift_to_float64=True, **SIZES) as server:
            tickets = server.complete(PROMPTS, GREEDY, want_logits=True)
            found[mask] = worst(model, Generated([t.result() for t in tickets], [t.logits for t in tickets]))
    return found


@pytest.mark.parametrize("largest", [constant_masks.LARGEST, LENGTH * LENGTH - 1])
def test_equals_the_whole_forward(largest: int) -> None:
    """Also where masks are so large that their blocks are evaluated."""
    (found,) = run_ranks(1, serves, largest)
    assert max(found.values()) < 1e-12, found


LAST = {  # where a forward takes the last token, as nanoGPT's does without targets
    "a list": lambda head, x: head(x[:, [-1], :]),
    "a number": lambda head, x: head(x[:, -1]),
    "a slice": lambda head, x: head(x[:, -1:]),
    "of logits": lambda head, x: head(x)[:, -1, :],
}


class Last(Model):
    """Logits of the last token alone, and of all for a loss."""

    def __init__(self, how: str) -> None:
        super().__init__("far")
        self.how, self.norm = how, nn.LayerNorm(D).double()

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Any:
        head, self.head = self.head, nn.Identity()
        try:
            x = self.norm(super().forward(input_ids))
        finally:
            self.head = head
        if targets is not None:
            logits = head(x)
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return LAST[self.how](head, x), None


def takes_the_last() -> dict[str, bool]:
    mesh, found = autopar.init_mesh("cpu", 60.0, dp=1), {}
    for how in LAST:
        model, ids = Last(how), torch.zeros(2, LENGTH, dtype=torch.int64)
        with autopar.serve(model, mesh, example_batch={"input_ids": ids, "targets": ids}, **SIZES) as server:
            tokens = [list(prompt) for prompt in PROMPTS]
            for one in tokens:
                for _ in range(5):
                    one.append(int(model(torch.tensor([one]))[0].reshape(-1, V)[-1].argmax()))
            given = server.complete(PROMPTS, Sampling(temperature=0.0, max_tokens=5))
            found[how] = [[*p, *t.result()] for p, t in zip(PROMPTS, given, strict=True)] == tokens
    return found


def test_logits_of_the_last_token_alone() -> None:
    assert run_ranks(1, takes_the_last) == [dict.fromkeys(LAST, True)]


def changes_a_mask() -> None:
    mesh, model = autopar.init_mesh("cpu", 60.0, dp=1), Model("ones")
    example = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.int64)}
    parallel = autopar.parallelize(model, mesh, example_batch=example)
    with autopar.serve(parallel, example_batch=example, **SIZES) as server:
        server.complete(PROMPTS, GREEDY)
        dict(parallel.named_buffers())["hidden"].fill_(1.0)
        server.complete(PROMPTS, GREEDY)


def test_a_mask_that_changes_is_noticed() -> None:
    with pytest.raises(Exception, match="serve: the mask hidden has changed since the model was compiled; make a new"):
        run_ranks(1, changes_a_mask)
