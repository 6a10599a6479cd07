"""x-transformers and PEFT."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.outside.zoo_of_others import Language, Made, entry, library, text


def _x(**more: Any) -> Made:
    xt = library("x_transformers")
    layers = xt.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **more)
    return Language(xt.TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)), text()


X: dict[str, dict[str, Any]] = {
    "decoder": {},
    "rotary and GLU": {"rotary_pos_emb": True, "ff_glu": True, "use_rmsnorm": True},
    "alibi and flash": {"alibi_pos_bias": True, "attn_flash": True},
    "T5 bias, key norm": {"rel_pos_bias": True, "attn_qk_norm": True},
    "memory and talking heads": {"attn_num_mem_kv": 4, "attn_pre_talking_heads": True},
}
for _name, _more in X.items():
    entry("x-transformers", _name, "x_transformers", tokens=True)(lambda more=_more: _x(**more))


def _peft(kind: str, **more: Any) -> Made:
    from autopar.models.tiny import TINY

    peft = library("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **more)
    return peft.get_peft_model(TINY["llama"].build(), config), _labelled()


def _labelled() -> dict[str, Tensor]:
    batch = text()
    return {"input_ids": batch["ids"], "labels": batch["labels"]}


TARGETS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "init_lora_weights": False, **TARGETS}),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True, "init_lora_weights": False, **TARGETS}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
}
for _name, (_kind, _more) in PEFT.items():
    entry("peft", _name, "peft", tokens=True)(lambda kind=_kind, more=_more: _peft(kind, **more))
