"""Models of litgpt and torchtitan whose experts are written out: loops over masks, and sorts with grouped products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from tests.outside.zoo_of_others import Language, Made, entry, library, text

WIDTH, EXPERTS, TOP, VOCAB = 32, 4, 2, 64
LITGPT: dict[str, dict[str, Any]] = {
    "Mixtral": {"name": "Mixtral-8x7B-v0.1"},
    "Qwen3-MoE": {
        "name": "Qwen3-8B",
        "mlp_class_name": "LLaMAMoE",
        "moe_intermediate_size": 24,
        "head_size": 8,
    },
}


def _litgpt(**sizes: Any) -> Made:
    lit = library("litgpt")
    small = {"n_layer": 2, "n_embd": WIDTH, "n_head": 4, "n_query_groups": 2, "intermediate_size": 48}
    few = {"n_expert": EXPERTS, "n_expert_per_token": TOP, "padded_vocab_size": VOCAB, "block_size": 32}
    return Language(lit.GPT(lit.Config.from_name(**{**small, **few, **sizes}))), text(vocabulary=VOCAB)


for _name, _sizes in LITGPT.items():
    entry("litgpt", _name, "litgpt", tokens=True, experts=True)(lambda sizes=_sizes: _litgpt(**sizes))


def _grouped(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """torch's grouped product, which has no kernel for float64."""
    try:
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)
    except RuntimeError:
        out: Tensor = torch.ops.autopar.grouped_mm(rows, weight, offsets, False)
        return out


class _Experts(nn.Module):
    """torchtitan's GroupedExperts without its casts to bfloat16, which float64 cannot be compared under."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Parameter(w.detach()) for w in (of.w1_EFD, of.w2_EDF, of.w3_EFD))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        h = F.silu(_grouped(x, self.w1, offsets)) * _grouped(x, self.w3, offsets)
        return _grouped(h, self.w2, offsets).type_as(x)


def _titan(config: Any) -> Made:
    attention = library("torchtitan.models.common.attention")
    model = config.build()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (0.2 if p.dim() > 1 else 0.05) + (p.dim() == 1))
    for module in list(model.modules()):
        vars(module).pop("config", None)
        if hasattr(module, "inner_experts"):
            module.inner_experts = _Experts(module.inner_experts)
        if hasattr(module, "inner_attention"):  # flex attention takes masks that its trainer makes
            module.inner_attention = attention.ScaledDotProductAttention(attention.ScaledDotProductAttention.Config())
            module.inner_attention.sdpa_backends = [SDPBackend.MATH]
    return Language(model), text(vocabulary=VOCAB)


def _ends(dim: int) -> dict[str, Any]:
    common, norms = library("torchtitan.models.common"), library("torchtitan.models.common.nn_modules")
    return {
        "vocab_size": VOCAB, "dim": dim, "norm": norms.RMSNorm.Config(normalized_shape=dim),
        "tok_embeddings": common.Embedding.Config(num_embeddings=VOCAB, embedding_dim=dim),
        "lm_head": common.Linear.Config(in_features=dim, out_features=VOCAB),
    }  # fmt: skip


@entry("torchtitan", "qwen3-MoE", "torchtitan", tokens=True, experts=True)
def _qwen3() -> Made:
    qwen3, common = library("torchtitan.models.qwen3"), library("torchtitan.models.common")
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=2, dim=WIDTH, n_heads=4, n_kv_heads=2, head_dim=8, moe_hidden_dim=24, num_experts=EXPERTS, top_k=TOP,
        attn_backend="flex", moe_comm_backend="standard", rope=common.CosSinRoPE.Config(dim=8, max_seq_len=32),
    )  # fmt: skip
    return _titan(qwen3.Qwen3Model.Config(**_ends(WIDTH), layers=layers))


@entry("torchtitan", "deepseek_v3", "torchtitan", tokens=True, experts=True)
def _deepseek() -> Made:
    deepseek, common = library("torchtitan.models.deepseek_v3"), library("torchtitan.models.common")
    layers = deepseek._build_dsv3_layers(
        n_layers=2, n_dense_layers=1, dim=WIDTH, n_heads=4, q_lora_rank=0, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, mscale=0.7, dense_hidden_dim=48, moe_hidden_dim=24, num_experts=EXPERTS,
        num_shared_experts=1, router_top_k=TOP, router_score_func="sigmoid", attn_backend="flex",
        moe_comm_backend="standard", non_blocking_capacity_factor=None,
        rope=common.ComplexRoPE.Config(dim=4, max_seq_len=32, theta=10000.0),
    )  # fmt: skip
    return _titan(deepseek.DeepSeekV3Model.Config(**_ends(WIDTH), layers=layers))
