"""Operators of torch: types, schemas, decompositions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

__all__ = [
    "OpOverload",
    "argument_defaults",
    "argument_types",
    "changes_form",
    "check_factorisation",
    "is_composite",
    "is_mathematics",
    "kernel_of",
    "makes_tensors",
    "mutates",
    "name_of",
    "overload_of",
    "overloads_of",
    "result_types",
    "decomposition_of",
    "returns_alias",
    "writes_to",
]


@functools.cache
def argument_defaults(op: OpOverload) -> Mapping[str, Any]:
    """Argument names in order, each with its default (None where there is none)."""
    return MappingProxyType({arg.name: arg.default_value for arg in op._schema.arguments})


def name_of(op: OpOverload) -> str:
    """'autopar::all_reduce'"""
    return str(op._schema.name)


def overload_of(op: OpOverload) -> str:
    """'Tensor' of aten.add.Tensor"""
    return str(op._overloadname)


def overloads_of(name: str) -> list[OpOverload]:
    """Those of an operator of aten."""
    packet = getattr(torch.ops.aten, name, None)
    return [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []


def argument_types(op: OpOverload) -> list[str]:
    """'Tensor', 'Optional[int]', 'List[int]' ..., as schemas name them."""
    return [str(argument.type) for argument in op._schema.arguments]


def result_types(op: OpOverload) -> list[str]:
    """Types of the results, as in schemas."""
    return [str(result.type) for result in op._schema.returns]


def is_mathematics(op: OpOverload) -> bool:
    """Whether an operator is in torch's core or pointwise, or has a decomposition."""
    return not {torch.Tag.core, torch.Tag.pointwise}.isdisjoint(op.tags) or op in decomposition_table


def mutates(op: Any) -> bool:
    """Whether a call target is an operator that writes to an argument."""
    return isinstance(op, OpOverload) and bool(op._schema.is_mutable)


@functools.cache
def _written(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """(index, name) of each argument that an operator writes to."""
    arguments = enumerate(op._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def writes_to(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a call of an operator writes to: tensors, or lists of them."""
    return [args[i] if i < len(args) else kwargs[name] for i, name in _written(op) if i < len(args) or name in kwargs]


def changes_form(op: OpOverload) -> bool:
    """Whether an operator changes the shape or storage of an argument."""
    return torch.Tag.inplace_view in op.tags


_REMOVED = {"cholesky"}  # 2.14: what torch.cholesky calls now is linalg_cholesky, which others have besides


def packet_named(namespace: str, name: str) -> Any:
    """All overloads of an operator: ``torch.ops.aten.silu``. None if this version does not have it."""
    room = getattr(torch.ops, namespace)
    return getattr(room, name, None) if name in _REMOVED else getattr(room, name)


def of_named_dims(op: OpOverload) -> bool:
    """Whether an overload takes named dims. torch 2.12 has such; a captured graph does not."""
    return re.search("names?(_|$)|Dimname", op._overloadname) is not None


def makes_tensors(op: OpOverload) -> bool:
    """Whether any result is a tensor (and not a number or a bool)."""
    return any("Tensor" in str(r.type) for r in op._schema.returns)


def returns_alias(op: OpOverload) -> bool:
    """Whether the schema says that a result shares storage with an argument."""
    return any(r.alias_info is not None for r in op._schema.returns)


def kernel_of(op: OpOverload) -> Callable[..., Any] | None:
    """The Python function of a `torch.library.custom_op` with one implementation for all devices, which can be called
    without the dispatcher. None for any other operator."""
    definition = OPDEFS.get(name_of(op))
    if definition is None or set(definition._backend_fns) - {None}:
        return None
    return definition._init_fn


def check_factorisation(info: Tensor, name: str, is_matrix: bool) -> None:
    """Raises torch.linalg.LinAlgError, in the words of the function ``name``, for a matrix whose info is not 0."""
    torch._linalg_check_errors(info, name, is_matrix=is_matrix)


def is_composite(op: Any) -> bool:
    """Whether an operator is composite on every device: multiply, movedim, take_along_dim."""
    if not isinstance(op, OpOverload):
        return False
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    return has_kernel


def decomposition_of(call: Node, fake_mode: Any) -> tuple[GraphModule, list[Node]]:
    """(decomposition of a composite operator as a graph, its tensor operands), if no part of it writes in place."""
    operands: list[Node] = []
    map_arg((call.args, call.kwargs), operands.append)
    operands = list(dict.fromkeys(operands))

    def run(*tensors: Any) -> Any:
        given = dict(zip(operands, tensors))
        args, kwargs = map_arg((call.args, call.kwargs), given.__getitem__)
        return call.target.decompose(*args, **kwargs)  # type: ignore[union-attr]

    values = [x.meta["val"] for x in operands]
    with torch.no_grad(), fake_mode:
        parts = make_fx(run)(*values)
        if any(mutates(part.target) for part in parts.graph.nodes):  # composite parts may write inside
            parts = make_fx(functionalize(parts, remove="mutations"))(*values)
    return parts, operands
