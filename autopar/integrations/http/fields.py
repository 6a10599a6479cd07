"""The fields of a request: their names, types and ranges. Anything else is refused by an error that names the field.

A field of OpenAI's API that is not supported is refused unless its value changes nothing; a name that nobody knows is
refused with the name that was probably meant. Fields that are those of `Sampling` are checked there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from openai.types import completion_create_params as _completions
from openai.types.chat import completion_create_params as _chat

from autopar.integrations.http.errors import ApiError
from autopar.serving.sampling_params import Sampling
from autopar.spelling import did_you_mean
from autopar.values import a_text, one_of, refuse, whole_number, yes_or_no

MOST_N = 128  # choices of a prompt, as in OpenAI's API
MOST_LOGPROBS = 20

Check = Callable[[str, Any], Any]  # (name, value) -> what is kept; raises ValueError


def _whole(least: int, most: int) -> Check:
    return lambda name, value: whole_number(name, value, least, most)


def _any(name: str, value: Any) -> Any:
    """Checked where it is read: by `Sampling` or `prompts`."""
    return value


def _top_k(name: str, value: Any) -> int:
    """vLLM writes -1 for all."""
    return max(whole_number(name, value, -1), 0)


def _bias(name: str, value: Any) -> dict[int, Any]:
    if not isinstance(value, Mapping) or not all(str(token).isdecimal() for token in value):
        raise refuse(name, 'numbers by token id, such as {"50256": -100}', value)
    return {int(token): bias for token, bias in value.items()}


def _stream_options(name: str, value: Any) -> bool:
    """Whether the usage is wanted."""
    if not isinstance(value, Mapping):
        raise refuse(name, 'an object such as {"include_usage": true}', value)
    known = ("include_usage", "include_obfuscation")
    if unknown := [key for key in value if key not in known]:
        raise ValueError(f"{name}: unknown field {unknown[0]!r}{did_you_mean(unknown[0], known[:1])}")
    return yes_or_no(f"{name}.include_usage", value.get("include_usage", False))


def _response_format(name: str, value: Any) -> Any:
    """None for text, else the JSON schema."""
    if not isinstance(value, Mapping):
        raise refuse(name, 'an object such as {"type": "json_object"}', value)
    kind = one_of(f"{name}.type", value.get("type"), ("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise refuse(f"{name}.json_schema.schema", "a JSON schema", schema)
    return schema


# Fields that are those of `Sampling`; the last six are not OpenAI's, but vLLM's.
SAMPLING: dict[str, Check] = {
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty", "stop"), _any),
    "max_tokens": _any,
    "seed": _whole(-(2**63), 2**63 - 1),
    "logit_bias": _bias,
    "top_k": _top_k,
    **dict.fromkeys(("min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"), _any),
}  # fmt: skip
_BOTH: dict[str, Check] = SAMPLING | {
    "model": a_text,
    "stream": yes_or_no,
    "stream_options": _stream_options,
    "n": _whole(1, MOST_N),
    "response_format": _response_format,
}
COMPLETIONS: dict[str, Check] = _BOTH | {"prompt": _any, "echo": yes_or_no, "logprobs": _whole(0, MOST_LOGPROBS)}
CHAT: dict[str, Check] = _BOTH | {
    "messages": _any,
    "max_completion_tokens": _any,
    "logprobs": yes_or_no,
    "top_logprobs": _whole(0, MOST_LOGPROBS),
}
# Names that OpenAI's clients may send.
_OPENAI = {
    "prompt": get_type_hints(_completions.CompletionCreateParamsBase),
    "messages": get_type_hints(_chat.CompletionCreateParamsBase),
}
# Fields that name things for a service's books, and values that ask for nothing beyond what is done anyway.
_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}


def read_fields(body: Any, checks: Mapping[str, Check]) -> dict[str, Any]:
    """The fields that a request gives, checked; null is as if left out. ``checks``: `COMPLETIONS` or `CHAT`. Raises
    ApiError."""
    if not isinstance(body, Mapping):
        raise ApiError(f"body: expected a JSON object, found a {type(body).__name__}")
    found = {}
    for name, value in body.items():
        if name not in checks:
            _refuse_unsupported(name, value, checks)
        elif value is not None:
            try:
                found[name] = checks[name](name, value)
            except ValueError as error:
                raise ApiError(str(error), param=name) from None
    return found


def _refuse_unsupported(name: str, value: Any, checks: Mapping[str, Check]) -> None:
    """Raises ApiError for a field that nobody knows, or that would change the answer."""
    known = {*checks, *_OPENAI["messages" if "messages" in checks else "prompt"]}
    if name not in known:
        hint = did_you_mean(name, known) or f"; the fields are {', '.join(sorted(checks))}"
        raise ApiError(f"{name}: unknown field{hint}", param=name, code="unknown_parameter")
    if value is None or name in _LABELS or value in _NEUTRAL.get(name, ()):
        return
    raise ApiError(
        f"{name}: not supported here, found {str(value)[:80]!r}; leave it out", param=name, code="unsupported_parameter"
    )


def make_sampling(given: Mapping[str, Any]) -> Sampling:
    """A `Sampling` of its fields by name. Raises ApiError that names the field."""
    try:
        return Sampling(**given)
    except ValueError as error:
        text = str(error).removeprefix("sampling.")
        raise ApiError(text, param=text.partition(":")[0]) from error
