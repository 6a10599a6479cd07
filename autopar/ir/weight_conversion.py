"""How checkpoint tensors map to a model's tensors, where they differ.

Libraries keep old checkpoint formats, with the names of older code and one tensor for each expert:
``experts.0.w1, experts.0.w3, experts.1.w1 ... -> experts.gate_up_proj``. Their adapters describe the mapping in
recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

Making = Callable[[Sequence[Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class WeightConversion:
    """``sources``: names of the given tensors. ``target``: the name of the result, of the first if there are several.
    ``make``: the sources' tensors, in order -> all results, by name; None for a mere renaming. ``words``: a description
    for messages."""

    sources: tuple[str, ...]
    target: str
    make: Making | None = None
    words: str = ""


def as_they_are(names: Sequence[str]) -> list[WeightConversion]:
    """Each tensor under its own name."""
    return [WeightConversion((name,), name) for name in names]
