"""What transformers knows of a model that generates: its inputs, its end of text, its longest sequence."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from autopar.capture.front_end import GenerationFacts

_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_DENSE = "keep_window_size"  # longer sequences choose among all keys (doge)


def generation_facts(model: nn.Module) -> GenerationFacts:
    """See `autopar.capture.front_end.Adapter.generation`."""
    config: Any = getattr(model, "config", None)
    takes, name = inspect.signature(model.forward).parameters, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"serve: needs a model of causal attention alone, found {name}, whose decoder attends to an encoder; "
            "generate with the model itself"
        )
    if "input_ids" not in takes:
        raise ValueError(f"serve: needs a model of token ids, found {name}, which takes {', '.join(takes)}")
    own = getattr(model, "generation_config", None)
    ends = getattr(own, "eos_token_id", None)
    ends = getattr(config, "eos_token_id", None) if ends is None else ends
    ids = tuple(ends) if isinstance(ends, (list, tuple)) else () if ends is None else (int(ends),)
    return GenerationFacts("input_ids", _limit(config), ids, own)


def _limit(config: Any) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = [n for name in _LIMITS if isinstance(n := getattr(text, name, None), int) and n > 0][:1]
    dense = getattr(text, _DENSE, None)
    return min([*found, *([dense] if isinstance(dense, int) else [])], default=0)
