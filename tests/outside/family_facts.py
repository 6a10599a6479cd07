"""What the names of sizes and arguments do not tell of a family: by its class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BertConfig,
    HGNetV2Config,
    LwDetrViTConfig,
    ResNetConfig,
    RTDetrResNetConfig,
    VitDetConfig,
)  # fmt: skip

RESNET = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}


def _resnet(*stages: str) -> ResNetConfig:
    return ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], out_features=list(stages or ("stage4",))
    )


def _rotary(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}}


def _detr(backbone: Any, *, heads: int = 4) -> dict[str, Any]:
    """Sizes of a detector on the last three stages of a backbone with 16, 32 and 32 channels."""
    return {
        "backbone_config": backbone,
        "encoder_in_channels": [16, 32, 32],
        "decoder_in_channels": [32, 32, 32],
        "encoder_hidden_dim": 32,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "num_denoising": 0,
        **RESNET,
    }


_SMALL = {"depths": [1, 1, 1, 1], "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32]}
_LAST = {**_SMALL, "out_features": ["stage2", "stage3", "stage4"]}
_RT_RESNET = RTDetrResNetConfig(layer_type="basic", **_LAST)
_HG_STAGES = {
    "stem_channels": [3, 8, 16],
    "stage_in_channels": [16, 16, 16, 32],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 16, 32, 32],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [2, 2, 2, 2],
}
_HGNET = HGNetV2Config(**_HG_STAGES, **_LAST)
_HGNET_4 = HGNetV2Config(**_HG_STAGES, **_SMALL, out_features=["stage1", "stage2", "stage3", "stage4"])
_INTRACLASS = {
    "reduce_channel": [1, 1, 0],
    "return_channel": [1, 1, 0],
    **{
        f"{name}_{part}ratio": [[height(n), width(n)], [1, 1], [height(n) // 2, width(n) // 2]]
        for part, n in (("long", 7), ("mid", 5), ("short", 3))
        for name, height, width in (
            ("vertical_long_to_small_conv", int, lambda n: 1),
            ("horizontal_small_to_long_conv", lambda n: 1, int),
            ("symmetric_conv_long", int, int),
        )
    },
}
_OCR = {
    "backbone_config": _HGNET_4,
    "intraclass_block_config": _INTRACLASS,
    "neck_out_channels": 32,
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
}
_MIMI = {
    "upsample_groups": 32,
    "num_filters": 8,
    "codebook_size": 32,
    "codebook_dim": 32,
    "vector_quantization_hidden_dimension": 32,
    "num_quantizers": 4,
}
_TOWER = {"image_size": 32, "patch_size": 8}
# A windowed vision transformer.
_WINDOWED = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "pretrain_image_size": 64,
    "window_block_indices": [0],
}
_ON_RESNET = {**RESNET, "backbone_config": _resnet()}
_SECTIONS = {"text_config": _rotary(2, 1, 1)}
_OF_IMAGES = {"image_token_index": 50}
_OF_CODES = {"decoder": {"decoder_start_token_id": 0, "pad_token_id": 0}}
_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_MUSICGEN = ("MusicgenForConditionalGeneration", "MusicgenMelodyForConditionalGeneration")
SERIES = {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3], "feature_size": 5}
MORE: dict[str, dict[str, Any]] = {
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XLNetLMHeadModel": {"d_head": 8, "n_head": 4, "d_model": 32},
    "ChameleonForConditionalGeneration": {
        "vocabulary_map": {"<image>": 50, **{f"IMGIMG{c}Z": 51 + i for i, c in enumerate("ABCDEFGH")}},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": 8},
    },
    "DepthProForDepthEstimation": {
        "patch_size": 32,
        "scaled_images_ratios": [0.5, 1],
        "scaled_images_overlap_ratios": [0.0, 0.25],
        "scaled_images_feature_dims": [32, 32],
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [32, 32],
        "image_model_config": _TOWER,
        "patch_model_config": _TOWER,
        "fov_model_config": _TOWER,
    },
    "KimiLinearForCausalLM": {
        "num_experts": 4,
        "num_experts_per_token": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "Siglip2ForImageClassification": {"vision_config": {"vision_use_head": True}},
    "xLSTMForCausalLM": {"embedding_dim": 32, "num_blocks": 2, "ffn_round_up_to_multiple_of": 16},
    "YoutuForCausalLM": {"head_dim": 4},
    "Zamba2ForCausalLM": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 16,
        "kv_channels": 8,
        "layers_block_type": ["linear_attention", "hybrid"],
        "hybrid_layer_ids": [1],
    },
    "ZoeDepthForDepthEstimation": {"bottleneck_features": 32},
    "VitsModel": {
        "vocab_size": 64,
        "upsample_initial_channel": 16,
        "upsample_rates": [2, 2],
        "upsample_kernel_sizes": [4, 4],
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3]],
    },
    "XcodecModel": {
        "acoustic_model_config": {"downsampling_ratios": [8, 5, 4, 2]},
        "semantic_model_config": {
            "conv_dim": [32] * 7,
            "conv_stride": [5, 2, 2, 2, 2, 2, 2],
            "conv_kernel": [10, 3, 3, 3, 3, 2, 2],
            "num_feat_extract_layers": 7,
        },
    },
    "Pix2StructForConditionalGeneration": {"vision_config": {"patch_embed_hidden_size": 32}},
    "AlignModel": {"vision_config": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 80}},
    "EfficientNetForImageClassification": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "AutoformerForPrediction": {**SERIES, "label_length": 4, "moving_average": 5},
    "BitForImageClassification": {"num_groups": 4, "embedding_size": 16},
    "BltForCausalLM": {
        "encoder_hash_byte_group_vocab": 50,
        "patch_in_forward": False,
        **{part: {"hidden_size_global": 64} for part in ("encoder_config", "decoder_config")},
        "global_config": {"hidden_size": 64},
    },
    **dict.fromkeys(("RTDetrForObjectDetection", "RTDetrV2ForObjectDetection"), _detr(_RT_RESNET)),
    **dict.fromkeys(
        ("DFineForObjectDetection", "Deimv2ForObjectDetection", "PPDocLayoutV4ForObjectDetection"), _detr(_HGNET)
    ),
    "PPDocLayoutV2ForObjectDetection": {**_detr(_HGNET), "class_thresholds": [0.0, 0.0], "class_order": [0, 1]},
    "PPDocLayoutV3ForObjectDetection": {**_detr(_HGNET_4), "x4_feat_dim": 16},
    **dict.fromkeys(("PPOCRV5ServerDetForObjectDetection", "PPOCRV6MediumDetForObjectDetection"), _OCR),
    "LwDetrForObjectDetection": {
        "backbone_config": LwDetrViTConfig(
            **_WINDOWED,
            num_windows=4,
            out_features=["stage1", "stage2"],
        ),
        "projector_scale_factors": [1.0],
        "num_feature_levels": 1,
        "decoder_self_attention_heads": 4,
        "decoder_cross_attention_heads": 4,
        "group_detr": 2,
    },
    **dict.fromkeys(("Blip2ForConditionalGeneration", "InstructBlipForConditionalGeneration"), _OF_IMAGES),
    "SegGptForImageSegmentation": {
        "image_size": [64, 32],
        "pretrain_image_size": 32,
        "intermediate_hidden_state_indices": [0, 1],
        "merge_index": 0,
    },
    "TimesFm2_5ModelForPrediction": {
        "patch_length": 4,
        "context_length": 16,
        "horizon_length": 8,
        "output_quantile_len": 8,
        "num_key_value_heads": 4,
    },
    "RagTokenForGeneration": {
        "question_encoder": BertConfig(**_TEXT),
        "generator": BartConfig(
            vocab_size=64,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=64,
            dropout=0.0,
        ),
        "n_docs": 2,
    },
    "VitMatteForImageMatting": {
        "backbone_config": VitDetConfig(
            **_WINDOWED,
            window_size=2,
            residual_block_indices=[],
            num_channels=4,
            out_features=["stage2"],
            use_relative_position_embeddings=True,
        ),
        "hidden_size": 32,
        "convstream_hidden_sizes": [8, 16, 24],
        "fusion_hidden_sizes": [32, 16, 8, 8],
    },
    "DeepseekOcr2ForConditionalGeneration": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "MimiModel": _MIMI,
    "KyutaiSpeechToTextForConditionalGeneration": {"codec_config": _MIMI, "num_codebooks": 4},
    "CsmForConditionalGeneration": {"codec_config": _MIMI},
    "PocketTTSAudioTokenizerModel": {"upsample_groups": 32},
    "Emu3ForConditionalGeneration": {
        "vocabulary_map": {"<image>": 50, "<|extra_200|>": 51, **{f"<|visual token {i:06d}|>": i for i in range(8)}}
    },
    "FunAsrNanoForConditionalGeneration": {"adaptor_config": {"intermediate_size": 8}},
    "Dots3NoteForConditionalGeneration": {"audio_config": {"adapter_in_dim": 32}},
    "Molmo2ForConditionalGeneration": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "Step3p7ForConditionalGeneration": {"text_config": {"sliding_window": 8}},
    "CLIPSegForImageSegmentation": {"extract_layers": [0, 1]},
    "SamHQModel": {
        "prompt_encoder_config": {"hidden_size": 32},
        "mask_decoder_config": {"hidden_size": 32},
        "vision_config": {"output_channels": 32},
    },
    "PocketTTSForConditionalGeneration": {"flow_head_config": {"condition_dim": 32}},
    "EfficientLoFTRForKeypointMatching": {
        "out_features": [32, 32, 32],
        "stage_num_blocks": [1, 1, 1],
        "hidden_size": 32,
    },
    "Gemma4AssistantForCausalLM": {"text_config": {"hidden_size_per_layer_input": 0}},
    "JanusForConditionalGeneration": {
        "vq_config": {"num_groups": 4, "base_channels": 32, "channel_multiplier": [1, 1]}
    },
    **dict.fromkeys(
        (
            "ConditionalDetrForObjectDetection",
            "DabDetrForObjectDetection",
            "TableTransformerForObjectDetection",
        ),
        _ON_RESNET,
    ),
    "DeformableDetrForObjectDetection": {**RESNET, "backbone_config": _resnet("stage2", "stage3", "stage4")},
    "DbrxForCausalLM": {
        "attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "hidden_size": 32},
    },
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "Dots1ForCausalLM": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **dict.fromkeys(
        (
            "Glm46VForConditionalGeneration",
            "Glm4vForConditionalGeneration",
            "GlmOcrForConditionalGeneration",
            "GlmImageForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3OmniMoeThinkerForConditionalGeneration",
        ),
        _SECTIONS,
    ),
    "Glm4vMoeForConditionalGeneration": {"text_config": _rotary(1, 1, 0, partial_rotary_factor=0.5)},
    "HieraForPreTraining": {"decoder_hidden_size": 32, "decoder_depth": 1, "decoder_num_heads": 2},
    **dict.fromkeys(("InformerForPrediction", "TimeSeriesTransformerForPrediction"), SERIES),
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "MoonshineStreamingForConditionalGeneration": {"num_key_value_heads": 4},
    "Gemma4ForConditionalGeneration": {
        "text_config": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
    },
    "NeoMMEForMaskedLM": {"text_config": {"head_dim": 16}, "head_dim": 16},
    "Granite4VisionForConditionalGeneration": {"deepstack_layer_map": [[-1, 0]]},
    **dict.fromkeys(_MUSICGEN, _OF_CODES),
    "SwinForImageClassification": {"window_size": 2, "image_size": 64},
    "ClapModel": {
        "audio_config": {
            "spec_size": 64,
            "num_mel_bins": 16,
            "window_size": 4,
            "patch_embeds_hidden_size": 16,
            "hidden_size": 128,
            "num_attention_heads": [2, 2, 4, 4],
            "depths": [1, 1, 1, 1],
        }
    },
    "PerceiverForMaskedLM": {"d_model": 32, "d_latents": 32, "num_latents": 8, "qk_channels": 32, "v_channels": 32},
    "CohereCompassForConditionalGeneration": {
        "text_config": {
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
            "layer_types": ["full_attention"] * 2,
        }
    },
    "BridgeTowerForMaskedLM": {"num_attention_heads": 4, "vision_config": {"hidden_size": 64}, "text_config": {}},
    "ReformerForMaskedLM": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [2, 4],
        "hidden_size": 32,
        "attention_head_size": 8,
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "feed_forward_size": 64,
        "is_decoder": False,
        "num_hashes": 1,
        "num_buckets": 2,
    },
    "ShieldGemma2ForImageClassification": {
        "yes_token_index": 5,
        "no_token_index": 7,
        "vision_config": {"image_size": 64, "patch_size": 16},
        "mm_tokens_per_image": 4,
    },
    "DiffusionGemmaForBlockDiffusion": {
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    },
}


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _ids(*shape: int) -> Tensor:
    return torch.randint(3, 30, shape, generator=torch.Generator().manual_seed(3))


Batch = dict[str, Any]
# Arguments that the signature does not tell, by class.
ALSO: dict[str, Any] = {
    "LxmertForPreTraining": lambda model, b: {
        "visual_feats": _draw(4, 5, model.config.visual_feat_dim),
        "visual_pos": _draw(4, 5, model.config.visual_pos_dim),
    },
    "ClapModel": lambda model, b: {
        "input_features": _draw(4, 1, 64, 16),
        "is_longer": torch.zeros(4, 1, dtype=torch.bool),
        "return_loss": True,
    },
    "InstructBlipVideoForConditionalGeneration": lambda model, b: {
        "pixel_values": _draw(4, 2, *b["pixel_values"].shape[1:])
    },
    "MoonshineForConditionalGeneration": lambda model, b: {"input_values": _draw(4, 8000)},
    "SplinterForPreTraining": lambda model, b: {
        "question_positions": torch.arange(8).reshape(4, 2),
        "start_positions": torch.arange(8).reshape(4, 2) % 7,
        "end_positions": torch.arange(8).reshape(4, 2) % 5,
    },
    "Siglip2ForImageClassification": lambda model, b: {
        "pixel_values": _draw(4, 16, 3 * model.config.vision_config.patch_size**2),
        "pixel_attention_mask": torch.ones(4, 16, dtype=torch.int64),
        "spatial_shapes": torch.full((4, 2), 4),
    },
    "Pix2StructForConditionalGeneration": lambda model, b: {
        "flattened_patches": torch.cat([_ids(4, 16, 2).double(), _draw(4, 16, 32)], -1)
    },
    "XcodecModel": lambda model, b: {"input_values": _draw(4, 1, 3200)},
    "TimesFmModelForPrediction": lambda model, b: {
        "past_values": _draw(4, 64),
        "freq": torch.zeros(4, 1, dtype=torch.int64),
        "future_values": _draw(4, 128),
    },
    "VideomtForUniversalSegmentation": lambda model, b: {"pixel_values_videos": _draw(4, 2, 3, 64, 64)},
    "SuperGlueForKeypointMatching": lambda model, b: {"pixel_values": _draw(4, 2, 1, 32, 32)},
    "IdeficsForVisionText2Text": lambda model, b: {
        "pixel_values": b["pixel_values"][:, None],
        "attention_mask": torch.ones_like(b["input_ids"]),
        "image_attention_mask": torch.ones(4, b["input_ids"].shape[1], 1, dtype=torch.int64),
    },
    "XCLIPModel": lambda model, b: {"pixel_values": _draw(4, 8, *b["pixel_values"].shape[1:])},
    "LightGlueForKeypointMatching": lambda model, b: {"pixel_values": _draw(4, 2, 3, 32, 32)},
    "EfficientLoFTRForKeypointMatching": lambda model, b: {"pixel_values": _draw(4, 2, 3, 64, 64)},
    "FastSpeech2ConformerModel": lambda model, b: {
        "spectrogram_labels": _draw(4, 16, model.config.num_mel_bins),
        "duration_labels": torch.full((4, 8), 2),
        "pitch_labels": _draw(4, 8, 1),
        "energy_labels": _draw(4, 8, 1),
    },
    "SegGptForImageSegmentation": lambda model, b: {
        "pixel_values": _draw(4, 3, 32, 32),
        "prompt_pixel_values": _draw(4, 3, 32, 32),
        "prompt_masks": _draw(4, 3, 32, 32),
        "labels": _draw(4, 3, 32, 32),
    },
    "TimesFm2_5ModelForPrediction": lambda model, b: {"past_values": _draw(4, 16), "future_values": _draw(4, 8)},
    "RagTokenForGeneration": lambda model, b: {
        "input_ids": _ids(4, 8),
        "context_input_ids": _ids(8, 8),
        "context_attention_mask": torch.ones(8, 8, dtype=torch.int64),
        "doc_scores": _draw(4, 2),
        "labels": _ids(4, 8),
    },
    **dict.fromkeys(_MUSICGEN, lambda model, b: {"labels": _ids(4, 8, model.decoder.num_codebooks)}),
    "Molmo2ForConditionalGeneration": lambda model, b: {
        "input_ids": _ids(4, 16),
        "labels": _ids(4, 16),
        "mm_token_type_ids": torch.zeros(4, 16, dtype=torch.int64),
    },
    "KyutaiSpeechToTextForConditionalGeneration": lambda model, b: {"input_ids": _ids(4, 8, 5), "labels": _ids(4, 8)},
    **dict.fromkeys(
        ("PPOCRV5MobileRecForTextRecognition", "PPOCRV6SmallRecForTextRecognition"),
        lambda model, b: {"pixel_values": _draw(4, 3, 48, 160)},
    ),
    "GraniteSpeech5ForCTC": lambda model, b: {
        "input_features": _draw(4, 32, 4 * model.config.encoder_config.num_mel_bins)
    },
}
# Families of which another class is the one to train.
CLASS = {
    "seamless_m4t": "SeamlessM4TForTextToText",
    "seamless_m4t_v2": "SeamlessM4Tv2ForTextToText",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "bark": "BarkSemanticModel",
    "gemma3n": "Gemma3nForCausalLM",
    "perceiver": "PerceiverForMaskedLM",
}
_LEFT_OUT = {
    "needs timm": "edgetam fast_vlm omdet_turbo pe_audio_video pe_video perception_lm timm_backbone timm_wrapper",
    "needs natten": "dinat",
    "needs detectron2": "layoutlmv2",
    "transformers takes one video at a time": "tvp",
    "its inputs are not derived from its signature": "clvp csm instructblipvideo jev kimi_k25 muse_glimmer_assistant "
    "neucodec perceiver pi0 sam3_tracker_video sam3_video speech_encoder_decoder vision_encoder_decoder xcodec2",
    "its sizes depend on one another in ways that names do not tell": "align blt clap deepseek_ocr2 dots3_note "
    "edgetam_video efficientloftr emu3 esmfold2 gemma3n gemma4_assistant gemma4_unified_assistant granite4_vision "
    "mistral_large4 muse_spark sam2 sam2_video sam3_tracker sam_hq sapiens2 vibevoice vibevoice_asr "
    "vision_text_dual_encoder",
}
# Families without a small model here, and why.
LEFT_OUT = {family: why for why, names in _LEFT_OUT.items() for family in names.split()}
