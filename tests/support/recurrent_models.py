"""Small language models whose layers mix tokens without attention: state spaces, gated delta nets, linear attention.

recurrent("mamba2")        one layer of each kind of transformers' model, with weights large enough that states matter
scan(heads=2)              a plain one: a causal convolution, a recurrence over time, a gate
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from autopar.models import hf as hf  # registers the adapter

ROWS, TOKENS, VOCAB = 4, 16, 64
Made = tuple[nn.Module, dict[str, Tensor]]
_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "use_cache": False}
_ATTENTION = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
_STATES = {"mamba_d_state": 8, "mamba_n_groups": 1}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", _ATTENTION | {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_experts": 0, "mlp_only_layers": [0, 1],
    }),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "expand": 2, "n_groups": 2, "chunk_size": 8}),
    "mamba": ("Mamba", {"state_size": 8, "expand": 2}),
    "zamba2": ("Zamba2", _ATTENTION | {
        "num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "num_key_value_heads": 4, "mamba_d_state": 8,
        "mamba_headdim": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "chunk_size": 8, "num_mem_blocks": 1,
        "use_mem_rope": True, "adapter_rank": 4, "attention_head_dim": 16,
    }),
    "falcon_h1": ("FalconH1", _ATTENTION | _STATES | {
        "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 8, "mamba_expand": 2,
    }),
    "rwkv": ("Rwkv", {
        "num_hidden_layers": 2, "attention_hidden_size": 32, "intermediate_size": 64, "rescale_every": 0,
    }),
}  # fmt: skip


def recurrent(name: str, rows: int = ROWS, tokens: int = TOKENS, **sizes: Any) -> Made:
    """A model in float64, and a batch in which some labels are ignored."""
    kind, own = CONFIGS[name]
    config = getattr(transformers, f"{kind}Config")(**_SIZES | own | sizes)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif parameter.abs().max() < 0.2:
                parameter.mul_(8)
    return model, text(rows, tokens)


def text(rows: int = ROWS, tokens: int = TOKENS) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (rows, tokens))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(rows, tokens) < 0.3, -100)}


class Scan(nn.Module):
    """``heads`` of a width: each entry is a decaying sum of a short convolution of the words, gated by the word."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        all_, self.width = heads * width, width
        self.words, self.into, self.out = nn.Embedding(VOCAB, 4), nn.Linear(4, 2 * all_), nn.Linear(all_, VOCAB)
        self.conv, self.decay = nn.Conv1d(all_, all_, 3, groups=all_, padding=2), nn.Parameter(torch.rand(heads))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, gate = self.into(self.words(input_ids)).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2).unflatten(-1, (-1, self.width))
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = self.decay.sigmoid().unsqueeze(-1) * state + x[:, t]
            states.append(state)
        y = torch.stack(states, 1).flatten(2) * gate.sigmoid()
        return F.cross_entropy(self.out(y).flatten(0, 1), labels.flatten(), ignore_index=-100)


def scan(rows: int = ROWS, tokens: int = 4, heads: int = 2, width: int = 2) -> Made:
    torch.manual_seed(0)
    return Scan(heads, width).double(), text(rows, tokens)
