"""The inputs of transformers models: their batch dims, those that are static, positions of images."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from autopar.ir.batch import tensors_of

_POSITIONS = "compute_3d_position_ids"
MAIN_INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "pixel_values", "input_features", "input_values")
PATCHES = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
MERGED = ("image_merge_sizes", "video_merge_sizes")
_COUNTS = ("target_sizes", "target_sizes_videos", "images_per_sample")
SIZES = (*PATCHES.values(), *MERGED, *_COUNTS, "image_sizes", "spatial_shapes")  # of images and clips, their numbers
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
    return out | {name: 0 for name in tensors if name.startswith(("image_inputs.", "video_inputs."))}


def static_inputs(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Sizes of images: the model's code loops over them, and where it has shapes of patches over their mask, too."""
    masks = ("pixel_attention_mask",) if isinstance(batch.get("spatial_shapes"), Tensor) else ()
    return tuple(name for name in (*SIZES, *masks) if isinstance(batch.get(name), Tensor))


def positions_of_images(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Position ids in time and space, [3, rows, tokens]: the model's code groups the tokens of each row by what they
    stand for, which would make every batch a graph of its own."""
    given = {name: value for name, value in batch.items() if value is not None}
    if not given.keys() & {*SIZES} or "input_ids" not in given or given.keys() & {"position_ids", "past_key_values"}:
        return {}
    owner: Any = next((m for m in model.modules() if hasattr(type(m), _POSITIONS)), None)
    if owner is None:
        return {}
    takes = inspect.signature(getattr(owner, _POSITIONS)).parameters.values()
    known = {p.name: given.get(p.name) for p in takes if p.name in given or p.default is p.empty}
    before, found = getattr(owner, "rope_deltas", None), None
    with contextlib.suppress(ValueError):  # of an input that is missing: the forward says so, if it asks for positions
        found = getattr(owner, _POSITIONS)(**known)
    owner.rope_deltas = before  # for generation, which starts from its own prompt
    return {} if found is None else {"position_ids": found}
