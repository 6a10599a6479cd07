"""Small models of any type that transformers registers: sizes are put wherever a config has a name for them.

model, batch = make("gpt_neo", "causal")          # or "masked", "seq2seq", "image"
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
import transformers
from torch import Tensor

from autopar.models.hf import exact_experts

AUTO = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image": "AutoModelForImageClassification",
}
MOST = 20e6  # parameters: what is larger was not made small
SIZES = {
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_experts_per_tok eos_token_id type_vocab_size mamba_expand",
    4: "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts qk_rope_head_dim qk_nope_head_dim mamba_n_heads mamba_num_heads patch_size",
    8: "d_kv head_dim v_head_dim rotary_dim sliding_window window_size mamba_d_state ssm_state_size",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank mamba_d_head mamba_head_dim "
    "image_size",
    32: "hidden_size n_embd d_model dim model_dim word_embed_proj_dim embedding_size",
    64: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim hidden_dim ffn_hidden_size vocab_size "
    "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length seq_length mamba_d_ssm",
    1: "n_group topk_group first_k_dense_replace bos_token_id decoder_start_token_id mamba_n_groups n_groups",
    0: "pad_token_id",
}
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "expand": 2},
    "falcon": {"head_dim": None},
    "rwkv": {"rescale_every": 0},  # in eval mode it writes to weights, which is refused
}


def config(kind: str, dropout: float = 0.0, layers: int = 2) -> Any:
    """A config of a type with sizes that are small and even, and this rate wherever it has one of dropout."""
    made = transformers.CONFIG_MAPPING[kind]
    base = made()
    sizes: dict[str, Any] = {}
    for size, names in SIZES.items():
        sizes |= {name: size for name in names.split() if getattr(base, name, None) is not None}
    sizes |= {name: layers for name in sizes if "layer" in name and sizes[name] == 2}
    if hasattr(base, "head_dim"):
        sizes["head_dim"] = 4 if hasattr(base, "qk_rope_head_dim") else 8  # of the rotary part alone
    for name, value in vars(base).items():
        if isinstance(value, float) and ("dropout" in name or name.endswith(("_pdrop", "drop"))):
            sizes[name] = 0.0 if "layer" in name else dropout  # whole layers: by a branch
    sizes |= {name: value for name, value in OTHERS.get(kind, {}).items() if hasattr(base, name)}
    return made(**{name: value for name, value in sizes.items() if value is not None})


def make(kind: str, family: str, dropout: float = 0.0, layers: int = 2) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """A model in float64, and a batch with labels. Raises what transformers raises where the sizes do not fit."""
    auto = getattr(transformers, AUTO[family])
    chosen = config(kind, dropout, layers)
    chosen.use_cache = False
    with torch.device("meta"):
        count = sum(p.numel() for p in auto.from_config(chosen).parameters())
    assert count < MOST, f"{kind} has {count} parameters left"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(chosen).double().train()
    batch = _batch(family, chosen)
    with contextlib.redirect_stderr(io.StringIO()), exact_experts(model):
        assert model(**batch).loss.isfinite()
    return model, batch


def _batch(family: str, chosen: Any) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    if family == "image":
        size = chosen.image_size if isinstance(chosen.image_size, int) else chosen.image_size[0]
        pixels = torch.randn(4, 3, size, size, generator=g, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.randint(2, (4,), generator=g)}
    tokens = torch.randint(3, 64, (4, 16), generator=g)
    return {"input_ids": tokens, "labels": tokens.clone()}


# Types that are known to run on dp=2, tp=2 and cp=2.
CAUSAL = """
afmoe apertus arcee aria_text axk1 bart bert-generation bert big_bird bigbird_pegasus biogpt bitnet blenderbot-small
blenderbot bloom camembert codegen cohere2 cohere2_moe cohere ctrl cwm data2vec-text deepseek_v3 deepseek_v4 diffllama
doge electra ernie4_5 ernie4_5_moe ernie exaone4 exaone_moe falcon falcon_h1 flex_olmo gemma2 gemma3_text gemma glm4
glm4_moe glm4_moe_lite glm gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa
granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
internlm3 jais2 jetmoe laguna lfm2 llama4_text llama longcat_flash marian mbart megatron-bert mimo_v2_flash minimax
minimax_m2 ministral3 ministral
mistral mixtral modernbert-decoder moshi mpt mvp nanochat nemotron_h olmo2 olmo3 olmo olmo_hybrid olmoe opt
pegasus persimmon phi3 phi phimoe plbart qwen2 qwen2_moe qwen3 qwen3_moe rembert roberta-prelayernorm roberta roc_bert
roformer seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper xlm-roberta-xl xlm-roberta xlm
""".split()  # noqa: SIM905
# No attention among two layers, or none that could be recognised: cp shards their tokens, too, recurrences on heads.
WITHOUT_ATTENTION = """
bailing_hybrid bamba cpmant falcon_mamba granitemoehybrid jamba lfm3 mamba mamba2 openai-gpt qwen3_5_text qwen3_next
rwkv
""".split()  # noqa: SIM905
