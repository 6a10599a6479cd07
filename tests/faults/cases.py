"""Cases of the fault campaign: which mesh, which rank, what happens to it, when. The same seed gives the same cases."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.precision import Precision

PHASES = ("compile", "bind", "step", "clip", "state", "save")
ACTIONS = ("kill", "stop", "raise", "delay")
# Calls within autopar in a phase, of the smallest mesh: a moment is drawn below, evenly in its logarithm.
CALLS = {"compile": 20000, "bind": 20000, "step": 1500, "clip": 200, "state": 300, "save": 3000}
DELAY = 1.5  # seconds


@dataclass(frozen=True)
class Subject:
    """A mesh with the options of `parallelize`. width: of the layers; from 16 on products may be in
    float8. documents: rows are packed. memory: the run is saved to memory."""

    sizes: dict[str, int]
    options: dict[str, Any]
    width: int = 8
    documents: bool = False
    memory: bool = False

    @property
    def ranks(self) -> int:
        return int(torch.Size(self.sizes.values()).numel())


def _pipe(schedule: str, microbatches: int, **sizes: int) -> Subject:
    return Subject({"pp": 2, **sizes}, {"schedule": schedule, "microbatches": microbatches})


FP8 = Precision("float64", "float64", "float64", product="float8")
SUBJECTS = {
    "dp2": Subject({"dp": 2}, {}),
    "zero3": Subject({"dp": 2}, {"zero": 3}),
    "dp2, 2 microbatches": Subject({"dp": 2}, {"zero": 3, "microbatches": 2}),
    "tp2": Subject({"tp": 2}, {}),
    "dp2 tp2": Subject({"dp": 2, "tp": 2}, {"zero": 3}),
    "cp2 ring": Subject({"cp": 2}, {"attention": "ring"}),
    "pp2 1f1b": _pipe("1f1b", 2),
    "pp2 interleaved": _pipe("interleaved", 2),
    "pp2 zb_v": _pipe("zb_v", 4),
    "pp2 dual_pipe": _pipe("dual_pipe", 4),
    "pp2 dp2": _pipe("1f1b", 2, dp=2),
    "pp2 tp2": _pipe("zb_h1", 2, tp=2),
    "dp2 fp8": Subject({"dp": 2}, {"zero": 3, "precision": FP8}, width=16),
    "dp2 fp8_delayed": Subject({"dp": 2}, {"precision": replace(FP8, scaling="delayed", history=2)}, width=16),
    "dp2 tiles": Subject({"dp": 2}, {"tiles": 2, "zero": 3}),
    "cp2 documents": Subject({"cp": 2}, {"attention": "ring"}, documents=True),
    "dp2 memory": Subject({"dp": 2}, {"zero": 3}, memory=True),
}


@dataclass(frozen=True)
class Case:
    """``moment``: calls within autopar since the phase began, after which it happens; at the end of a phase that has
    fewer. ``hosts``: whether rank 0 hosts the store, as under plain env://, or the launcher."""

    subject: str
    victim: int
    action: str
    phase: str
    moment: int
    hosts: bool

    def __str__(self) -> str:
        host = ", rank 0 hosts the store" if self.hosts else ""
        return f"{self.action} rank {self.victim} of {self.subject} in {self.phase} after {self.moment} calls{host}"


def make_cases(seed: int, count: int, subjects: Sequence[str] = tuple(SUBJECTS)) -> list[Case]:
    """Every phase and action in turn, on subjects in random order; the rest is drawn."""
    chance, cases = random.Random(seed), []
    names: list[str] = []
    for number in range(count):
        names = names or chance.sample(subjects, len(subjects))
        subject, phase = names.pop(), PHASES[number % len(PHASES)]
        action = ACTIONS[(number + number // len(PHASES)) % len(ACTIONS)]
        victim, moment = chance.randrange(SUBJECTS[subject].ranks), int(CALLS[phase] ** chance.random())
        cases.append(Case(subject, victim, action, phase, moment, chance.random() < 0.4))
    return cases


# --- what the ranks train -------------------------------------------------------------------------------


class Stack(nn.Module):
    """Four layers, for pipelines of four parts."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(x, y)


class Mlp(nn.Module):
    """What treats every token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(x + self.down(torch.tanh(self.up(self.norm(x)))), y)


class Attention(nn.Module):
    """One layer of causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor, document: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        if document is None:
            h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            at = torch.arange(x.shape[1])
            seen = (document[:, :, None] == document[:, None, :]) & (at[:, None] >= at)
            h = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
        return nn.functional.mse_loss(self.out(h.transpose(1, 2).flatten(2)), y)


def model_of(subject: str) -> nn.Module:
    torch.manual_seed(0)
    given = SUBJECTS[subject]
    if "cp" in given.sizes:
        return Attention().double()
    return (Mlp() if "tiles" in given.options else Stack(given.width)).double()


def batch_of(subject: str) -> dict[str, Tensor]:
    """The whole batch."""
    generator = torch.Generator().manual_seed(1)
    given = SUBJECTS[subject]
    shape = (4, 8, 8) if "cp" in given.sizes or "tiles" in given.options else (8, given.width)
    batch = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in ("x", "y")}
    if SUBJECTS[subject].documents:
        batch["document"] = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2]).expand(shape[:2]).clone()
    return batch
