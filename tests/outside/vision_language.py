"""transformers: families of models that read images beside text, with images of unlike sizes where they take these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.outside.hf_parts import LLAMA, TOWER, conf, hf, labelled
from tests.outside.zoo_of_others import ROWS, Made, draw, entry

IMAGE, VIDEO = 2, 1
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
GRIDS = ((1, 4, 4), (1, 4, 8)) * 2  # frames, rows and columns of patches; four patches make a token
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
TEXT = {**LLAMA, "num_hidden_layers": 1}
ROTATED = {**TEXT, "rope_parameters": ROTARY}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GRID_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
QWEN3_TOWER = {**GRID_TOWER, "num_position_embeddings": 16}
DEEP = {**QWEN3_TOWER, "deepstack_visual_indexes": [0]}
LINEAR = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
SOUNDS = {
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "output_dim": 32,
    "num_mel_bins": 8, "n_window": 4,
}  # fmt: skip
PATCHES = {k: v for k, v in TOWER.items() if k != "projection_dim"} | {"patch_size": 4}


def _grids(width: int = 96, kinds: bool = True, **more: Tensor) -> dict[str, Tensor]:
    """All patches of all images in one row, [patches, width]."""
    batch = labelled()
    for row, (t, h, w) in enumerate(GRIDS):
        batch["input_ids"][row, 1 : 1 + t * h * w // 4] = IMAGE
    if kinds:
        batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    patches = draw(sum(t * h * w for t, h, w in GRIDS), width)
    return {**batch, "pixel_values": patches, "image_grid_thw": torch.tensor(GRIDS), **more}


def _images(count: int = 4, tiles: int = 0, **more: Tensor) -> dict[str, Tensor]:
    """An image, or ``tiles`` of one, for each row, which stand for ``count`` tokens."""
    batch = labelled()
    batch["input_ids"][:, 1 : 1 + count] = IMAGE
    shape = (ROWS, tiles, 3, 16, 16) if tiles else (ROWS, 3, 16, 16)
    return {**batch, "pixel_values": draw(*shape), **more}


def _squares() -> Tensor:
    return torch.tensor([[16, 16]] * ROWS)


def _qwen3_vl() -> Made:
    config = conf("Qwen3VLConfig", text_config=ROTATED, vision_config=DEEP, **IDS)
    return hf("Qwen3VLForConditionalGeneration", config, _grids())


def _qwen3_vl_moe() -> Made:
    config = conf("Qwen3VLMoeConfig", text_config={**ROTATED, **EXPERTS}, vision_config=DEEP, **IDS)
    return hf("Qwen3VLMoeForConditionalGeneration", config, _grids())


def _qwen3_5() -> Made:
    config = conf("Qwen3_5Config", text_config={**ROTATED, **LINEAR}, vision_config=QWEN3_TOWER, **IDS)
    return hf("Qwen3_5ForConditionalGeneration", config, _grids())


def _qwen2_5_omni() -> Made:
    tower = {**GRID_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
    tokens = {"image_token_index": IMAGE, "video_token_index": VIDEO, "audio_token_index": 0, "audio_token_id": 0}
    config = conf(
        "Qwen2_5OmniThinkerConfig", text_config=ROTATED, vision_config=tower, audio_config=SOUNDS, **IDS, **tokens
    )
    return hf("Qwen2_5OmniThinkerForConditionalGeneration", config, _grids(kinds=False))


def _ernie() -> Made:
    rotary = {**ROTARY, "mrope_section": [1, 1, 2]}
    text = {**TEXT, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [16, 16], "rope_parameters": rotary}
    tower = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_merge_size": 2, "in_channels": 3,
    }  # fmt: skip
    config = conf("Ernie4_5_VLMoeConfig", text_config=text, vision_config=tower, **IDS)
    return hf("Ernie4_5_VLMoeForConditionalGeneration", config, _grids(48))


def _paddleocr() -> Made:
    tower = {**PATCHES, "spatial_merge_size": 2}
    config = conf("PaddleOCRVLConfig", text_config=ROTATED, vision_config=tower, **IDS)
    return hf("PaddleOCRVLForConditionalGeneration", config, _grids(pixel_values=draw(96, 3, 4, 4)))


def _llava_next() -> Made:
    config = conf(
        "LlavaNextConfig",
        text_config=conf("LlamaConfig", **TEXT),
        vision_config=conf("CLIPVisionConfig", **TOWER),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[16, 16], [16, 32], [32, 16]],
    )
    return hf("LlavaNextForConditionalGeneration", config, _images(10, tiles=2, image_sizes=_squares()))


def _llava_onevision() -> Made:
    config = conf(
        "LlavaOnevisionConfig",
        text_config=conf("LlamaConfig", **TEXT),
        vision_config=conf("SiglipVisionConfig", **{**TOWER, "vision_use_head": False}),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[16, 16], [16, 32], [32, 16]],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        **IDS,
    )
    return hf("LlavaOnevisionForConditionalGeneration", config, _images(10, tiles=2, image_sizes=_squares()))


def _internvl() -> Made:
    tower = {**PATCHES, "image_size": [16, 16], "patch_size": [4, 4], "use_absolute_position_embeddings": True}
    config = conf(
        "InternVLConfig",
        text_config=conf("LlamaConfig", **TEXT),
        vision_config=tower,
        image_token_id=IMAGE,
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    return hf("InternVLForConditionalGeneration", config, _images())


def _padded() -> dict[str, Tensor]:
    """Up to two images for each row, of four tokens each; those that are missing are zeros."""
    batch, images, mask = labelled(), draw(ROWS, 2, 3, 16, 16), torch.ones(ROWS, 2, 16, 16, dtype=torch.int64)
    mask[0, :, 8:] = 0
    images[1, 1] = images[2, 0] = 0
    mask[1, 1] = mask[2, 0] = 0
    for row, own in enumerate(images.flatten(2)):
        batch["input_ids"][row, 1 : 1 + 4 * int(own.any(1).sum())] = IMAGE
    return {**batch, "pixel_values": images, "pixel_attention_mask": mask}


def _idefics3() -> Made:
    config = conf(
        "Idefics3Config", text_config=conf("LlamaConfig", **TEXT), vision_config=PATCHES, image_token_id=IMAGE,
        scale_factor=2,
    )  # fmt: skip
    return hf("Idefics3ForConditionalGeneration", config, _padded())


def _smolvlm() -> Made:
    config = conf(
        "SmolVLMConfig", text_config=conf("LlamaConfig", **TEXT), vision_config=PATCHES, image_token_id=IMAGE,
        scale_factor=2,
    )  # fmt: skip
    return hf("SmolVLMForConditionalGeneration", config, _padded())


def _idefics2() -> Made:
    resampler = {
        "hidden_size": 32, "rms_norm_eps": 1e-6, "resampler_n_latents": 4, "resampler_depth": 1,
        "resampler_n_heads": 4, "resampler_head_dim": 8, "num_key_value_heads": 2,
    }  # fmt: skip
    config = conf(
        "Idefics2Config", text_config=conf("MistralConfig", **TEXT), vision_config=PATCHES, image_token_id=IMAGE,
        perceiver_config=resampler,
    )  # fmt: skip
    return hf("Idefics2ForConditionalGeneration", config, _padded())


BERT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def _modernvbert() -> Made:
    text = {**BERT, "model_type": "modernbert", "bos_token_id": 1, "eos_token_id": 3, "cls_token_id": 1,
            "sep_token_id": 3, "global_attn_every_n_layers": 2, "local_attention": 8}  # fmt: skip
    tower = {**PATCHES, "model_type": "siglip_vision_model"}
    config = conf(
        "ModernVBertConfig", text_config=text, vision_config=tower, image_token_id=IMAGE, pixel_shuffle_factor=2
    )
    return hf("ModernVBertForMaskedLM", config, _padded())


def _ultravbert() -> Made:
    text = {**BERT, "model_type": "ultrabert"}
    tower = {**PATCHES, "model_type": "siglip_vision_model", "vision_use_head": False}
    config = conf(
        "UltraVBertConfig", text_config=text, vision_config=tower, image_token_id=IMAGE, pixel_shuffle_factor=2
    )
    return hf("UltraVBertForMaskedLM", config, _padded())


def _cohere2_vision() -> Made:
    config = conf(
        "Cohere2VisionConfig",
        text_config=conf("Cohere2Config", **TEXT),
        vision_config=conf("SiglipVisionConfig", **PATCHES, vision_use_head=False),
        image_token_id=IMAGE,
        alignment_intermediate_size=64,
    )
    return hf("Cohere2VisionForConditionalGeneration", config, _images())


def _kosmos2() -> Made:
    text = {
        "vocab_size": 64, "embed_dim": 32, "layers": 1, "ffn_dim": 64, "attention_heads": 4, "dropout": 0.0,
        "max_position_embeddings": 64, "attention_dropout": 0.0, "pad_token_id": 0,
    }  # fmt: skip
    config = conf("Kosmos2Config", text_config=text, vision_config=PATCHES, latent_query_num=4)
    batch = _images()
    places = (batch["input_ids"] == IMAGE).long()
    return hf("Kosmos2ForConditionalGeneration", config, {**batch, "image_embeds_position_mask": places})


def _fuyu() -> Made:
    text = {**BERT, "model_type": "persimmon", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = conf("FuyuConfig", text_config=text, image_size=16, patch_size=4, image_token_id=IMAGE)
    batch = _images()
    del batch["pixel_values"]
    return hf("FuyuForCausalLM", config, {**batch, "image_patches": draw(ROWS, 4, 48)})


def _ovis2() -> Made:
    tower = {**PATCHES, "num_hidden_layers": 1, "hidden_stride": 2, "vocab_size": 32, "num_visual_indicator_tokens": 2}
    config = conf(
        "Ovis2Config",
        text_config=conf("Qwen2Config", **TEXT),
        vision_config=tower,
        image_token_id=IMAGE,
        visual_indicator_token_ids=[5, 6],
        vocab_size=64,
        hidden_size=32,
    )
    return hf("Ovis2ForConditionalGeneration", config, _images())


def _llama4() -> Made:
    text = {
        **LLAMA, "intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1,
        "attention_chunk_size": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    tower = {
        **PATCHES, "intermediate_size": 128, "vision_output_dim": 64, "projector_input_dim": 64,
        "projector_output_dim": 64,
    }  # fmt: skip
    config = conf("Llama4Config", text_config=text, vision_config=tower, image_token_index=IMAGE)
    return hf("Llama4ForConditionalGeneration", config, _images())


def _mllama() -> Made:
    text = {**LLAMA, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    tower = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_global_layers": 1,
        "attention_heads": 4, "image_size": 16, "patch_size": 4, "max_num_tiles": 2, "vision_output_dim": 64,
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "intermediate_layers_indices": [0],
    }  # fmt: skip
    config = conf("MllamaConfig", text_config=text, vision_config=tower, image_token_index=63)
    batch = labelled()
    shape, tokens = (ROWS, 1), batch["input_ids"].shape[1]
    tiles = torch.ones(*shape, 2, dtype=torch.int64)
    seen = torch.ones(ROWS, tokens, 1, 2, dtype=torch.int64)
    images = {"pixel_values": draw(*shape, 2, 3, 16, 16), "aspect_ratio_mask": tiles, "cross_attention_mask": seen}
    ratios = torch.ones(*shape, dtype=torch.int64)
    return hf("MllamaForConditionalGeneration", config, {**batch, **images, "aspect_ratio_ids": ratios})


TABLE: dict[str, tuple[Callable[[], Made], dict[str, Any]]] = {
    "qwen3-vl": (_qwen3_vl, {}),
    "qwen3-vl-moe": (_qwen3_vl_moe, {"experts": True}),
    "qwen3.5": (_qwen3_5, {}),
    "qwen2.5-omni thinker": (_qwen2_5_omni, {}),
    "ernie4.5-vl": (_ernie, {}),
    "paddleocr-vl": (_paddleocr, {}),
    "llava-next": (_llava_next, {}),
    "llava-onevision": (_llava_onevision, {}),
    "internvl": (_internvl, {}),
    "idefics2": (_idefics2, {}),
    "idefics3": (_idefics3, {}),
    "smolvlm": (_smolvlm, {}),
    "modernvbert": (_modernvbert, {}),
    "ultravbert": (_ultravbert, {}),
    "cohere2-vision": (_cohere2_vision, {}),
    "kosmos2": (_kosmos2, {}),
    "fuyu": (_fuyu, {}),
    "ovis2": (_ovis2, {}),
    "llama4 with images": (_llama4, {}),
    "mllama": (_mllama, {}),
}
for _name, (_build, _facts) in TABLE.items():
    entry("transformers", _name, "transformers", tokens=True, **_facts)(_build)
