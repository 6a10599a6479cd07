"""Features beside ways to shard, to order and to keep: each cell a step on two or four ranks, beside one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.errors import is_refusal
from autopar.models.tiny import TINY
from autopar.precision import Precision
from tests.module.test_quantized_weights import HIDDEN, Adapted
from tests.support.custom_functions import Clipped
from tests.support.recurrent_models import recurrent
from tests.support.subjects import make
from tests.support.vision_models import llava, qwen_vl

Made = tuple[nn.Module, dict[str, Any]]
EXACT = "exact"


@dataclass(frozen=True)
class Feature:
    """A model with a batch for all ranks, and options."""

    make: Callable[[], Made]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Way:
    sizes: Mapping[str, int]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return int(torch.Size(self.sizes.values()).numel())


def packed() -> Made:
    """Two documents in each row, by positions that start anew."""
    model, batch = make("llama")
    rows, length = batch["input_ids"].shape
    positions = torch.cat([torch.arange(5), torch.arange(length - 5)])
    return model, batch | {"position_ids": positions.expand(rows, -1).contiguous()}


def longer(name: str = "llama") -> Made:
    """Rows whose shards hold whole blocks of 32 tokens."""
    return TINY[name].build().double(), TINY[name].batch(4, 64)


def adapted() -> Made:
    model = Adapted()
    return model, {"x": torch.randn(8, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


class Masked(nn.Module):
    """Rows at the entries of a mask, as images' features in a text, and a custom autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.act = Clipped.apply

    def forward(self, input_ids: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        h = self.table(input_ids)
        h = h.masked_scatter((input_ids == 3).unsqueeze(-1), self.up(features).to(h.dtype))
        logits = self.head(self.act(self.up(h)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def masked() -> Made:
    torch.manual_seed(0)
    ids = torch.randint(4, 32, (4, 8))
    ids[:, 2:4] = 3
    return Masked().double(), {"input_ids": ids, "features": torch.randn(8, 16).double(), "labels": ids.roll(1, 1)}


FP8 = Precision("float64", "float64", "float64", product="float8")
OF_TOKENS = dataclasses.replace(FP8, scaling="row", wide_weight_gradient=True)
FEATURES = {
    "packed documents": Feature(packed),
    "tiles=2": Feature(longer, {"tiles": 2}),
    "loss_chunks=2": Feature(longer, {"loss_chunks": 2}),
    "fp8": Feature(lambda: make("llama"), {"precision": FP8}),
    "fp8, gathers in 8 bits": Feature(lambda: make("llama"), {"precision": dataclasses.replace(FP8, gather="float8")}),
    "fp8_row": Feature(longer, {"precision": dataclasses.replace(FP8, scaling="row")}),
    "fp8_delayed": Feature(lambda: make("llama"), {"precision": dataclasses.replace(FP8, scaling="delayed")}),
    "mxfp8": Feature(longer, {"precision": dataclasses.replace(FP8, scaling="block", wide_weight_gradient=True)}),
    "fp8, experts": Feature(lambda: make("mixtral"), {"precision": FP8}),
    "fp8, tiles=2": Feature(longer, {"tiles": 2, "precision": OF_TOKENS}),
    "fp8_delayed, documents": Feature(packed, {"precision": dataclasses.replace(FP8, scaling="delayed")}),
    "4-bit base with LoRA": Feature(adapted),
    "state space": Feature(lambda: recurrent("mamba2", num_hidden_layers=2)),
    "delta net with attention": Feature(lambda: recurrent("qwen3_next")),
    "experts": Feature(lambda: make("mixtral")),
    "images beside text": Feature(lambda: llava(rows=4)),
    "images of any size": Feature(qwen_vl),
    "features at a mask": Feature(masked),
    "encoder-decoder": Feature(lambda: make("t5")),
}
WAYS = {
    "dp=2": Way({"dp": 2}),
    "zero=1": Way({"dp": 2}, {"zero": 1}),
    "zero=3": Way({"dp": 2}, {"zero": 3}),
    "rp=2": Way({"dp_replicate": 2}),
    "microbatches": Way({"dp": 2}, {"microbatches": 2}),
    "tp": Way({"tp": 2}),
    "tp, sequence": Way({"tp": 2}, {"sequence_parallel": True}),
    "cp ring": Way({"cp": 2}, {"attention": "ring"}),
    "cp zigzag": Way({"cp": 2}, {"attention": "ring", "cp_load_balance": "zigzag"}),
    "cp ulysses": Way({"cp": 2}, {"attention": "ulysses"}),
    "ep": Way({"ep": 2}),
    "pp 1f1b": Way({"pp": 2}, {"schedule": "1f1b", "microbatches": 2}),
    "pp zb_h1": Way({"pp": 2}, {"schedule": "zb_h1", "microbatches": 2}),
    "pp dual_pipe_v": Way({"pp": 2}, {"schedule": "dual_pipe_v", "microbatches": 4}),
    "selective": Way({"dp": 2}, {"activation_checkpoint": "selective"}),
    "full": Way({"dp": 2}, {"activation_checkpoint": "full"}),
    "offload": Way({"dp": 2}, {"activation_checkpoint": "offload"}),
    "dp, tp, zero=3": Way({"dp": 2, "tp": 2}, {"zero": 3}),
    "pp, dp, zero=1": Way({"pp": 2, "dp": 2}, {"microbatches": 2, "zero": 1}),
}


def outcome(feature: str, way: str) -> str:
    """On a rank: "exact", the refusal, or what is wrong (it begins with "wrong")."""
    given, how = FEATURES[feature], WAYS[way]
    try:
        model, batch = given.make()
        mesh = autopar.init_mesh("cpu", 120.0, **how.sizes)
        found = autopar.verify(model, mesh, batch, **how.options, **given.options)
    except Exception as error:
        return str(error) if is_refusal(error) else f"wrong: {type(error).__name__}: {error}"
    return EXACT if found.exact else f"wrong: {found}"


def outcomes(feature: str, ways: list[str]) -> list[str]:
    return [outcome(feature, way) for way in ways]
