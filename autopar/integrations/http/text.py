"""From tokens to text as they come: whole characters only, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNKNOWN = "\ufffd"  # what a tokenizer writes for bytes that are no whole character yet


class TextStream:
    """The text of one request. ``min_tokens``: before so many, stop strings end nothing."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._tokenizer, self._stop, self._min_tokens = tokenizer, stop, min_tokens
        self._ids: list[int] = []
        self._first, self._read = 0, 0  # tokens before _read have become text; decoding starts at _first
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False  # by a stop string

    def push(self, token: int) -> str:
        """Text that is certain now."""
        self._ids.append(token)
        text = self._decode(self._first, len(self._ids))
        if text.endswith(_UNKNOWN):
            return ""
        return self._found(text)

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        if self.stopped:
            return ""
        text = self._found(self._decode(self._first, len(self._ids)))
        text, self._held = text + self._held, ""
        return text

    def _found(self, text: str) -> str:
        # Text of the tokens behind _read: decoded with some before it, since a token's text depends on its left.
        new = text[len(self._decode(self._first, self._read)) :]
        self._first, self._read = self._read, len(self._ids)
        text, self._held = self._held + new, ""
        if len(self._ids) < self._min_tokens or not self._stop:
            return text
        places = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if places:
            self.stopped = True
            return text[: min(places)]
        kept = max(_overlap(text, stop) for stop in self._stop)
        if kept:
            text, self._held = text[:-kept], text[-kept:]
        return text

    def _decode(self, first: int, last: int) -> str:
        found: str = self._tokenizer.decode(self._ids[first:last], skip_special_tokens=True)
        return found


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
