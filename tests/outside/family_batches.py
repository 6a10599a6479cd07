"""Batches for models of transformers by what their forward takes: the example batches of `parallelize` with values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autopar.models.hf_examples import example_batches
from tests.outside.family_facts import ALSO
from tests.outside.small_configs import IDS

ROWS, LENGTH, PIXELS = 4, 16, 64
_IMAGE = ("image_token_id", "image_token_index")
_SIDES = ("image_size", "img_size", "crop_size")
Batch = dict[str, Any]


def batches(model: nn.Module) -> Iterator[Batch]:
    """Candidates, those with the most inputs first."""
    g, also = torch.Generator().manual_seed(0), ALSO.get(type(model).__name__)
    for empty in example_batches(model) or [{}]:
        filled = {name: _filled(model, name, x, g) for name, x in empty.items()}
        if also is not None:
            yield {**filled, **also(model, filled)}
        if "input_ids" in filled:
            for images in _images(model, filled, g):
                yield _placed(model, {**filled, **images}, images)
        yield filled


def _filled(model: nn.Module, name: str, x: Any, g: torch.Generator) -> Any:
    """Random values of an example's dtype, ``ROWS`` of them."""
    if not isinstance(x, Tensor):
        return x
    if name.startswith("pixel_values") and _first(model.config, _SIDES) is None:
        x = x[..., :PIXELS, :PIXELS]
    shape = (ROWS, *x.shape[1:])
    if x.is_floating_point():
        return torch.randn(shape, generator=g, dtype=torch.float64)
    if name == "bbox":
        return torch.randint(0, 50, shape, generator=g).sort(-1).values
    high = _classes(model, name, x)
    return torch.randint(min(3, high - 1) if "ids" in name else 0, high, shape, generator=g)


def _classes(model: nn.Module, name: str, x: Tensor) -> int:
    if name in ("start_positions", "end_positions", "timesteps"):
        return 8
    per_class = x.dim() in (1, 3) or type(model).__name__.endswith("ForTokenClassification")
    if name == "labels" and per_class:
        return int(model.config.num_labels)
    return IDS if "ids" in name or name == "labels" else 2


def _images(model: nn.Module, batch: Batch, g: torch.Generator) -> Iterator[Batch]:
    """Images beside text, as the forward takes them: rows of patches with a grid, or one image for each row."""
    takes, config = inspect.signature(model.forward).parameters, model.config
    vision = getattr(config, "vision_config", None)
    if vision is None or "pixel_values" not in takes or _first(config, _IMAGE) is None:
        return
    channels = next((c for n in ("num_channels", "in_channels", "in_chans") if (c := getattr(vision, n, None))), 3)
    if "image_grid_thw" in takes and hasattr(vision, "patch_size"):
        grids = torch.tensor([(1, 4, 4), (1, 4, 8)] * (ROWS // 2))
        width = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
        patches = torch.randn(int(grids.prod(1).sum()), width, generator=g, dtype=torch.float64)
        yield {"pixel_values": patches, "image_grid_thw": grids}
        return
    side = _first(config, _SIDES)
    height, width = (side, side) if isinstance(side, int) else tuple(side or (PIXELS, PIXELS))
    yield {"pixel_values": torch.randn(ROWS, channels, height, width, generator=g, dtype=torch.float64)}


def _placed(model: nn.Module, batch: Batch, images: Batch) -> Batch:
    """With as many tokens for images in each row as the tower gives it; as it was where the tower does not say."""
    inner = getattr(model, "model", model)
    tower = getattr(model, "get_image_features", None) or getattr(inner, "get_image_features", None)
    if tower is None:
        return batch
    taken = {n: batch[n] for n in inspect.signature(tower).parameters if n in batch and n != "input_ids"}
    try:
        with torch.no_grad():
            found = tower(**taken)
    except Exception:
        return batch
    found = getattr(found, "pooler_output", found)
    parts = [len(x) for x in found] if isinstance(found, (list, tuple)) else None
    if parts is None or len(parts) != ROWS:
        total = sum(x.shape[0] for x in found) if parts else math.prod(found.shape[:-1])
        sizes = images["image_grid_thw"].prod(1) if "image_grid_thw" in images else torch.ones(ROWS)
        parts = [int(n) for n in (sizes * total / sizes.sum())]
    length = max(parts) + LENGTH
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, IDS, (ROWS, length), generator=g)
    for row, count in enumerate(parts):
        ids[row, 1 : 1 + count] = _first(model.config, _IMAGE)
    more = {"labels": ids.clamp(max=IDS - 1)} if "labels" in batch else {}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        more["mm_token_type_ids"] = (ids == _first(model.config, _IMAGE)).long()
    return {**batch, "input_ids": ids, **more}


def _first(config: Any, names: tuple[str, ...]) -> Any:
    """The first value with one of these names, of a config or those of its images."""
    inner = [config, *(getattr(config, n, None) for n in ("vision_config", "backbone_config"))]
    return next((x for c in inner for n in names if (x := getattr(c, n, None)) is not None), None)
