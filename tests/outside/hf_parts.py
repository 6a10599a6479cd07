"""What small models of transformers are made of: sizes that many configs have, batches, a loss where there is none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.outside.zoo_of_others import Made, library, text

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "head_dim": 8,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 32,
}
BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.0,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}

SPEECH = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "activation_dropout": 0.0,
    "mask_time_prob": 0.0,
}

BERT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
}


class FirstLoss(nn.Module):
    """What the model is called with always, and a loss that is a sum of squares where it makes none."""

    def __init__(self, body: nn.Module, fixed: dict[str, Any], pick: Callable[[Any], Tensor] | None) -> None:
        super().__init__()
        self.body, self.fixed, self.pick = body, fixed, pick

    def forward(self, **inputs: Any) -> Tensor:
        out = self.body(**inputs, **self.fixed)
        return out.loss if self.pick is None else (self.pick(out) ** 2).mean()


def hf(
    model: str, config: Any, batch: dict[str, Tensor], pick: Callable[[Any], Tensor] | None = None, **fixed: Any
) -> Made:
    """A model of transformers as it stands where it makes its loss; else with a loss around it."""
    made = getattr(library("transformers"), model)(config)
    bare = pick is None and not fixed
    return (made if bare else FirstLoss(made, fixed, pick)), batch


def conf(name: str, /, **sizes: Any) -> Any:
    """A config. It gets copies: some write defaults into the dicts that they are given."""
    return getattr(library("transformers"), name)(**copy.deepcopy(sizes))


def labelled(length: int = 16) -> dict[str, Tensor]:
    batch = text(length)
    return {"input_ids": batch["ids"].clamp(min=3), "labels": batch["labels"]}
