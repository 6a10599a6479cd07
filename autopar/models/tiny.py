"""Small configs of many architectures: for tests and the demo. Two layers, hidden 32, 4 heads, 2 key heads where
there are groups, vocabulary 64; float64, seeded; sizes that divide over 4 ranks wherever the method permits.

    TINY["llama"].build() -> model           TINY["llama"].batch(4, 16) -> {"input_ids": ..., "labels": ...}
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from autopar.models import hf as hf  # registers the adapter

VOCAB, HIDDEN, HEADS, KEY_HEADS, INNER, LAYERS, LENGTH = 64, 32, 4, 2, 64, 2, 64
_FRAMES, _MELS = 32, 16
_IMAGE = (12, 20)  # 15 patches of 4 x 4 and a class token: 16 divides over every small mesh


@dataclass(frozen=True)
class TinyModel:
    """``config``: a transformers config class; ``model`` the model class; ``sizes`` the config's arguments;
    ``kind`` of the batch: causal, masked, seq2seq, image or audio; ``drop`` names the config's dropout rates."""

    name: str
    config: str
    model: str
    sizes: dict[str, Any]
    kind: str = "causal"
    drop: tuple[str, ...] = ()

    def build(self, *, dropout: float = 0.0, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
        """A fresh model on the CPU in train mode; parameters depend on the seed only, not on the dtype."""
        rates = {name: dropout for name in self.drop}
        config = getattr(transformers, self.config)(**{**self.sizes, **rates})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: PreTrainedModel = getattr(transformers, self.model)(config)
            _spread(model)
        torch.nn.Module.to(model, dtype)
        model.train()
        return model

    def batch(
        self, batch_size: int = 4, seq: int = 16, *, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> dict[str, Tensor]:
        """Keyword arguments with labels, some of which are ignored (-100), unevenly over the examples."""
        generator = torch.Generator().manual_seed(seed)
        return _BATCHES[self.kind](batch_size, seq, dtype, generator)


def _spread(model: PreTrainedModel) -> None:
    """Change norms, biases and sinks from ones and zeros, so that mistakes with them show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def _tokens(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=generator)


def _labels(batch: int, seq: int, generator: torch.Generator) -> Tensor:
    """Example b ignores its first b % seq labels and one in four of the others."""
    labels = _tokens(batch, seq, generator=generator)
    ignored = torch.rand(batch, seq, generator=generator) < 0.25
    ignored |= torch.arange(seq) < (torch.arange(batch) % max(seq - 1, 1)).unsqueeze(-1)
    return labels.masked_fill(ignored, -100)


def _causal(batch: int, seq: int, dtype: torch.dtype, g: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": _tokens(batch, seq, generator=g), "labels": _labels(batch, seq, g)}


def _image(batch: int, seq: int, dtype: torch.dtype, g: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(batch, 3, *_IMAGE, generator=g, dtype=torch.float64)
    return {"pixel_values": pixels.to(dtype), "labels": torch.randint(0, 8, (batch,), generator=g)}


def _audio(batch: int, seq: int, dtype: torch.dtype, g: torch.Generator) -> dict[str, Tensor]:
    features = torch.randn(batch, _MELS, _FRAMES, generator=g, dtype=torch.float64)
    return {"input_features": features.to(dtype), "labels": _labels(batch, seq, g)}


_BATCHES: dict[str, Callable[[int, int, torch.dtype, torch.Generator], dict[str, Tensor]]] = {
    "causal": _causal,
    "masked": _causal,
    "seq2seq": _causal,
    "image": _image,
    "audio": _audio,
}

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False, **_SPECIAL,
}  # fmt: skip
_BERT = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_BART = {
    "vocab_size": VOCAB, "d_model": HIDDEN, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER, "dropout": 0.0, **_SPECIAL, "decoder_start_token_id": 1,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
_HEAD = {"head_dim": HIDDEN // HEADS}
_SIX = ("sliding_attention", "full_attention")
_BERT_DROP = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def _entries() -> list[TinyModel]:
    drop: tuple[str, ...] = ("attention_dropout",)
    gemma2 = {"query_pre_attn_scalar": 8, "sliding_window": 6}
    gpt_oss = {"sliding_window": 6, "layer_types": list(_SIX)}
    causal: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
        ("llama", "Llama", _LLAMA, drop),
        ("llama_mha", "Llama", {**_LLAMA, "num_key_value_heads": HEADS}, drop),
        ("llama_tied", "Llama", {**_LLAMA, "tie_word_embeddings": True}, drop),
        ("mistral", "Mistral", {**_LLAMA, **_HEAD, "sliding_window": 6}, drop),
        ("qwen2", "Qwen2", _LLAMA, drop),
        ("qwen3", "Qwen3", {**_LLAMA, **_HEAD}, drop),
        ("gemma2", "Gemma2", {**_LLAMA, **_HEAD, **gemma2}, drop),
        ("olmo2", "Olmo2", _LLAMA, drop),
        ("smollm3", "SmolLM3", _LLAMA, drop),
        ("cohere", "Cohere", _LLAMA, drop),
        ("glm4", "Glm4", {**_LLAMA, **_HEAD}, drop),
        ("phi3", "Phi3", _LLAMA, ("resid_pdrop", "embd_pdrop", "attention_dropout")),
        ("mixtral", "Mixtral", {**_LLAMA, **_MOE, "sliding_window": None}, drop),
        ("qwen3_moe", "Qwen3Moe", {**_LLAMA, **_HEAD, **_MOE, "norm_topk_prob": True}, drop),
        ("gpt_oss", "GptOss", {**_LLAMA, **_HEAD, **_MOE, **gpt_oss}, drop),
    ]
    llama_like = [
        TinyModel(name, f"{prefix}Config", f"{prefix}ForCausalLM", sizes, "causal", rates)
        for name, prefix, sizes, rates in causal
    ]
    return [*llama_like, *_OTHERS]


_OTHERS = [
    TinyModel(
        "gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM",
        {**_LLAMA, **_HEAD, "query_pre_attn_scalar": 8, "sliding_window": 6, "layer_types": list(_SIX)},
        drop=("attention_dropout",),
    ),
    TinyModel(
        "gpt2", "GPT2Config", "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "n_positions": LENGTH,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_SPECIAL},
        drop=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    TinyModel(
        "gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", {**_LLAMA, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        drop=("hidden_dropout", "attention_dropout"),
    ),
    TinyModel(
        "opt", "OPTConfig", "OPTForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "ffn_dim": INNER, "num_hidden_layers": LAYERS,
         "num_attention_heads": HEADS, "max_position_embeddings": LENGTH, "word_embed_proj_dim": HIDDEN,
         "dropout": 0.0, **_SPECIAL, "pad_token_id": 1},
        drop=("dropout", "attention_dropout"),
    ),
    TinyModel(
        "falcon", "FalconConfig", "FalconForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
         "num_kv_heads": KEY_HEADS, "new_decoder_architecture": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
         **_SPECIAL},
        drop=("hidden_dropout", "attention_dropout"),
    ),
    TinyModel(
        "bloom", "BloomConfig", "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, **_SPECIAL},
        drop=("hidden_dropout", "attention_dropout"),
    ),
    TinyModel(
        "deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM",
        {**_LLAMA, "num_key_value_heads": HEADS, "moe_intermediate_size": HIDDEN, "n_routed_experts": 4,
         "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
         "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        drop=("attention_dropout",),
    ),
    TinyModel(
        "bert", "BertConfig", "BertForMaskedLM", {**_BERT, "max_position_embeddings": LENGTH}, "masked", _BERT_DROP
    ),
    TinyModel(
        "roberta", "RobertaConfig", "RobertaForMaskedLM",
        {**_BERT, "max_position_embeddings": LENGTH + 4, **_SPECIAL, "pad_token_id": 1}, "masked", _BERT_DROP,
    ),
    TinyModel(
        "t5", "T5Config", "T5ForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": INNER, "num_layers": LAYERS,
         "num_heads": HEADS, "dropout_rate": 0.0, "decoder_start_token_id": 0, **_SPECIAL},
        "seq2seq", ("dropout_rate",),
    ),
    TinyModel(
        "bart", "BartConfig", "BartForConditionalGeneration",
        {**_BART, "max_position_embeddings": LENGTH, "activation_dropout": 0.0}, "seq2seq",
        ("dropout", "attention_dropout", "activation_dropout"),
    ),
    TinyModel(
        "vit", "ViTConfig", "ViTForImageClassification",
        {**{k: v for k, v in _BERT.items() if k != "vocab_size"}, "image_size": _IMAGE, "patch_size": 4,
         "num_labels": 8},
        "image", _BERT_DROP,
    ),
    TinyModel(
        "whisper", "WhisperConfig", "WhisperForConditionalGeneration",
        {**_BART, "num_mel_bins": _MELS, "max_source_positions": _FRAMES // 2, "max_target_positions": LENGTH},
        "audio", ("dropout", "attention_dropout", "activation_dropout"),
    ),
]  # fmt: skip

TINY: dict[str, TinyModel] = {entry.name: entry for entry in _entries()}
