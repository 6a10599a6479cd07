"""Tiny models whose sizes divide over no mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from autopar.models.tiny import TINY

WORDS, HEADS, INNER = 63, 3, 67
# name -> sizes of the config
ODD: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 56},
    "llama_mha": {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_size": 24},
    "llama_tied": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
    "qwen2": {"num_attention_heads": HEADS, "num_key_value_heads": 1, "hidden_size": 24},
    "gemma2": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 36},
    "phi3": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
    "gpt2": {"n_head": HEADS, "n_embd": 24, "n_inner": INNER},
    "bert": {"num_attention_heads": HEADS, "hidden_size": 24},
    "bloom": {"n_head": HEADS, "hidden_size": 24},
    "t5": {"num_heads": HEADS, "d_kv": 8, "d_ff": INNER},
    "whisper": {
        "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "d_model": 24, "encoder_ffn_dim": INNER,
        "decoder_ffn_dim": INNER,
    },
    "mixtral": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
    "gpt_oss": {"num_attention_heads": 6, "num_key_value_heads": 3},
    "deepseek_v3": {
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_size": 24, "moe_intermediate_size": 33,
    },
}  # fmt: skip


def odd(
    name: str, rows: int = 4, tokens: int = 16, layers: int = 1, **sizes: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in float64, and its whole batch."""
    entry = TINY[name]
    counts = {key: layers for key in entry.sizes if ("layers" in key or key == "n_layer") and name != "deepseek_v3"}
    counts |= {"layer_types": ["sliding_attention", "full_attention"][:layers]} if "layer_types" in entry.sizes else {}
    widths = {key: INNER for key in entry.sizes if key == "intermediate_size"}
    words = {"vocab_size": WORDS} if "vocab_size" in entry.sizes else {}
    entry = dataclasses.replace(entry, sizes=entry.sizes | counts | words | widths | ODD[name] | sizes)
    model = entry.build()
    batch = {n: _within(x) for n, x in entry.batch(rows, tokens).items()}
    return model, batch


def _within(x: Tensor) -> Tensor:
    return x if x.is_floating_point() or x.dtype == torch.bool else torch.where(x < WORDS, x, x % WORDS)
