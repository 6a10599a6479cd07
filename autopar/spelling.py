"""Suggestions for misspelled names, for the end of an error. This module does not import torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def closest(given: Any, known: Iterable[Any], meant: Mapping[str, Any] | None = None) -> Any:
    """The known value that was probably meant, or None: one with the same text, one that ``meant`` maps the name to,
    one with a similar spelling, or the only one that shares a word with it (zero_stage: zero)."""
    by_text = {_plain(value): value for value in known}
    text = _plain(given)
    if text in by_text:
        return by_text[text]
    if meant and text in meant:
        return meant[text]
    alike = difflib.get_close_matches(text, by_text, n=1)
    short = difflib.get_close_matches(text, by_text, n=2, cutoff=0.5) if len(text) < 4 else []  # dq: dp, but not xp
    if alike or len(short) == 1:
        return by_text[(alike or short)[0]]
    words = set(text.split("_"))
    sharing = [value for name, value in by_text.items() if words & set(name.split("_"))]
    return sharing[0] if len(sharing) == 1 else None


def _plain(value: Any) -> str:
    return str(value).strip().lower().replace("-", "_")


def did_you_mean(given: Any, known: Iterable[Any], meant: Mapping[str, Any] | None = None) -> str:
    """'; did you mean 'tp'?', the end of an error, or ''."""
    found = closest(given, known, meant)
    return "" if found is None else f"; did you mean {found!r}?"
