"""transformers: newer families that read images of unlike sizes as rows of patches, and retrievers of pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.outside.hf_parts import conf, hf
from tests.outside.vision_language import (
    DEEP,
    EXPERTS,
    GRID_TOWER,
    GRIDS,
    IDS,
    IMAGE,
    LINEAR,
    PATCHES,
    QWEN3_TOWER,
    ROTATED,
    TEXT,
    _grids,
    _images,
)  # fmt: skip
from tests.outside.zoo_of_others import ROWS, Made, draw, entry

MORE_IDS = {**IDS, "vision_start_token_id": 61, "vision_end_token_id": 62}


def _embeddings(out: Any) -> Tensor:
    """They have one norm: each number counts differently."""
    return out.embeddings.cumsum(-1)


def _exaone4_5() -> Made:
    tower = {**GRID_TOWER, "window_size": 16, "fullatt_block_indexes": [1], "num_key_value_heads": 2}
    text = conf("Exaone4Config", **TEXT)
    config = conf("Exaone4_5_Config", text_config=text, vision_config=tower, **IDS)
    return hf("Exaone4_5_ForConditionalGeneration", config, _grids(kinds=False))


def _lfm2_vl() -> Made:
    text = conf(
        "Lfm2Config",
        **{
            **TEXT,
            "num_hidden_layers": 2,
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
        },
    )
    tower = conf("Siglip2VisionConfig", **{**PATCHES, "num_patches": 16, "vision_use_head": False})
    config = conf("Lfm2VlConfig", text_config=text, vision_config=tower, image_token_id=IMAGE, projector_hidden_size=32)
    shapes = torch.tensor([[4, 4], [2, 8], [4, 2], [2, 2]])
    mask = (torch.arange(16) < shapes.prod(1, keepdim=True)).long()
    batch = _images(0)
    for row, count in enumerate((shapes.prod(1) // 4).tolist()):
        batch["input_ids"][row, 1 : 1 + count] = IMAGE
    patches = draw(ROWS, 16, 48) * mask.unsqueeze(-1)
    batch |= {"pixel_values": patches, "spatial_shapes": shapes, "pixel_attention_mask": mask}
    return hf("Lfm2VlForConditionalGeneration", config, batch)


def _lfm3_vl() -> Made:
    text = conf("Lfm3Config", **{**TEXT, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]})
    tower = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "patch_size": 4,
    }  # fmt: skip
    config = conf("Lfm3VlConfig", text_config=text, vision_config=tower, projector_hidden_size=32, **MORE_IDS)
    return hf("Lfm3VlForConditionalGeneration", config, _grids(kinds=False))


def _minimax_m3() -> Made:
    text = {
        **TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 64,
        "shared_intermediate_size": 16, "rotary_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4,
        "index_topk_blocks": 2, "num_hidden_layers": 2,
    }  # fmt: skip
    config = conf(
        "MiniMaxM3VLConfig", text_config=text, vision_config=PATCHES, projector_hidden_size=32, image_token_index=IMAGE,
        video_token_index=1,
    )  # fmt: skip
    return hf("MiniMaxM3SparseForConditionalGeneration", config, _grids(kinds=False))


def _cosmos3_edge() -> Made:
    tower = {**PATCHES, "num_patches": 16}
    config = conf("Cosmos3EdgeConfig", text_config=ROTATED, vision_config=tower, projector_hidden_size=32, **MORE_IDS)
    return hf("Cosmos3EdgeForConditionalGeneration", config, _grids(48))


def _cosmos3_omni() -> Made:
    config = conf(
        "Cosmos3OmniConfig", text_config=conf("Qwen3VLTextConfig", **ROTATED),
        vision_config=conf("Qwen3VLVisionConfig", **DEEP), **MORE_IDS,
    )  # fmt: skip
    return hf("Cosmos3OmniForConditionalGeneration", config, _grids())


def _qwen4() -> Made:
    text = {
        **ROTATED, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16, "hc_count": 2, "hc_lowrank": 8,
        "ngram_vocab_size_base": 100, "heads_per_ngram": 2, "split_ngram_parts": 4,
        "make_ngram_vocab_size_divisible_by": 4, "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "ple_layer_ids": [1], "eos_token_id": 3,
    }  # fmt: skip
    config = conf("Qwen4ExpConfig", text_config=text, vision_config=QWEN3_TOWER, **MORE_IDS)
    return hf("Qwen4ExpForConditionalGeneration", config, _grids())


def _hunyuan() -> Made:
    tower = {**PATCHES, "out_hidden_size": 32, "text_hidden_size": 32, "max_image_size": 32, "max_vit_seq_len": 64}
    config = conf(
        "HunYuanVLConfig", text_config=ROTATED, vision_config=tower, image_token_id=IMAGE, im_start_id=61, im_end_id=62,
        im_newline_id=63,
    )  # fmt: skip
    batch = _grids(48)
    batch["input_ids"] = batch["input_ids"].clamp(max=60)
    for row, (_, h, w) in enumerate(GRIDS):
        batch["input_ids"][row, 1 : 1 + (h // 2) * (w // 2 + 1) + 2] = IMAGE
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return hf("HunYuanVLForConditionalGeneration", config, batch)


def _minicpmv4_6() -> Made:
    text = conf("Qwen3_5TextConfig", **{**ROTATED, **LINEAR})
    tower = {**PATCHES, "insert_layer_id": 0}
    config = conf("MiniCPMV4_6Config", text_config=text, vision_config=tower, insert_layer_id=0, **IDS)
    sizes = torch.tensor([[4, 4], [4, 8]] * 2, dtype=torch.int32)
    batch = _images(0)
    for row, count in enumerate((sizes.prod(1) // 16).tolist()):
        batch["input_ids"][row, 1 : 1 + count] = IMAGE
    patches = draw(1, 3, 4, 4 * int(sizes.prod(1).sum()))
    return hf("MiniCPMV4_6ForConditionalGeneration", config, {**batch, "pixel_values": patches, "target_sizes": sizes})


def _colpali() -> Made:
    inner = conf(
        "PaliGemmaConfig", text_config=conf("GemmaConfig", **TEXT),
        vision_config=conf("SiglipVisionConfig", **{**PATCHES, "patch_size": 8, "vision_use_head": False}),
        image_token_id=IMAGE, projection_dim=32, hidden_size=32,
    )  # fmt: skip
    config = conf("ColPaliConfig", vlm_config=inner, embedding_dim=16)
    batch = _images()
    del batch["labels"]
    return hf("ColPaliForRetrieval", config, batch, _embeddings)


def _colqwen2() -> Made:
    tower = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    inner = conf("Qwen2VLConfig", text_config=ROTATED, vision_config=tower, **MORE_IDS)
    config = conf("ColQwen2Config", vlm_config=inner, embedding_dim=16)
    batch = _grids()
    del batch["labels"], batch["mm_token_type_ids"]
    counts = [t * h * w for t, h, w in GRIDS]
    parts = batch["pixel_values"].split(counts)
    padded = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    return hf("ColQwen2ForRetrieval", config, {**batch, "pixel_values": padded}, _embeddings)


TABLE: dict[str, tuple[Callable[[], Made], dict[str, Any]]] = {
    "exaone4.5": (_exaone4_5, {}),
    "lfm2-vl": (_lfm2_vl, {}),
    "lfm3-vl": (_lfm3_vl, {}),
    "minimax-m3-vl": (_minimax_m3, {}),
    "cosmos3 edge": (_cosmos3_edge, {}),
    "cosmos3 omni": (_cosmos3_omni, {}),
    "qwen4 exp": (_qwen4, {}),
    "hunyuan-vl": (_hunyuan, {}),
    "minicpm-v 4.6": (_minicpmv4_6, {}),
    "colpali": (_colpali, {}),
    "colqwen2": (_colqwen2, {}),
}
for _name, (_build, _facts) in TABLE.items():
    entry("transformers", _name, "transformers", tokens=True, **_facts)(_build)
