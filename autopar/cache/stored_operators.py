"""Operators that a stored step may call: those with a sharding rule, autopar's own, and torch's tensor mathematics:
core and pointwise operators, those that torch can decompose, and their backwards.

A cache file chooses which of them run. So none of them may access files, devices or foreign memory: they are functional
and take only tensors and numbers.
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

SPACES = ("aten", "autopar")  # namespaces whose operators are identified by the versions of torch and autopar
_PLAIN = re.compile(r"((Optional|List)\[)*(Tensor|int|SymInt|float|bool|number|ScalarType|MemoryFormat)\]*")
_RESULT = re.compile(r"Tensor|List\[Tensor\]")


@functools.cache
def may_be_stored(op: OpOverload) -> bool:
    """Whether a stored step may call an operator."""
    if op in CORE or (name_of(op).startswith("autopar::") and not mutates(op)):
        return True
    return name_of(op).startswith("aten::") and _takes_tensors(op) and (_is_known(op) or _is_backward_of_known(op))


def _takes_tensors(op: OpOverload) -> bool:
    """Whether an operator only computes tensors from tensors and numbers. Private view operators are excluded: they
    may not check that a view stays within its operand."""
    takes, gives = argument_types(op), result_types(op)
    plain = not mutates(op) and all(map(_PLAIN.fullmatch, takes)) and all(map(_RESULT.fullmatch, gives))
    private = name_of(op).startswith("aten::_") and returns_alias(op)
    return plain and not private and bool(gives) and any(map(_RESULT.fullmatch, takes))


def _is_known(op: OpOverload) -> bool:
    return op in CORE or is_mathematics(op)


def _is_backward_of_known(op: OpOverload) -> bool:
    """Whether an operator is the backward of an allowed one."""
    forward = name_of(op).partition("::")[2].removesuffix("_backward")
    return name_of(op).endswith("_backward") and any(map(_is_known, overloads_of(forward)))
