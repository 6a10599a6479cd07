"""What torch keeps behind underscores about its operators: their type and their schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload

__all__ = ["OpOverload", "argument_defaults", "kernel_of", "makes_tensors", "mutates", "name_of", "returns_alias"]


def argument_defaults(op: OpOverload) -> dict[str, Any]:
    """Argument names in order, each with its default (None where there is none)."""
    return {arg.name: arg.default_value for arg in op._schema.arguments}


def name_of(op: OpOverload) -> str:
    """'autopar::all_reduce'"""
    return str(op._schema.name)


def mutates(op: Any) -> bool:
    """Whether a call target is an operator that writes to an argument."""
    return isinstance(op, OpOverload) and bool(op._schema.is_mutable)


def makes_tensors(op: OpOverload) -> bool:
    """Whether any result is a tensor (and not a number or a bool)."""
    return any("Tensor" in str(r.type) for r in op._schema.returns)


def returns_alias(op: OpOverload) -> bool:
    """Whether the schema says that a result shares storage with an argument."""
    return any(r.alias_info is not None for r in op._schema.returns)


def kernel_of(op: OpOverload) -> Callable[..., Any] | None:
    """The Python function behind a `torch.library.custom_op` that has one for all devices: calling it skips what the
    dispatcher does for autograd and tracing. None for any other operator."""
    definition = OPDEFS.get(name_of(op))
    if definition is None or set(definition._backend_fns) - {None}:
        return None
    return definition._init_fn
