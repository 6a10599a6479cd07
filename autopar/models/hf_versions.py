"""Differences between versions of transformers, one function for each."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, masking_utils
from transformers.utils import output_capturing


def note_recorded(model: PreTrainedModel) -> None:
    """Register what a model class records of layers, as its constructor does. In 5.10 and 5.17 the key is the class as
    text, in 5.23 the model."""
    registry: Any = output_capturing._CAN_RECORD_REGISTRY
    registry[str(type(model)) if type(registry) is dict else model] = model._can_record_outputs


def has_post_norm(experts: Any) -> bool:
    """Whether a norm follows the experts (``post_expert_norm``). In 5.10 and 5.17 there is none."""
    return bool(getattr(experts, "has_post_expert_norm", False))


def renumbers_positions() -> Any:
    """The factory of the mask function that restarts positions at each packed document. In 5.10 and 5.17 there is none:
    windows and chunks count positions of the row."""
    return getattr(masking_utils, "remap_positions_for_packed_sequence", None)
