"""transformers: vision-language models, detection and segmentation, video."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.outside.hf_parts import BART, BERT, LLAMA, TOWER, conf, hf, labelled
from tests.outside.zoo_of_others import ROWS, Made, classes, draw, entry


def _with_images(count: int, token: int) -> dict[str, Tensor]:
    batch = labelled()
    batch["input_ids"][:, 1 : 1 + count] = token
    return {**batch, "pixel_values": draw(ROWS, 3, 16, 16)}


def _llava() -> Made:
    config = conf(
        "LlavaConfig",
        text_config=conf("LlamaConfig", **LLAMA),
        vision_config=conf("CLIPVisionConfig", **TOWER),
        image_token_index=2,
        image_seq_length=4,
    )
    return hf("LlavaForConditionalGeneration", config, _with_images(4, 2))


def _paligemma() -> Made:
    text_config = conf("GemmaConfig", **LLAMA)
    vision = conf("SiglipVisionConfig", **{**TOWER, "vision_use_head": False})
    config = conf(
        "PaliGemmaConfig",
        text_config=text_config,
        vision_config=vision,
        image_token_index=2,
        projection_dim=32,
        hidden_size=32,
    )
    batch = _with_images(4, 2)
    kinds = torch.zeros(ROWS, 16, dtype=torch.int64)
    kinds[:, 8:] = 1
    return hf("PaliGemmaForConditionalGeneration", config, {**batch, "token_type_ids": kinds})


def _qwen2_vl() -> Made:
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    config = conf(
        "Qwen2VLConfig",
        text_config={
            **LLAMA,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        vision_config=vision,
        image_token_id=2,
        video_token_id=1,
    )
    batch = labelled()
    batch["input_ids"][:, 1:5] = 2
    batch["mm_token_type_ids"] = (batch["input_ids"] == 2).long()
    return hf(
        "Qwen2VLForConditionalGeneration",
        config,
        {**batch, "pixel_values": draw(ROWS * 16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS)},
    )


def _blip() -> Made:
    config = conf(
        "BlipConfig",
        text_config={
            **LLAMA,
            "encoder_hidden_size": 32,
            "bos_token_id": 1,
            "sep_token_id": 2,
            "attention_probs_dropout_prob": 0.0,
            "hidden_dropout_prob": 0.0,
        },
        vision_config=TOWER,
        projection_dim=32,
        image_text_hidden_size=32,
    )
    batch = labelled()
    return hf("BlipForConditionalGeneration", config, {**batch, "pixel_values": draw(ROWS, 3, 16, 16)})


def _git() -> Made:
    config = conf(
        "GitConfig",
        vision_config=TOWER,
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf("GitForCausalLM", config, {**labelled(15), "pixel_values": draw(ROWS, 3, 16, 16)})


def _siglip() -> Made:
    config = conf("SiglipConfig", text_config={**LLAMA, "projection_size": 32}, vision_config=TOWER)
    return hf(
        "SiglipModel",
        config,
        {"input_ids": labelled()["input_ids"], "pixel_values": draw(ROWS, 3, 16, 16)},
        None,
        return_loss=True,
    )


def _clip() -> Made:
    config = conf(
        "CLIPConfig",
        text_config={**LLAMA, "eos_token_id": 63, "projection_dim": 32},
        vision_config=TOWER,
        projection_dim=32,
    )
    return hf(
        "CLIPModel",
        config,
        {"input_ids": labelled()["input_ids"], "pixel_values": draw(ROWS, 3, 16, 16)},
        None,
        return_loss=True,
    )


def _resnet() -> Any:
    return conf(
        "ResNetConfig", embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], out_features=["stage4"]
    )


def _detr() -> Made:
    config = conf(
        "DetrConfig",
        use_timm_backbone=False,
        backbone_config=_resnet(),
        use_pretrained_backbone=False,
        backbone=None,
        num_queries=6,
        **{k: v for k, v in BART.items() if k not in ("vocab_size", "pad_token_id")},
    )
    pick = lambda out: torch.cat([out.logits.flatten(), out.pred_boxes.flatten()])  # noqa: E731
    return hf("DetrForObjectDetection", config, {"pixel_values": draw(ROWS, 3, 32, 32)}, pick)


def _mask2former() -> Made:
    swin = conf(
        "SwinConfig",
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[2, 2, 2, 2],
        window_size=2,
        drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = conf(
        "Mask2FormerConfig",
        backbone_config=swin,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=64,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=4,
        dim_feedforward=64,
        num_queries=4,
        dropout=0.0,
        backbone=None,
        use_pretrained_backbone=False,
    )
    pick = lambda out: torch.cat(  # noqa: E731
        [out.transformer_decoder_last_hidden_state.flatten(), *(m.flatten() for m in out.masks_queries_logits)]
    )
    return hf("Mask2FormerModel", config, {"pixel_values": draw(ROWS, 3, 64, 64)}, pick)


def _sam() -> Made:
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 4,
        "window_size": 4,
        "global_attn_indexes": [1],
        "mlp_dim": 64,
        "output_channels": 32,
        "num_pos_feats": 16,
    }
    config = conf(
        "SamConfig",
        vision_config=vision,
        prompt_encoder_config={"hidden_size": 32, "image_size": 32, "patch_size": 4, "mask_input_channels": 4},
        mask_decoder_config={
            "hidden_size": 32,
            "num_attention_heads": 4,
            "mlp_dim": 64,
            "num_hidden_layers": 2,
            "iou_head_hidden_dim": 32,
        },
    )
    batch = {
        "pixel_values": draw(ROWS, 3, 32, 32),
        "input_points": (draw(ROWS, 1, 2, 2).abs() * 8),
        "input_labels": torch.ones(ROWS, 1, 2, dtype=torch.int64),
    }
    pick = lambda out: torch.cat([out.pred_masks.flatten(), out.iou_scores.flatten()])  # noqa: E731
    return hf("SamModel", config, batch, pick)


def _videomae() -> Made:
    config = conf(
        "VideoMAEConfig",
        image_size=16,
        patch_size=8,
        num_frames=4,
        tubelet_size=2,
        num_labels=8,
        **{k: v for k, v in BERT.items() if k not in ("vocab_size", "max_position_embeddings", "pad_token_id")},
    )
    return hf(
        "VideoMAEForVideoClassification", config, {"pixel_values": draw(ROWS, 4, 3, 16, 16), "labels": classes(ROWS)}
    )


TABLE: dict[str, tuple[Callable[[], Made], bool]] = {
    "llava": (_llava, True),
    "paligemma": (_paligemma, True),
    "qwen2-vl": (_qwen2_vl, True),
    "blip": (_blip, True),
    "git": (_git, True),
    "siglip": (_siglip, False),
    "clip": (_clip, False),
    "detr": (_detr, False),
    "mask2former": (_mask2former, False),
    "sam": (_sam, False),
    "videomae": (_videomae, False),
}
for _name, (_build, _tokens) in TABLE.items():
    entry("transformers", _name, "transformers", _tokens)(_build)
