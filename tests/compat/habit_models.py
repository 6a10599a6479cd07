"""The small model that habits are tried on, and how it is run on plain torch and on a mesh."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Config:
    """A plain object with settings, as libraries have them."""

    def __init__(self) -> None:
        self.gain, self.squash = 1.0, True


class Block(nn.Module):
    """Linear, dropout, a gain from an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.gain = nn.Linear(6, 6), nn.Dropout(0.0), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.drop(self.fc(x))) * self.gain


class Model(nn.Module):
    """Tied ends, batch norm, a parameterless activation, a buffer that the forward writes, settings in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.first, self.bn, self.act = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()
        self.block = Block()
        self.last, self.tied = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
        self.tied.weight = self.last.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(6))
        self.mean: Tensor

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = self.act(self.bn(torch.tanh(self.first(x))))  # no bias just before a norm: its gradient is only noise
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        h = self.block(h - self.mean) * self.config.gain
        logits = (self.last(h) + 0.5 * self.tied(h)) * self.scale
        if self.config.squash:
            logits = torch.tanh(logits)
        return {"loss": nn.functional.mse_loss(logits, target), "logits": logits}


def make() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch(step: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    x, target = (torch.randn(8, 4, generator=g, dtype=torch.float64) for _ in range(2))
    return {"x": x, "target": target}
