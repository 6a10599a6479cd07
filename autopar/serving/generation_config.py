"""transformers' GenerationConfig as `Sampling`: what is served, what has no effect here, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from autopar.serving.sampling_params import Sampling
from autopar.spelling import did_you_mean
from autopar.values import refuse

SERVED = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "stop_strings"),
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "num_return_sequences"),
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens"),
    *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    *("remove_invalid_values", "renormalize_logits", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("output_scores", "output_logits", "return_dict_in_generate"),
}

# Of other caches, compilers, models and strategies: without them, they change nothing.
HARMLESS = {
    *("use_cache", "cache_config", "max_cache_len", "compile_config", "disable_compile", "low_memory"),
    *("prefill_chunk_size", "continuous_batching_config", "early_stopping", "length_penalty"),
    *("decoder_start_token_id", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("max_matching_ngram_size", "transformers_version"),
}

# name -> values without effect, beside None. Any other value is refused.
REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "token_healing": (False,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "max_time": (),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "use_mtp": (False,),
    "speculation_type": (),
    "cache_implementation": (
        *("dynamic", "static", "offloaded", "offloaded_static", "paged"),
        *("sliding_window", "hybrid", "hybrid_chunked", "offloaded_hybrid", "offloaded_hybrid_chunked"),
    ),
}
REFUSED_IF_SAMPLED: dict[str, tuple[Any, ...]] = {
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
}

WITHOUT = "; leave it out, or call the model's own generate"

# transformers' processors that treat each row by itself and keep no state -> the setting that makes the same one.
_OF_ROWS = {
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "TemperatureLogitsWarper": None,
    "TopHLogitsWarper": None,
    "TopKLogitsWarper": None,
    "TopPLogitsWarper": None,
    "MinPLogitsWarper": None,
    "TypicalLogitsWarper": None,
    "EpsilonLogitsWarper": None,
    "EtaLogitsWarper": None,
    "LogitNormalization": None,
}


def merged(defaults: Any, given: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config of a call, and the arguments that are none of it: ``arguments`` over ``given`` over ``defaults``, the
    model's, as transformers merges them."""
    if given is not None and not hasattr(given, "to_dict"):
        raise refuse("generation_config", "a GenerationConfig", given)
    config = copy.deepcopy(given) if given is not None else type(defaults)()
    config.update(**defaults.to_dict(), defaults_only=True, allow_custom_entries=True)
    return config, config.update(**arguments)


def check(config: Any) -> None:
    """Raise ValueError for a setting that is not served. A model's own entries, which transformers ignores, are too."""
    neutral = REFUSED | (REFUSED_IF_SAMPLED if config.do_sample else {})
    known = SERVED | HARMLESS | REFUSED.keys() | REFUSED_IF_SAMPLED.keys()
    for name in vars(type(config)()):
        value = getattr(config, name)
        unknown = name not in known and not name.startswith("_")
        if value is not None and (unknown or (name in neutral and value not in neutral[name])):
            raise refuse(f"generate: {name}", "a value without effect, since it is not served", value, WITHOUT)


def check_unused(arguments: dict[str, Any], taken: Sequence[str]) -> None:
    """Raise ValueError for an argument that neither `generate` nor the config takes."""
    if left := [name for name, value in arguments.items() if value is not None]:
        hint = did_you_mean(left[0], [*SERVED, *taken]) or WITHOUT
        raise ValueError(f"generate: expected token ids and settings of generation, found {left[0]!r}{hint}")


def token_ids(value: Any) -> tuple[int, ...]:
    """One id, several, a tensor of them, or None. Negative ones stand for none."""
    if value is None:
        return ()
    found = value.tolist() if isinstance(value, Tensor) else value
    return tuple(token for token in (found if isinstance(found, (list, tuple)) else [found]) if token >= 0)


def new_tokens(config: Any, width: int, max_positions: int | None) -> tuple[int, int]:
    """(at least, at most) how many tokens to generate; ``width``: length of the prompts with padding."""
    if config.max_new_tokens is not None:
        most = config.max_new_tokens
    elif config.max_length is not None:
        most = config.max_length - width
    else:  # transformers' default
        most = 20 if max_positions is None else min(20, max_positions - width)
    if most < 1:
        limit = "max_length" if config.max_length is not None else "the model's number of positions"
        raise ValueError(f"generate: expected prompts shorter than {limit}, found {width} tokens; set max_new_tokens")
    if config.min_new_tokens is not None:
        return min(config.min_new_tokens, most), most
    return min(max((config.min_length or 0) - width, 0), most), most


def sampling_of(
    config: Any,
    length: int,
    limits: tuple[int, int | None],
    top_k: int = 0,
    processors: Sequence[Callable[..., Any]] = (),
) -> Sampling:
    """`Sampling` of one prompt of ``length`` tokens, without a seed. ``limits``: least and most new tokens; ``top_k``:
    if the config has none."""
    eos = token_ids(config.eos_token_id)
    words = [tuple(word) for word in config.bad_words_ids or ()]
    drawn: dict[str, Any] = {}
    if config.do_sample:
        drawn = {
            "top_k": top_k if config.top_k is None else config.top_k,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "min_p": config.min_p or 0.0,
        }
        if config.temperature == 0:
            raise refuse("generate: temperature", "a number above 0 with do_sample", 0, "; pass do_sample=False")
    stop = config.stop_strings or ()
    if stop and limits[0]:
        raise ValueError("generate: expected stop_strings or a minimum length, found both; leave one of them out")
    return Sampling(
        temperature=(1.0 if config.temperature is None else config.temperature) if config.do_sample else 0.0,
        repetition_penalty=config.repetition_penalty or 1.0,
        logit_bias=_single_biases(config.sequence_bias),
        bad_words=tuple(word for word in words if word not in [(token,) for token in eos]),
        min_tokens=limits[0],
        max_tokens=limits[1],
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        eos_token_ids=eos,
        processors=(*_made_processors(config, length, limits[1], eos), *processors),
        **drawn,
    )


def _single_biases(given: Any) -> dict[int, float]:
    pairs = list(given.items() if isinstance(given, dict) else given or ())
    if long := [ids for ids, _ in pairs if len(ids) != 1]:
        raise refuse("generate: sequence_bias", "sequences of one token", list(long[0]), WITHOUT)
    return {ids[0]: bias for ids, bias in pairs}


def _made_processors(config: Any, length: int, most: int | None, eos: tuple[int, ...]) -> list[Callable[..., Any]]:
    """transformers' own ones for settings that `Sampling` lacks, in their order."""
    from transformers.generation import logits_process as theirs

    found: list[Callable[..., Any]] = []
    if config.no_repeat_ngram_size:
        found.append(theirs.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if config.forced_bos_token_id is not None:
        found.append(theirs.ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id))
    if config.forced_eos_token_id is not None:
        if most is None:
            raise refuse("generate: forced_eos_token_id", "max_new_tokens beside it", None)
        found.append(theirs.ForcedEOSTokenLogitsProcessor(length + most, config.forced_eos_token_id))
    if config.remove_invalid_values:
        found.append(theirs.InfNanRemoveLogitsProcessor())
    if config.exponential_decay_length_penalty is not None:
        penalty = tuple(config.exponential_decay_length_penalty)
        found.append(theirs.ExponentialDecayLengthPenalty(penalty, list(eos), length))
    if config.suppress_tokens is not None:
        found.append(theirs.SuppressTokensLogitsProcessor(config.suppress_tokens))
    if config.begin_suppress_tokens is not None:
        begin = length if length > 1 or config.forced_bos_token_id is None else length + 1
        found.append(theirs.SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin))
    return found


def own_processors(given: Sequence[Any] | None, config: Any) -> tuple[Callable[..., Any], ...]:
    """The processors of a call. Raises ValueError for one that may need the whole batch, or state: it sees one row."""
    for processor in given or ():
        name = type(processor).__name__
        theirs = type(processor).__module__.startswith("transformers.")
        if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor) or not (
            name in _OF_ROWS if theirs else getattr(processor, "supports_continuous_batching", False)
        ):
            way = "" if theirs else ", or set supports_continuous_batching = True in its class if it does"
            raise ValueError(
                f"generate: expected logits processors that treat each row by itself, found a {name}{WITHOUT}{way}"
            )
        setting = _OF_ROWS.get(name) if theirs else None
        if setting and getattr(config, setting) not in (None, 0, 1.0, False):
            raise ValueError(f"generate: expected a {name} or {setting}, found both; leave one of them out")
    return tuple(given or ())
