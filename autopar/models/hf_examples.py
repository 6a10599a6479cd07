"""Example batches from a config and the signature of the forward, to plan parameters before the first real batch; only
shapes and dtypes matter.

    LlamaForCausalLM       input_ids, labels [2, 8]
    CLIPModel              input_ids [2, 8], pixel_values [2, 3, 224, 224], return_loss=True
    WhisperForCondition..  input_features [2, 80, 3000], labels [2, 8]

For models with optional images there are several, those with the most inputs first. Optional inputs whose sizes depend
on values of other inputs (grids of patches, boxes) are omitted.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

ROWS, LENGTH, CHOICES = 2, 8, 2
_SIZED_BY_OTHERS = (
    "image_grid_thw", "grid_thw", "image_sizes", "pixel_position_ids", "image_position_ids", "spatial_shapes",
    "aspect_ratio_ids", "target_sizes", "image_grid_hw", "image_grids", "num_frames_per_video",
)  # fmt: skip
_PER_EXAMPLE = (
    "ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification",
    "ForMultipleChoice", "ForXVector", "ForNextSentencePrediction", "ForSpeechClassification", "WithTeacher",
)  # fmt: skip
_PER_TOKEN = (
    "LM", "LMHeadModel", "ForTokenClassification", "ForConditionalGeneration", "ForCTC", "EncoderDecoderModel",
)  # fmt: skip
_PER_PIXEL = ("ForSemanticSegmentation",)
Maker = Callable[["_ModelFacts"], Tensor | None]


class _ModelFacts:
    """A config of a model, with nested configs."""

    def __init__(self, model: nn.Module) -> None:
        self.config: Any = getattr(model, "config", None)
        self.name = type(model).__name__
        self.takes = inspect.signature(model.forward).parameters
        self.dtype = next(
            (p.dtype for _, p in model.named_parameters() if p.is_floating_point()), torch.get_default_dtype()
        )

    def get(self, *names: str, within: Collection[str] = ("",)) -> Any:
        """The first value with one of these names, in the config or in nested ones."""
        for config in (self.config if not part else getattr(self.config, part, None) for part in within):
            for name in names:
                found = getattr(config, name, None)
                if found is not None:
                    return found
        return None

    def ids(self, *shape: int) -> Tensor:
        return torch.zeros(ROWS, *shape, dtype=torch.int64)

    def numbers(self, *shape: Any) -> Tensor | None:
        """None if a size is not known."""
        if not all(isinstance(n, int) and n > 0 for n in shape):
            return None
        return torch.zeros(ROWS, *shape, dtype=self.dtype)


def example_batches(model: nn.Module) -> list[dict[str, Any]]:
    """Keyword arguments on the CPU, those with the most inputs first, with labels if they are known; empty if the
    inputs are unknown."""
    facts = _ModelFacts(model)
    if facts.config is None:
        return []
    made = [inputs for inputs in _inputs(facts, model) if inputs is not None]
    batches = [_with_labels(facts, inputs) for inputs in made]
    return [*batches, *made[-1:]] if made and batches[-1].keys() != made[-1].keys() else batches


def _inputs(facts: _ModelFacts, model: nn.Module) -> Iterator[dict[str, Any] | None]:
    """Candidate inputs without labels."""
    takes, main = facts.takes, getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) and main in takes else next((n for n in MAKERS if n in takes), "")
    needed = [n for n, p in takes.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    least = dict.fromkeys([main, *needed, *(n for n in _WITH.get(main, ()) if n in takes)])
    free = not any(n in takes for n in _SIZED_BY_OTHERS)
    more = [n for n in ("input_ids", "pixel_values", "input_features") if n in takes and n not in least and free]
    if more:
        yield _made(facts, [*least, *more])
    yield _made(facts, least)


def _made(facts: _ModelFacts, names: Collection[str]) -> dict[str, Any] | None:
    """None where one is not known."""
    made = {name: MAKERS[name](facts) if name in MAKERS else None for name in names}
    return made if made and all(x is not None for x in made.values()) else None


def _with_labels(facts: _ModelFacts, batch: dict[str, Any]) -> dict[str, Any]:
    """Add labels; for a decoder without labels its tokens."""
    if "return_loss" in facts.takes and {"input_ids", "pixel_values"} <= batch.keys():
        return {**batch, "return_loss": True}
    labels = _labels(facts, batch)
    decodes = not labels and "decoder_input_ids" in facts.takes and "decoder_input_ids" not in batch
    return {**batch, **labels, **({"decoder_input_ids": facts.ids(LENGTH)} if decodes else {})}


def _labels(facts: _ModelFacts, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Labels by the task of the class; empty if they are lists, or unknown."""
    takes, name = facts.takes, facts.name
    if "start_positions" in takes:
        return {"start_positions": facts.ids(), "end_positions": facts.ids()}
    if "labels" not in takes:
        return {}
    if name.endswith(_PER_EXAMPLE):
        single = facts.get("num_labels") == 1
        return {"labels": torch.zeros(ROWS, dtype=facts.dtype) if single else facts.ids()}
    if name.endswith(_PER_PIXEL) and "pixel_values" in batch:
        return {"labels": facts.ids(*batch["pixel_values"].shape[-2:])}
    if name.endswith(_PER_TOKEN):
        ids = batch.get("input_ids")
        return {"labels": facts.ids(LENGTH if ids is None else ids.shape[-1])}
    return {}


# --- inputs by name -----------------------------------------------------------------------------------------

_VISION = ("", "vision_config", "backbone_config", "image_config", "vision", "encoder")
_AUDIO = ("", "audio_config", "audio_encoder_config", "encoder_config", "speech_config")


def _length(facts: _ModelFacts) -> int:
    """A short sequence length that fits the table of positions."""
    limit = facts.get("max_position_embeddings")
    return min(LENGTH, limit) if isinstance(limit, int) and limit > 0 else LENGTH


def _tokens(facts: _ModelFacts) -> Tensor:
    choices = (CHOICES,) if facts.name.endswith("ForMultipleChoice") else ()
    return facts.ids(*choices, _length(facts))


def _pixels(facts: _ModelFacts) -> Tensor | None:
    size = facts.get("image_size", "crop_size", "img_size", within=_VISION)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2] if size is not None else (224, 224)
    channels = facts.get("num_channels", "in_channels", "in_chans", within=_VISION)
    frames = facts.get("num_frames", "frames_per_clip")
    video = (frames,) if isinstance(frames, int) and "input_ids" not in facts.takes else ()
    return facts.numbers(*video, channels if isinstance(channels, int) else 3, height, width)


def _waveform(facts: _ModelFacts) -> Tensor | None:
    """Audio samples for a few frames, or frames of a spectrogram if there are no convolutions."""
    strides, kernels = facts.get("conv_stride"), facts.get("conv_kernel")
    if strides is not None and kernels is not None:
        return facts.numbers(2 * LENGTH * math.prod(strides) + max(kernels))
    bins = facts.get("num_mel_bins")
    if bins is not None:
        return facts.numbers(facts.get("max_length") or 16 * LENGTH, bins)
    ratios = facts.get("upsampling_ratios")
    channels = facts.get("audio_channels")
    return facts.numbers(channels or 1, math.prod(ratios) * LENGTH if ratios else 16000)


def _spectrogram(facts: _ModelFacts) -> Tensor | None:
    """[mel, frames] for whisper, [frames, features] for others."""
    projected = facts.get("feature_projection_input_dim", "input_feat_per_channel", within=_AUDIO)
    if projected is not None:
        return facts.numbers(16 * LENGTH, projected)
    bins, positions = (facts.get(name, within=_AUDIO) for name in ("num_mel_bins", "max_source_positions"))
    return facts.numbers(bins, 2 * positions) if bins and positions else facts.numbers(16 * LENGTH, bins)


def _past(facts: _ModelFacts) -> int:
    """Past time steps: the context and the longest lag before it."""
    return (facts.get("context_length", "prediction_length") or 4 * LENGTH) + max(facts.get("lags_sequence") or [0])


def _series(steps: Callable[[_ModelFacts], int]) -> Maker:
    def made(facts: _ModelFacts) -> Tensor | None:
        channels = facts.get("num_input_channels", "input_size")
        alone = "num_input_channels" not in vars(facts.config) and channels == 1
        return facts.numbers(steps(facts)) if alone else facts.numbers(steps(facts), channels)

    return made


def _time_features(steps: Callable[[_ModelFacts], int]) -> Maker:
    return lambda facts: torch.zeros(ROWS, steps(facts), facts.get("num_time_features") or 0, dtype=facts.dtype)


def _future(facts: _ModelFacts) -> int:
    return facts.get("prediction_length") or LENGTH


MAKERS: dict[str, Maker] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "pixel_values_videos": _pixels,
    "input_values": _waveform,
    "input_features": _spectrogram,
    "decoder_input_ids": lambda facts: facts.ids(LENGTH),
    "qformer_input_ids": lambda facts: facts.ids(LENGTH),
    "bbox": lambda facts: facts.ids(_length(facts), 4),
    "task_inputs": lambda facts: facts.ids(facts.get("task_seq_len") or LENGTH),
    "flattened_patches": lambda facts: facts.numbers(
        LENGTH, (facts.get("patch_embed_hidden_size", within=_VISION) or 0) + 2
    ),
    "past_values": _series(_past),
    "past_observed_mask": _series(_past),
    "past_time_features": _time_features(_past),
    "future_values": _series(_future),
    "future_time_features": _time_features(_future),
    "static_categorical_features": lambda facts: facts.ids(facts.get("num_static_categorical_features") or 0),
    "static_real_features": lambda facts: facts.numbers(facts.get("num_static_real_features")),
    "states": lambda facts: facts.numbers(LENGTH, facts.get("state_dim")),
    "actions": lambda facts: facts.numbers(LENGTH, facts.get("act_dim")),
    "rewards": lambda facts: facts.numbers(LENGTH, 1),
    "returns_to_go": lambda facts: facts.numbers(LENGTH, 1),
    "timesteps": lambda facts: facts.ids(LENGTH),
}
# what goes with a main input, though the forward could do without
_WITH: dict[str, tuple[str, ...]] = {
    "input_ids": ("bbox",),
    "past_values": ("past_time_features", "past_observed_mask", "future_values", "future_time_features"),
    "states": ("actions", "rewards", "returns_to_go", "timesteps"),
}
