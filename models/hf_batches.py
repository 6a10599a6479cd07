"""Batches of transformers models: a small one with labels, made from a config alone, which planning needs before the
first real batch (only shapes and dtypes matter); and which dim of each input is the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.ir.batch import tensors_of

MAIN_INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "pixel_values", "input_features", "input_values")
WITHOUT_BATCH = ("cache_position", "head_mask", "decoder_head_mask", "cross_attn_head_mask")
_BATCH, _LENGTH = 2, 8


def example_batch(model: nn.Module) -> dict[str, Any] | None:
    """Keyword arguments on the CPU, labels included where the forward takes them; None for models whose inputs are
    neither tokens, images nor audio features."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    takes = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    batch: dict[str, Any] = {}
    if main == "pixel_values" or ("pixel_values" in takes and "input_ids" not in takes):
        batch["pixel_values"] = torch.zeros(_BATCH, *_image(config), dtype=_dtype(model))
    elif main == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 2 * _LENGTH)
        batch["input_features"] = torch.zeros(_BATCH, config.num_mel_bins, frames, dtype=_dtype(model))
    elif "input_ids" in takes:
        batch["input_ids"] = torch.zeros(_BATCH, _length(config), dtype=torch.int64)
    else:
        return None
    if "labels" in takes:
        batch["labels"] = _labels(model, config, batch)
    elif "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = torch.zeros(_BATCH, _LENGTH, dtype=torch.int64)
    return batch


def batch_dims(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, int | None]:
    """transformers' inputs are batch first, but for a few. What has another size there is no part of the batch: one row
    of position_ids, patches of all images."""
    tensors = tensors_of(batch)
    names = (getattr(model, "main_input_name", "input_ids"), *MAIN_INPUTS, *tensors)
    rows = next((tensors[n].shape[0] for n in names if n in tensors and tensors[n].dim()), 0)
    out: dict[str, int | None] = {}
    for name, x in tensors.items():
        dim = 1 if name.endswith("position_ids") and x.dim() == 3 else 0  # of rotary embeddings in time and space
        out[name] = dim if name not in WITHOUT_BATCH and x.dim() > dim and x.shape[dim] == rows else None
    return out


def _length(config: Any) -> int:
    """Short, but a multiple of what some models cut sequences into."""
    limit = getattr(config, "max_position_embeddings", _LENGTH) or _LENGTH
    return min(_LENGTH, limit) if isinstance(limit, int) and limit > 0 else _LENGTH


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _image(config: Any) -> tuple[int, int, int]:
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return getattr(config, "num_channels", 3), height, width


def _labels(model: nn.Module, config: Any, batch: dict[str, Any]) -> torch.Tensor:
    """One label per token for language models and token classifiers, else one per example."""
    name = type(model).__name__
    per_example = "pixel_values" in batch or name.endswith("ForSequenceClassification")
    if not per_example:
        length = batch["input_ids"].shape[1] if "input_ids" in batch else _LENGTH
        return torch.zeros(_BATCH, length, dtype=torch.int64)
    single = getattr(config, "num_labels", 2) == 1
    return torch.zeros(_BATCH, dtype=_dtype(model) if single else torch.int64)
