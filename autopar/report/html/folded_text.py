"""Texts of graphs, short enough for a page: of repeated layers the first, and no more than so many characters.

linear: ...      # model.layers.0.mlp        linear: ...      # model.layers.0.mlp
linear_1: ...    # model.layers.1.mlp   -->  ... 2 lines of layers like these
linear_2: ...    # model.layers.2.mlp
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# The layer of a line: in the module's path behind the last comment, or in the name of a parameter's placeholder.
_PATH = re.compile(r"(?:^|[\s;])([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\.(\d+)(?=\.|$)")
_NAME = re.compile(r"^[-+ ]?((?:[a-z]\w*?)_)(\d+)_\w+: .*= (?:input|parameter|buffer)\b")


def folded(text: str, most: int) -> str:
    """The text without the lines of further layers, cut behind ``most`` characters; it says what is left out."""
    lines = text.splitlines()
    layers = [_layer(line) for line in lines]
    first: dict[str, int] = {}
    for layer in filter(None, layers):
        first[layer[0]] = min(first.get(layer[0], layer[1]), layer[1])
    kept = [layer is None or layer[1] == first[layer[0]] for layer in layers]
    short = list(_joined(lines, kept))
    return "\n".join(_without_empty_hunks(_cut(short, most)))


def _layer(line: str) -> tuple[str, int] | None:
    """(what is repeated, number)"""
    _, mark, note = line.rpartition("  # ")
    found = _PATH.search(note) if mark else _NAME.match(line)
    return (found[1], int(found[2])) if found else None


def _joined(lines: Iterable[str], kept: Iterable[bool]) -> Iterator[str]:
    left = 0
    for line, keep in zip(lines, kept, strict=True):
        if not keep:
            left += 1
            continue
        if left:
            yield f"... {left:,} lines of layers like these"
        left = 0
        yield line
    if left:
        yield f"... {left:,} lines of layers like these"


def _cut(lines: list[str], most: int) -> list[str]:
    room = most
    for i, line in enumerate(lines):
        room -= len(line) + 1
        if room < 0:
            return [*lines[:i], f"... {len(lines) - i:,} more lines"]
    return lines


def _without_empty_hunks(lines: list[str]) -> Iterator[str]:
    """Of a diff: no heads of parts of which no line is left."""
    for line, after in zip(lines, [*lines[1:], "@@"], strict=True):
        if not (line.startswith("@@") and after.startswith("@@")):
            yield line
