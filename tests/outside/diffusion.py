"""diffusers: UNets, diffusion transformers, autoencoders."""

from __future__ import annotations

from typing import Any

from tests.outside.zoo_of_others import ROWS, Made, Regressor, draw, entry, library


def _times() -> Any:
    return (draw(ROWS).abs() * 100).long()


def _sample(out: Any) -> Any:
    return out.sample if hasattr(out, "sample") and not callable(out.sample) else out[0]


def _diffusers(name: str, inputs: dict[str, Any], target: Any, /, **sizes: Any) -> Made:
    made = getattr(library("diffusers"), name)(**sizes)
    return Regressor(made, _sample), {**inputs, "target": target}


BLOCKS = {"norm_num_groups": 4, "layers_per_block": 1}


def _unet2d() -> Made:
    return _diffusers(
        "UNet2DModel",
        {"sample": draw(ROWS, 3, 16, 16), "timestep": _times()},
        draw(ROWS, 3, 16, 16),
        sample_size=16,
        block_out_channels=(8, 16),
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **BLOCKS,
    )


def _unet_condition() -> Made:
    inputs = {"sample": draw(ROWS, 4, 16, 16), "timestep": _times(), "encoder_hidden_states": draw(ROWS, 6, 16)}
    return _diffusers(
        "UNet2DConditionModel",
        inputs,
        draw(ROWS, 4, 16, 16),
        sample_size=16,
        block_out_channels=(8, 16),
        attention_head_dim=4,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **BLOCKS,
    )


def _dit() -> Made:
    inputs = {"hidden_states": draw(ROWS, 4, 8, 8), "timestep": _times(), "class_labels": _times() % 10}
    return _diffusers(
        "DiTTransformer2DModel",
        inputs,
        draw(ROWS, 8, 8, 8),
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    )


def _pixart() -> Made:
    inputs = {"hidden_states": draw(ROWS, 4, 8, 8), "timestep": _times(), "encoder_hidden_states": draw(ROWS, 6, 16)}
    return _diffusers(
        "PixArtTransformer2DModel",
        inputs,
        draw(ROWS, 8, 8, 8),
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        cross_attention_dim=32,
        caption_channels=16,
        use_additional_conditions=False,
    )


def _sd3() -> Made:
    inputs = {
        "hidden_states": draw(ROWS, 4, 8, 8),
        "timestep": _times(),
        "encoder_hidden_states": draw(ROWS, 6, 16),
        "pooled_projections": draw(ROWS, 16),
    }
    return _diffusers(
        "SD3Transformer2DModel",
        inputs,
        draw(ROWS, 4, 8, 8),
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
    )


def _flux() -> Made:
    import torch

    inputs = {
        "hidden_states": draw(ROWS, 16, 16),
        "timestep": draw(ROWS).abs(),
        "encoder_hidden_states": draw(ROWS, 6, 16),
        "pooled_projections": draw(ROWS, 16),
        "img_ids": torch.arange(48).view(16, 3).double(),
        "txt_ids": torch.zeros(6, 3).double(),
        "guidance": draw(ROWS).abs(),
    }
    return _diffusers(
        "FluxTransformer2DModel",
        inputs,
        draw(ROWS, 16, 16),
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4),
        guidance_embeds=True,
    )


def _kl() -> Made:
    made = library("diffusers").AutoencoderKL(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
    )
    return Regressor(made, _sample), {"sample": draw(ROWS, 3, 16, 16), "target": draw(ROWS, 3, 16, 16)}


def _vq() -> Made:
    made = library("diffusers").VQModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        num_vq_embeddings=16,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
    )
    return Regressor(made, lambda out: out.sample), {"sample": draw(ROWS, 3, 16, 16), "target": draw(ROWS, 3, 16, 16)}


for _name, _build, _tokens in (
    ("UNet2D", _unet2d, False),
    ("UNet2DCondition", _unet_condition, False),
    ("DiT", _dit, False),
    ("PixArt", _pixart, False),
    ("SD3", _sd3, False),
    ("Flux", _flux, False),
    ("AutoencoderKL", _kl, False),
    ("VQ", _vq, False),
):
    entry("diffusers", _name, "diffusers", tokens=_tokens)(_build)
