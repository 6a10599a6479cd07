"""How a checkpoint's tensors and a model's come from each other, where they are not the same.

Libraries keep the files of a model as they were when its code still had other names, and one tensor for each expert:
``experts.0.w1, experts.0.w3, experts.1.w1 ... -> experts.gate_up_proj``. Their adapters say so in recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

Making = Callable[[Sequence[Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class WeightConversion:
    """``sources``: names of what is there. ``target``: the name of what is made of them, of the first if there are
    several. ``make``: the sources' tensors, in order -> all that is made, by name; None if the one source only gets
    another name. ``words``: what it does, for messages."""

    sources: tuple[str, ...]
    target: str
    make: Making | None = None
    words: str = ""


def as_they_are(names: Sequence[str]) -> list[WeightConversion]:
    """Each tensor under its own name."""
    return [WeightConversion((name,), name) for name in names]
