"""Names of repeated layers, joined: ['a.0.w', 'a.1.w', 'a.2.w'] -> 'a.{0..2}.w'."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def without_indices(name: str) -> str:
    """model.layers.3.mlp -> model.layers.*.mlp"""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def without_numbers(reason: str) -> str:
    """A reason without what differs between layers: names of nodes end in numbers, paths hold those of layers."""
    return re.sub(r"(?<=[_.])\d+\b", "*", reason)


def compressed(names: Sequence[str]) -> str:
    """['a.0.w', 'a.1.w', 'a.2.w'] -> 'a.{0..2}.w'. All names have the same parts but for their indices."""
    columns = list(zip(*(name.split(".") for name in names), strict=True))
    shown, combinations = [], 1
    for column in columns:
        distinct = list(dict.fromkeys(column))
        combinations *= len(distinct)
        shown.append(distinct[0] if len(distinct) == 1 else f"{{{_ranges(sorted(map(int, distinct)))}}}")
    text = ".".join(shown)
    return text if combinations == len(names) else f"{text} ({len(names)} of {combinations})"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0..2,5'"""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}..{r[-1]}" if len(r) > 2 else f"{r[0]},{r[1]}" for r in runs)


def modules_of(parameters: Iterable[str]) -> str:
    """The layers that parameters belong to: 'model.embed_tokens, model.layers.{0..3}'.

    A layer is the path up to the first index, or the module of a parameter outside of repeated blocks.
    """
    groups: dict[str, dict[str, None]] = {}
    for name in parameters:
        path = name.split(".")
        index = next((i + 1 for i, part in enumerate(path) if part.isdigit()), len(path) - 1)
        layer = ".".join(path[:index]) or name
        groups.setdefault(without_indices(layer), {})[layer] = None
    return ", ".join(compressed(list(layers)) for layers in groups.values())
