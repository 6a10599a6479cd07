"""A config of transformers made small by the names of its sizes, nested configs too.

small(transformers.BertConfig)       two layers, width 32, 64 words
shallow(transformers.BertConfig)     two layers, 64 words, and every other size as it was: where sizes depend on
                                     one another in ways that names do not tell
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

WORDS, IDS = 64, 40  # the size of vocabularies, and the first id of a special token
Sizes = Mapping[str, Any]
_LAYERS = (
    r"n_layers?|layers|[lrx]_layers|depth|\w+_depth|num_(\w+_)?(layers|blocks)|(\w+_)?(encoder|decoder|hidden|text|"
    r"vision)_layers"
)
# What no other size depends on.
_SHALLOW: dict[str, int] = {_LAYERS: 2, r"(\w+_)?vocab_size": WORDS}
_SMALL: dict[str, int] = _SHALLOW | {
    r"hidden_size|n_embd|d_model|(\w+_)?embed_dim|dim|model_dim|word_embed_proj_dim|embedding_size|projection_dim|"
    r"projector_hidden_size|hidden_dim|out_hidden_size|\w+_hidden_size|emb_dim|dim_model|output_dim|width|"
    r"\w+_hidden_dim|(fpn_|mask_)?feature_size|text_embed_dim": 32,
    r"(\w+_)?intermediate_size|\w*ffn_dim|d_ff|n_inner|ffn_hidden_size|dim_feedforward|\w+_feedforward_dim": 64,
    r"(\w*num_)?(\w+_)?heads|n_heads?": 4,
    r"num_experts|num_local_experts|n_routed_experts|moe_num_experts": 4,
    r"num_experts_per_tok|moe_k|moe_topk|moe_top_k|num_key_value_heads|\w+_key_value_heads|(num_)?kv_heads": 2,
    r"(\w+_)?head_dim|d_kv": 8,
    r"qk_rope_head_dim|qk_nope_head_dim": 4,
    r"moe_intermediate_size|q_lora_rank|kv_lora_rank|shared_expert_intermediate_size": 16,
    r"max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions": 128,
    r"num_queries|num_query_tokens|two_stage_num_proposals": 10,
    r"n_group|topk_group|first_k_dense_replace|n_groups": 1,
    r"num_mel_bins|n_mels": 16,
    r"sliding_window|attention_window": 8,
}  # fmt: skip
_LISTS: dict[str, Callable[[int], int]] = {
    r"depths|num_blocks|layers|stage_repeats": lambda i: 1,
    r"hidden_sizes|dims|embed_dims?|\w+_dims|encoder_hidden_sizes|channels": lambda i: 16 * (1 + i),
    r"num_heads|num_attention_heads|\w+_num_heads": lambda i: 2,
}
_WIDTHS = r"\w*(size|sizes|dim|dims|channels|model|width|filters|embd|bottleneck)"
_SCALE, _LEAST = 8, 32  # widths from 32 on are divided by so much
_SPECIAL = r"\w+_(token|tokens|start|end|id|index)(_ids?|_index)?"
_PICKED = ("out_features", "out_indices", "neck_hidden_sizes", "backbone_out_indices")  # they name layers
_LEFT_OPEN = {"vocab_size": WORDS, "pad_token_id": 0, "decoder_start_token_id": 1, "prediction_length": 8}
_NOT_GIVEN = ("model_type", "transformers_version", "architectures", "torch_dtype", "dtype")


def small(made: type, more: Sizes | None = None) -> Any:
    """A config with small sizes. ``more``: sizes by name, of nested ones as ``{"text_config": {...}}``."""
    return _made(_base(made, more or {}), _SMALL, more or {}, iter(range(IDS, WORDS)))


def shallow(made: type, more: Sizes | None = None) -> Any:
    """A config with few layers and words."""
    return _made(_base(made, more or {}), _SHALLOW, more or {}, iter(range(IDS, WORDS)))


def scaled(made: type, more: Sizes | None = None) -> Any:
    """A config with few layers and words whose widths keep their ratios: for pyramids, which name them many times."""
    return _made(_base(made, more or {}), _SHALLOW | {_WIDTHS: _SCALE}, more or {}, iter(range(IDS, WORDS)))


def _base(made: Any, more: Sizes) -> Any:
    """A config as it comes; what it cannot do without is given."""
    return made(**{n: v for n, v in more.items() if isinstance(v, PreTrainedConfig)})


def _made(base: Any, sizes: dict[str, int], more: Sizes, ids: Iterator[int]) -> Any:
    kept = base.to_diff_dict()
    picked = any(getattr(base, name, None) is not None for name in _PICKED)
    own = {n: v for n, v in sizes.items() if not (picked and n == _LAYERS)}
    counts = {v for n, v in vars(base).items() if type(v) is int and re.fullmatch(_LAYERS, n)} if not picked else set()
    chosen: dict[str, Any] = {}
    for name, value in vars(base).items():
        if isinstance(more.get(name), PreTrainedConfig):
            chosen[name] = value
        elif isinstance(value, PreTrainedConfig):
            chosen[name] = _made(value, sizes, more.get(name, {}), ids)
        elif not name.startswith("_"):
            found = _size(base, name, value, own, counts, ids)
            if found is not None or name in kept:
                chosen[name] = value if found is None else found
    if getattr(base, "out_features", None) is not None:  # a property
        chosen["out_features"] = list(base.out_features)
        chosen = {n: v for n, v in chosen.items() if n not in ("out_indices", "stage_names")}
    chosen |= {n: v for n, v in _LEFT_OPEN.items() if getattr(base, n, 0) is None}
    given = {n: v for n, v in more.items() if not isinstance(chosen.get(n), PreTrainedConfig)}
    made = type(base)(**{n: v for n, v in {**chosen, **given}.items() if n not in _NOT_GIVEN})
    _fit_rotary(made)
    if getattr(made, "is_encoder_decoder", False) and getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = 1
    return made


def _size(base: Any, name: str, value: Any, sizes: dict[str, int], counts: set[int], ids: Iterator[int]) -> Any:
    """The value that a name gets, or None where it keeps its own."""
    if isinstance(value, float) and re.search(r"drop|mask_(time|feature)_prob", name):
        return 0.0
    if name == "apply_spec_augment":
        return False
    if (
        _WIDTHS in sizes
        and re.fullmatch(_WIDTHS, name)
        and not re.search(r"vocab|patch|window|image|kernel|position", name)
    ):
        of = value if isinstance(value, (list, tuple)) else [value]
        if of and all(type(x) is int for x in of):
            found = [max(4, x // _SCALE) if x >= _LEAST else x for x in of]
            return type(value)(found) if isinstance(value, (list, tuple)) else found[0]
    if _WIDTHS in sizes and re.search(r"heads?$", name) and type(value) is int:
        return min(value, 2)
    is_small = len(_SMALL) == len(sizes) or len(_SMALL) == len(sizes) + 1
    if type(value) is int:
        return _number(base, name, value, sizes, is_small, ids)
    if isinstance(value, (list, tuple)) and value:
        if re.fullmatch(r"\w+_ids?", name) and all(type(x) is int for x in value):
            return type(value)(next(ids) if x >= WORDS else x for x in value)
        if len(value) in counts and len(value) > 2:
            return type(value)([value[0], value[-1]])
        for names, of in _LISTS.items():
            if is_small and re.fullmatch(names, name) and all(type(x) is int for x in value):
                return type(value)(of(i) for i in range(len(value)))
    return None


def _number(base: Any, name: str, value: int, sizes: dict[str, int], is_small: bool, ids: Iterator[int]) -> int | None:
    if re.fullmatch(_SPECIAL, name) and value >= WORDS:
        return next(ids)
    if is_small and re.fullmatch(r"image_size|img_size|crop_size|spec_size", name):
        return min(value, 64)
    heads = [v for n, v in vars(base).items() if n.endswith(("attention_heads", "num_heads"))]
    if name.endswith("key_value_heads") and value in heads:
        return min(value, 4) if is_small else None
    return next((n for names, n in reversed(sizes.items()) if re.fullmatch(names, name) and value > n), None)


def _fit_rotary(config: Any) -> None:
    """Sections of rotary embeddings that fit the size of a head."""
    rotary = getattr(config, "rope_parameters", None)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(rotary, dict) or "mrope_section" not in rotary or not isinstance(heads, int):
        return
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    pairs = int(size * rotary.get("partial_rotary_factor", 1.0)) // 2
    rotary["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
