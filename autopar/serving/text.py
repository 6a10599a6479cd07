"""From tokens to text as they come: whole characters only, and no part of a stop string.

A tokenizer is a transformers tokenizer, or any object with ``decode(ids)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

_UNKNOWN = "\ufffd"  # what a tokenizer writes for bytes that are no whole character yet
_CONTEXT = 8  # tokens of the prompt to decode with: a token's text depends on those to its left
_LONGEST = 64  # tokens decoded together at most: bytes that never become a character are then given as they are


class Detokenizer:
    """Text of one request's tokens, as far as it is certain."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._options = {"skip_special_tokens": skip_special_tokens} if _takes_options(tokenizer) else {}
        self._ids = list(prompt[-_CONTEXT:])  # the context, and tokens whose text is not complete
        self._known = len(self._ids)  # how many of them are context
        self._given = 0  # characters given of the others

    def push(self, token: int) -> str:
        """The text that is certain once this token has come: all but the bytes of an unfinished character."""
        self._ids.append(token)
        text = self._text()
        whole = text.rstrip(_UNKNOWN)
        if whole == text or len(self._ids) - self._known > _LONGEST:
            self._ids, self._known, found = self._ids[self._known :], len(self._ids) - self._known, text[self._given :]
            self._given = 0
            return found
        found, self._given = whole[self._given :], max(self._given, len(whole))
        return found

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        found, self._given = self._text()[self._given :], len(self._text())
        return found

    def _text(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._known])) :]

    def _decode(self, ids: list[int]) -> str:
        found: str = self._tokenizer.decode(ids, **self._options) if ids else ""
        return found


def _takes_options(tokenizer: Any) -> bool:
    try:
        taken = inspect.signature(tokenizer.decode).parameters.values()
    except ValueError:  # a builtin without a signature
        return False
    return any(p.name == "skip_special_tokens" or p.kind is p.VAR_KEYWORD for p in taken)


class TextStream:
    """The text of one request up to its first stop string, of which no part is given.

    ``min_tokens``: before so many tokens a stop string ends nothing. ``prompt``: its last tokens are context. stopped:
    whether a stop string has come; further tokens have no text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokens = Detokenizer(tokenizer, prompt, skip_special_tokens)
        self._stop, self._min_tokens, self._count = stop, min_tokens, 0
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that is certain now."""
        self._count += 1
        return self._until_stop(self._tokens.push(token))

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        text = self._until_stop(self._tokens.finish()) + self._held
        self._held = ""
        return text

    def _until_stop(self, new: str) -> str:
        text, self._held = self._held + new, ""
        if self.stopped:
            return ""
        if self._count >= self._min_tokens:
            places = [at for stop in self._stop if (at := text.find(stop)) >= 0]
            if places:
                self.stopped = True
                return text[: min(places)]
            kept = max((_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - kept], text[len(text) - kept :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class StopStrings:
    """Whether the text of a request contains a stop string that ends in its last token: transformers' rule, by which a
    stop string may begin in the prompt, and special tokens are text."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], prompt: Sequence[int] = ()) -> None:
        self._stop, self._most = stop, max(map(len, stop))
        self._tokens = Detokenizer(tokenizer, prompt, skip_special_tokens=False)
        before = Detokenizer(tokenizer, (), skip_special_tokens=False)
        self._tail = "".join(before.push(token) for token in prompt[-self._most - _CONTEXT :])

    def __call__(self, token: int) -> bool:
        new = self._tokens.push(token)
        text = self._tail[len(self._tail) - self._most + 1 if len(self._tail) >= self._most else 0 :]
        start, text = len(text), text + new
        self._tail = text
        return any(text.find(stop, max(0, start - len(stop) + 1)) >= 0 for stop in self._stop)
