"""Batch dims of the inputs of transformers models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.ir.batch import tensors_of

MAIN_INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "pixel_values", "input_features", "input_values")
PATCHES = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
WITHOUT_BATCH = ("cache_position", "head_mask", "decoder_head_mask", "cross_attn_head_mask")


def batch_dims(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, int | None]:
    """Inputs are batch first, with few exceptions. Images (channels, height, width) are in the order of the rows, as
    many for each; so are patches of all images and the grids that say how many an image has. Another input with another
    size there has no batch dim: position_ids of one row."""
    tensors = tensors_of(batch)
    names = (getattr(model, "main_input_name", "input_ids"), *MAIN_INPUTS, *tensors)
    rows = next((tensors[n].shape[0] for n in names if n in tensors and tensors[n].dim()), 0)
    out: dict[str, int | None] = {}
    for name, x in tensors.items():
        dim = 1 if name.endswith("position_ids") and x.dim() == 3 else 0  # of rotary embeddings in time and space
        alike = x.dim() > dim and (x.shape[dim] == rows or (x.dim() > 3 and rows > 0 and x.shape[dim] % rows == 0))
        out[name] = dim if name not in WITHOUT_BATCH and alike else None
    for patches, grids in PATCHES.items():
        if patches in batch and grids in batch:
            out |= {patches: 0, grids: 0}
    return out
