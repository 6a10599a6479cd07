"""transformers: speech, long texts, experts, time series, decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.outside.hf_parts import BART, BERT, SPEECH, conf, hf, labelled
from tests.outside.zoo_of_others import ROWS, Made, classes, draw, entry


def _wav2vec2(kind: str = "Wav2Vec2", **more: Any) -> Made:
    config = conf(f"{kind}Config", **{**SPEECH, **more})
    return hf(f"{kind}ForCTC", config, {"input_values": draw(ROWS, 160), "labels": classes(ROWS, 3, count=30) + 1})


def _speecht5() -> Made:
    config = conf(
        "SpeechT5Config",
        **{
            **SPEECH,
            **BART,
            "vocab_size": 64,
            "hidden_size": 32,
            "num_mel_bins": 16,
            "positional_dropout": 0.0,
            "speech_decoder_prenet_dropout": 0.0,
            "speech_decoder_postnet_dropout": 0.0,
            "speech_decoder_prenet_units": 32,
            "speech_decoder_postnet_units": 32,
            "reduction_factor": 2,
            "speaker_embedding_dim": 16,
            "speech_decoder_postnet_layers": 2,
        },
    )
    ids = labelled()["input_ids"]
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": draw(ROWS, 12, 16),
        "speaker_embeddings": draw(ROWS, 16),
    }
    return hf("SpeechT5ForTextToSpeech", config, batch)


def _with_global_tokens(count: int) -> dict[str, Tensor]:
    batch = labelled()
    marked = torch.arange(16) < count
    return {**batch, "global_attention_mask": marked.long().expand(ROWS, 16).contiguous()}


def _longformer() -> Made:
    config = conf("LongformerConfig", attention_window=4, **BERT)
    return hf("LongformerForMaskedLM", config, _with_global_tokens(2))


def _bigbird() -> Made:
    config = conf("BigBirdConfig", attention_type="original_full", **BERT)
    return hf("BigBirdForMaskedLM", config, labelled())


def _bigbird_sparse() -> Made:
    config = conf(
        "BigBirdConfig",
        attention_type="block_sparse",
        block_size=4,
        num_random_blocks=1,
        **{**BERT, "max_position_embeddings": 128},
    )
    return hf("BigBirdForMaskedLM", config, labelled(64))


def _led() -> Made:
    return hf(
        "LEDForConditionalGeneration",
        conf(
            "LEDConfig",
            attention_window=4,
            max_encoder_position_embeddings=64,
            max_decoder_position_embeddings=64,
            **BART,
        ),
        _with_global_tokens(1),
    )


def _switch() -> Made:
    config = conf(
        "SwitchTransformersConfig",
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=4,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        expert_capacity=16,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return _routers_in_float64(
        hf(
            "SwitchTransformersForConditionalGeneration",
            config,
            {**labelled(), "attention_mask": torch.ones(ROWS, 16).long()},
        )
    )


def _routers_in_float64(made: Made) -> Made:
    """Whose configs know of float32 and less only."""
    for module in made[0].modules():
        if isinstance(getattr(module, "dtype", None), torch.dtype) and hasattr(module, "classifier"):
            module.dtype = torch.float64  # type: ignore[assignment]
    return made


def _nllb() -> Made:
    config = conf(
        "NllbMoeConfig",
        num_experts=4,
        expert_capacity=16,
        encoder_sparse_step=1,
        decoder_sparse_step=1,
        router_jitter_noise=0.0,
        moe_token_dropout=0.0,
        max_position_embeddings=64,
        **BART,
    )
    return _routers_in_float64(hf("NllbMoeForConditionalGeneration", config, labelled()))


def _patchtst() -> Made:
    config = conf(
        "PatchTSTConfig",
        num_input_channels=2,
        context_length=32,
        patch_length=4,
        patch_stride=4,
        prediction_length=8,
        d_model=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        ffn_dim=64,
        attention_dropout=0.0,
        ff_dropout=0.0,
        path_dropout=0.0,
        head_dropout=0.0,
        positional_dropout=0.0,
    )
    return hf("PatchTSTForPrediction", config, {"past_values": draw(ROWS, 32, 2), "future_values": draw(ROWS, 8, 2)})


def _informer(kind: str = "Informer") -> Made:
    config = conf(
        f"{kind}Config",
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2],
        num_time_features=2,
        input_size=1,
        dropout=0.0,
        **{k: v for k, v in BART.items() if k not in ("vocab_size", "pad_token_id", "dropout")},
    )
    past = 10
    batch = {
        "past_values": draw(ROWS, past),
        "past_time_features": draw(ROWS, past, 2),
        "past_observed_mask": torch.ones(ROWS, past).double(),
        "future_values": draw(ROWS, 4),
        "future_time_features": draw(ROWS, 4, 2),
    }
    return hf(f"{kind}ForPrediction", config, batch)


def _decision() -> Made:
    config = conf(
        "DecisionTransformerConfig",
        state_dim=5,
        act_dim=3,
        hidden_size=32,
        max_ep_len=32,
        n_layer=2,
        n_head=4,
        n_inner=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    batch = {
        "states": draw(ROWS, 6, 5),
        "actions": draw(ROWS, 6, 3),
        "rewards": draw(ROWS, 6, 1),
        "returns_to_go": draw(ROWS, 6, 1),
        "timesteps": torch.arange(6).expand(ROWS, 6).contiguous(),
        "attention_mask": torch.ones(ROWS, 6, dtype=torch.int64),
    }
    return hf("DecisionTransformerModel", config, batch, lambda out: out.action_preds)


TABLE: dict[str, tuple[Callable[[], Made], bool]] = {
    "wav2vec2": (_wav2vec2, False),
    "hubert": (lambda: _wav2vec2("Hubert"), False),
    "speecht5": (_speecht5, False),
    "longformer": (_longformer, True),
    "bigbird": (_bigbird, True),
    "bigbird block sparse": (_bigbird_sparse, False),
    "led": (_led, True),
    "switch transformers": (_switch, True),
    "nllb moe": (_nllb, True),
    "patchtst": (_patchtst, False),
    "informer": (_informer, False),
    "time series transformer": (lambda: _informer("TimeSeriesTransformer"), False),
    "decision transformer": (_decision, False),
}
STATIC_INPUTS = dict.fromkeys(("longformer", "led"), ("global_attention_mask",))
for _name, (_build, _tokens) in TABLE.items():
    entry("transformers", _name, "transformers", _tokens, STATIC_INPUTS.get(_name, ()))(_build)
