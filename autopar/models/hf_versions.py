"""How versions of transformers differ in what the adapter asks of them: a function for each difference."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, masking_utils
from transformers.utils import output_capturing


def note_recorded(model: PreTrainedModel) -> None:
    """As its constructor does: note what its class records of layers. In 5.10 and 5.17 the key is the class as text;
    in 5.23 the model is, and the registry makes the text of it."""
    registry: Any = output_capturing._CAN_RECORD_REGISTRY
    registry[str(type(model)) if type(registry) is dict else model] = model._can_record_outputs


def has_post_norm(experts: Any) -> bool:
    """Whether experts have a norm behind them (``post_expert_norm``). In 5.10 and 5.17 none has."""
    return bool(getattr(experts, "has_post_expert_norm", False))


def renumbers_positions() -> Any:
    """The maker of the mask function that counts the positions of packed documents anew. In 5.10 and 5.17 there is
    none: windows and chunks count positions of the row."""
    return getattr(masking_utils, "remap_positions_for_packed_sequence", None)
