"""Which operators a stored step may call: those that have a rule, autopar's own, and what torch itself takes for the
mathematics of tensors: its core, pointwise operators and those that it can decompose, with their backwards.

Whoever writes a file of the cache decides which of them run when the step does. So none of them may read or write a
file, a device, or memory that is no operand's: they are functional, and take tensors and numbers alone.
"""

from __future__ import annotations

import functools
import re

from autopar.adapters.operators import (
    OpOverload,
    argument_types,
    is_mathematics,
    mutates,
    name_of,
    overloads_of,
    result_types,
    returns_alias,
)
from autopar.rules.core import CORE

SPACES = ("aten", "autopar")  # of operators whose meaning the versions of torch and autopar tell
_PLAIN = re.compile(r"((Optional|List)\[)*(Tensor|int|SymInt|float|bool|number|ScalarType|MemoryFormat)\]*")
_RESULT = re.compile(r"Tensor|List\[Tensor\]")


@functools.cache
def may_be_stored(op: OpOverload) -> bool:
    """Of an operator that torch has, whether a stored step may call it."""
    if op in CORE or name_of(op).startswith("autopar::"):
        return True
    return name_of(op).startswith("aten::") and _takes_tensors(op) and (_is_known(op) or _is_backward_of_known(op))


def _takes_tensors(op: OpOverload) -> bool:
    """Whether it computes tensors of tensors and numbers, and nothing else. A view that torch keeps for itself need
    not look whether it stays within its operand."""
    takes, gives = argument_types(op), result_types(op)
    plain = not mutates(op) and all(map(_PLAIN.fullmatch, takes)) and all(map(_RESULT.fullmatch, gives))
    private = name_of(op).startswith("aten::_") and returns_alias(op)
    return plain and not private and bool(gives) and any(map(_RESULT.fullmatch, takes))


def _is_known(op: OpOverload) -> bool:
    return op in CORE or is_mathematics(op)


def _is_backward_of_known(op: OpOverload) -> bool:
    """What a backward pass calls is a derivative of what the forward calls."""
    forward = name_of(op).partition("::")[2].removesuffix("_backward")
    return name_of(op).endswith("_backward") and any(map(_is_known, overloads_of(forward)))
