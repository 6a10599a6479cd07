"""Small models whose experts are not in transformers' registry."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

from tests.hf.zoo import make
from tests.outside.speech_and_more import TABLE

Made = tuple[nn.Module, dict[str, Tensor]]


def own(kind: str) -> Made:
    """A small model in float64 and 8 rows; of one layer, or of two in an encoder and two in a decoder."""
    torch.manual_seed(0)
    if kind in ("switch transformers", "nllb moe"):
        model, batch = TABLE[kind][0]()
    else:
        model, batch = _dbrx() if kind == "dbrx" else make(kind, "causal", layers=2 if kind == "longcat_flash" else 1)
    rows = {name: torch.cat([x, x.roll(5, 1)])[:8] for name, x in batch.items()}
    return model.double().train(), rows | {"labels": rows["input_ids"].clone()}


def _dbrx() -> Made:
    config = transformers.DbrxConfig(
        d_model=32, n_heads=4, n_layers=1, max_seq_len=64, vocab_size=64, use_cache=False,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": 24, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    )  # fmt: skip
    return transformers.DbrxForCausalLM(config).double().train(), {"input_ids": torch.randint(3, 64, (4, 16))}
