"""From the prompt or the messages of a request to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.integrations.http.errors import ApiError

MOST_PROMPTS = 1024  # of one request
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def completion_prompts(prompt: Any, tokenizer: Any, vocabulary: int) -> list[list[int]]:
    """Token ids of each prompt of /v1/completions: a text, a list of texts, ids, or lists of ids. Raises ApiError."""
    one = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_id(prompt[0]))
    prompts = [prompt] if one else prompt
    if not isinstance(prompts, list) or not prompts or len(prompts) > MOST_PROMPTS:
        raise _refused(f"a text, token ids, or a list of at most {MOST_PROMPTS} of either", prompt)
    return [_ids_of(each, tokenizer, vocabulary) for each in prompts]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids_of(prompt: Any, tokenizer: Any, vocabulary: int) -> list[int]:
    if isinstance(prompt, str):
        found: list[int] = tokenizer(prompt)["input_ids"]
        if not found:
            raise _refused("at least one token", prompt)
        return found
    if not isinstance(prompt, list) or not prompt or not all(map(_is_id, prompt)):
        raise _refused("a text or a list of token ids, not empty", prompt)
    if wrong := [token for token in prompt if not 0 <= token < vocabulary]:
        raise _refused(f"token ids from 0 to {vocabulary - 1}", wrong[0])
    return prompt


def _refused(expected: str, found: Any) -> ApiError:
    return ApiError(f"prompt: expected {expected}, found {str(found)[:80]!r}", param="prompt")


def chat_prompt(messages: Any, tokenizer: Any) -> list[int]:
    """Token ids of a conversation, by the chat template of the tokenizer. Raises ApiError."""
    given = checked_messages(messages)
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(
            "messages: need a tokenizer with a chat template, found none in the model's folder; use /v1/completions, "
            "or put a chat_template.jinja into the folder",
            param="messages",
        )
    try:
        text = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything, for roles in an order that it does not take
        raise ApiError(f"messages: the chat template refuses them: {error}", param="messages") from error
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes those
    return found


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as chat templates take them: contents that are parts of text are joined. Raises ApiError."""
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages: expected a list with at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ApiError(f"{at}: expected an object with role and content, found {str(message)[:80]!r}", param=at)
    role = message.get("role")
    if role not in _ROLES:
        raise ApiError(f"{at}.role: expected one of {', '.join(_ROLES)}, found {str(role)[:80]!r}", param=f"{at}.role")
    content = message.get("content")
    if content is None and role != "assistant":
        raise ApiError(f"{at}.content: expected a text, found none", param=f"{at}.content")
    given = {name: value for name, value in message.items() if value is not None}
    return given | {"content": _text(content, f"{at}.content")}


def _text(content: Any, at: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ApiError(f"{at}: expected a text or a list of parts, found {str(content)[:80]!r}", param=at)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ApiError(f"{at}: only parts of type text are supported, found {str(kind)[:80]!r}", param=at)
    return "".join(part["text"] for part in content)
