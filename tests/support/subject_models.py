"""Plain modules that are subjects of many tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


class Mlp(nn.Module):
    """No library, returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(12, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        h = self.norm(h + F.gelu(self.second(h)))
        return F.mse_loss(self.head(h), target)


class Cnn(nn.Module):
    """Convolutions, a group norm, pooling, classes; some examples are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm, self.head = nn.GroupNorm(4, 8), nn.Linear(16 * 4, 8)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.norm(self.first(images)))
        h = F.max_pool2d(torch.relu(self.second(h)), 2).flatten(1)
        logits = self.head(h)
        return F.cross_entropy(logits, labels), logits


class Small(nn.Module):
    """One causal attention with two heads, a residual, and a loss over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(16, 8), nn.Linear(8, 24, bias=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).view(*ids.shape, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x + h).flatten(0, 1), labels.flatten())


def small_batch(tokens: int) -> dict[str, Tensor]:
    """Of two rows."""
    ids = torch.randint(0, 16, (2, tokens), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


class TwoLosses(nn.Module):
    """Attention, not causal, with a loss over tokens and another over features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(16, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.tokens, self.features = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor, labels: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        h = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        loss = F.cross_entropy(self.tokens(h).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return loss, F.mse_loss(torch.tanh(self.features(h)), target)
