"""The dtypes that a policy (`autopar.precision`) gives a model: the stored and the used dtype of each parameter, and
the casts around its modules.

    dtypes = dtypes_of(model, policy, kept)      kept: what the model's library wants in float32, by substrings of names
    copy   = structure_copy(model, mode, dtypes.used)
    cast_around(copy, dtypes)                    inputs of the model, and inputs and outputs of kept modules

Casts of parameters are not in the copy: capture records the stored dtypes, and `cast_parameters` adds the casts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from autopar.adapters.quantized_weights import QuantizedLinear
from autopar.capture.trace.export import flatten, line_of, unflatten
from autopar.ops.traits import PRODUCTS
from autopar.precision import Precision

# they take half-precision inputs together with float32 weights, statistics or scales
_IN_FLOAT32 = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, QuantizedLinear)


@dataclass
class Dtypes:
    """stored, used: of parameters, by id. kept: path of a module -> what it computes in."""

    policy: Precision
    stored: dict[int, torch.dtype] = field(default_factory=dict)
    used: dict[int, torch.dtype] = field(default_factory=dict)
    kept: dict[str, torch.dtype] = field(default_factory=dict)


def torch_dtype(name: str) -> torch.dtype:
    """bfloat16 -> torch.bfloat16."""
    found: torch.dtype = getattr(torch, name)
    return found


def dtypes_of(model: nn.Module, policy: Precision, kept: Iterable[str] = ()) -> Dtypes:
    """The dtypes that a policy gives a model.

    Raises ValueError where it keeps modules that do not exist, or keeps one of several that share a parameter.
    """
    found = Dtypes(policy)
    if not policy.compute:
        return found
    inner = torch_dtype(policy.compute)
    found.kept = dict.fromkeys(_named(model, policy.keep), _kept_in(policy, torch.float32))
    by_library = re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in kept) or "$^")
    owners = {(f"{path}." if path else "") + name: m for path, m in model.named_modules() for name in m._parameters}
    names: dict[int, list[str]] = {}
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in tensors.items():
        names.setdefault(id(parameter), []).append(name)
    for name, parameter in tensors.items():
        if not parameter.is_floating_point():
            continue
        inside = [_is_within(n, found.kept) for n in names[id(parameter)]]
        if any(inside) and not all(inside):
            raise ValueError(
                f"precision: {' and '.join(names[id(parameter)])} are one parameter, and keep="
                f"{list(policy.keep)} names only some of the modules that use it; keep all or none of it"
            )
        asked = isinstance(owners.get(name), _IN_FLOAT32) or bool(by_library.search(name))
        stored = torch_dtype(policy.stored) if policy.stored else parameter.dtype
        if any(inside) or (asked and inner.itemsize < torch.float32.itemsize):
            found.stored[id(parameter)] = found.used[id(parameter)] = _kept_in(policy, stored)
        else:
            found.stored[id(parameter)], found.used[id(parameter)] = stored, inner
    return found


def _kept_in(policy: Precision, stored: torch.dtype) -> torch.dtype:
    """Float32, or the stored dtype if that is wider."""
    return torch.promote_types(torch_dtype(policy.stored) if policy.stored else stored, torch.float32)


def _named(model: nn.Module, keep: Iterable[str]) -> Iterator[str]:
    """Paths of modules that are named by path, by the end of their path, or by class; without those inside others."""
    seen: list[str] = []
    for name in keep:
        found = [
            path
            for path, m in model.named_modules()
            if path and (path == name or path.endswith(f".{name}") or type(m).__name__ == name)
        ]
        if not found:
            classes = sorted({type(m).__name__ for path, m in model.named_modules() if path})
            raise ValueError(
                f"precision: keep names no module of the model, found {name!r}; give a path, the end of one, or a "
                f"class: {', '.join(classes[:8])}"
            )
        for path in found:
            if not _is_within(f"{path}.", seen):
                seen.append(path)
                yield path


def _is_within(name: str, paths: Collection[str]) -> bool:
    return any(name.startswith(f"{path}.") for path in paths)


def cast_around(copy: nn.Module, dtypes: Dtypes) -> None:
    """Changes a structure copy: floating inputs are cast to the dtype that it computes in, inputs of kept modules to
    theirs, and their outputs back."""
    policy = dtypes.policy
    if not policy.compute:
        return
    inner = torch_dtype(policy.compute)
    for path, dtype in dtypes.kept.items():
        module = copy.get_submodule(path)
        module.forward = _between(module.forward, dtype, inner)
    copy.forward = _with_inputs(copy.forward, inner, policy.keep_inputs)


def _with_inputs(forward: Callable[..., Any], dtype: torch.dtype, left: Collection[str]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*_cast(args, dtype), **{n: x if n in left else _cast(x, dtype) for n, x in kwargs.items()})

    return run


def _between(forward: Callable[..., Any], inner: torch.dtype, outer: torch.dtype) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _cast(forward(*_cast(args, inner), **_cast(kwargs, inner)), outer)

    return run


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Floating tensors among nested values."""

    leaves, spec = flatten(values)
    return unflatten([x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves], spec)


def stored_by_name(model: nn.Module, dtypes: Dtypes) -> dict[str, torch.dtype]:
    """The stored dtype of parameters, by every name that they have."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: dtypes.stored[id(p)] for name, p in named if id(p) in dtypes.stored}


# --- dtypes of gradients -------------------------------------------------------------------------------


def summed_in(stored: torch.dtype, precision: Precision) -> torch.dtype:
    """The dtype in which gradients are reduced over ranks: without a policy that of their parameter, ``stored``."""
    return torch_dtype(precision.reduce) if precision.reduce and stored.is_floating_point else stored


def added_in(own: torch.dtype, stored: torch.dtype, precision: Precision) -> torch.dtype:
    """The dtype in which gradients are accumulated. ``own``: that of one microbatch's gradient."""
    found = torch.promote_types(own, summed_in(stored, precision))
    return torch.promote_types(found, torch.float32) if precision.compute else found


# --- dtypes that calls accept --------------------------------------------------------------------------

aten = torch.ops.aten

_SEVERAL_DTYPES = {
    torch.ops.autopar.grouped_mm.default, torch.ops.autopar.scaled_mm.default,
    torch.ops.autopar.scaled_grouped_mm.default,
}  # fmt: skip
# All floating operands have one dtype.
ONE_DTYPE = PRODUCTS - _SEVERAL_DTYPES | {aten.complex.default, aten.polar.default}
# So must these, except that half precision may be combined with float32 weights.
NORMS = {aten.layer_norm.default, aten.group_norm.default}
HALVES = (torch.bfloat16, torch.float16)


# Class-index losses, whose labels are int64 or uint8; floating targets are probabilities.
LABELLED = {aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default}
LABELS = (torch.int64, torch.uint8)


def check_dtypes(graph: Graph, names: Mapping[str, str]) -> None:
    """Raises ValueError for a product or norm of operands with several dtypes, and for labels of a dtype that torch's
    losses refuse. ``names``: of placeholders, as the user knows them."""
    for node in graph.nodes:
        if node.target in ONE_DTYPE or node.target in NORMS:
            operands = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor)]
            dtypes = {x.meta["val"].dtype for x in operands}
            mixed = node.target in NORMS and dtypes in [{half, torch.float32} for half in HALVES]
            if len(dtypes) > 1 and not mixed:
                raise ValueError(_differ(node, operands, names))
        elif node.target in LABELLED:
            _check_labels(node, names)


def _check_labels(node: Node, names: Mapping[str, str]) -> None:
    labels = node.args[1]
    assert isinstance(labels, Node)
    dtype = labels.meta["val"].dtype
    if not dtype.is_floating_point and dtype not in LABELS:
        raise ValueError(
            f"capture: {line_of(node)}: needs labels of int64, found {_origin(labels, names)} {_word(dtype)}; pass "
            "labels.long()"
        )


def _differ(node: Node, operands: list[Node], names: Mapping[str, str]) -> str:
    found = " and ".join(f"{_origin(x, names)} {_word(x.meta['val'].dtype)}" for x in operands)
    return (
        f"capture: {line_of(node)}: needs operands of one dtype, found {found}; give the input the dtype of the "
        "weights, or cast in the forward"
    )


def _origin(node: Node, names: Mapping[str, str]) -> str:
    """The name of the input or parameter that a value of this dtype comes from, or its own."""
    dtype, start = node.meta["val"].dtype, node
    while node.name not in names:
        same = [x for x in node.all_input_nodes if getattr(x.meta.get("val"), "dtype", None) == dtype]
        if not same:
            return start.name
        node = same[0]
    return names[node.name]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
