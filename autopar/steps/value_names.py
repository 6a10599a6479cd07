"""Names of the values of a step: a node's own name, or what a value is of another one.

h0              a value of the model, by its node's name
output:0        an output of the model, by its place
grad:h0         the gradient of h0; grad:output:0 that of an output
saved:relu      what F keeps for the backward
host:relu       the same, in host memory
stash:mm        what B keeps for W
sum:weight      what the earlier backwards of a step made of grad:weight, added up
"""

from __future__ import annotations

from typing import TypeGuard


def grad(name: str) -> str:
    """The gradient of a value."""
    return f"grad:{name}"


def saved(name: str) -> str:
    """What F keeps of a value."""
    return f"saved:{name}"


def on_host(name: str) -> str:
    """What F keeps of a value in host memory."""
    return f"host:{name}"


def stash(name: str) -> str:
    """What B keeps of a value."""
    return f"stash:{name}"


def earlier_sum(name: str) -> str:
    """The sum of a value's gradients so far."""
    return f"sum:{name}"


def output(place: int) -> str:
    """An output of the model, by its place."""
    return f"output:{place}"


def is_a(name: object, *kinds: str) -> TypeGuard[str]:
    """Whether this is the name of a value of one of ``kinds``: "grad", "saved", "host", "stash", "sum",
    "output"."""
    return isinstance(name, str) and ":" in name and name.partition(":")[0] in kinds


def of(name: str) -> str:
    """What it is the gradient, the saved value, ... of."""
    return name.partition(":")[2]


def output_place(name: str) -> int:
    """The place of an output."""
    return int(of(name))
