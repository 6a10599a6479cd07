"""The arguments of a step, bound to the parameter names of the forward, and checks of their values.

model(x, target=t)   -->   {"x": x, "target": t}      in the order of the signature
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopar.adapters.keys import Same
from autopar.capture.trace.export import paths
from autopar.errors import refusal_like
from autopar.spelling import did_you_mean

CONSTANTS = (int, float, complex, bool, str, type(None), torch.device)
_MOST_NAMES = 8


def by_name(model: nn.Module, args: tuple[Any, ...], batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward by name, in the order of its signature; then those for its ``**kwargs``, in the order
    of the call, which the forward sees.

    Raises ValueError for unknown and for missing arguments.
    """
    taken = _taken(model.forward)
    if len(args) == 1 and not batch and _is_batch(args[0], taken):
        raise _mistake(
            f"batch: {_forward(model)} takes its arguments by name, found a {type(args[0]).__name__} of them; unpack "
            "it, as in model.train_step(**batch)"
        )
    if len(args) > len(taken.positional):
        raise _mistake(
            f"batch: {_forward(model)} takes {len(taken.positional)} positional arguments, found {len(args)}; pass "
            "them by name"
        )
    given = dict(zip(taken.positional, args, strict=False))
    twice = [name for name in given if name in batch]
    if twice:
        raise _mistake(f"batch: {_forward(model)} takes {twice[0]!r} once, found it by position and by name")
    given |= batch
    if not taken.any_name and not taken.names.keys() >= given.keys():
        unknown = next(name for name in given if name not in taken.names)
        raise _mistake(_unknown(model, unknown, taken.names.keys() - given.keys()))
    if missing := [p.name for p in taken.needed if p.name not in given and _by_name(model, p)]:
        found = ", ".join(given) or "nothing"
        raise _mistake(f"batch: {_forward(model)} needs {', '.join(missing)}, found {found}; pass it by name")
    return {name: given.pop(name) for name in taken.names if name in given} | given


def _mistake(text: str) -> ValueError:
    """An error for arguments for which Python raises a TypeError."""
    return refusal_like(TypeError(), text)


def _is_batch(value: Any, taken: _Taken) -> bool:
    """Whether this is a mapping of the forward's arguments, and not one argument that is a mapping."""
    return isinstance(value, Mapping) and len(value) > 0 and all(name in taken.names for name in value)


def misspelled(model: nn.Module, given: Iterable[str]) -> str:
    """A name that may be misspelled, given to a forward that takes any name, as the end of an error; or ''."""
    taken, found = _taken(model.forward), set(given)
    for name in found - taken.names.keys() if taken.any_name else ():
        if hint := did_you_mean(name, taken.names.keys() - found):
            return f" (the forward takes any name, found {name!r}{hint})"
    return ""


class _Taken(NamedTuple):
    """What a forward takes: positional names, all names in order, those without a default, and whether any other."""

    positional: tuple[str, ...]
    names: dict[str, None]
    needed: tuple[inspect.Parameter, ...]
    any_name: bool

    @classmethod
    def of(cls, parameters: Sequence[inspect.Parameter]) -> _Taken:
        positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        named = {p.name: None for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        needed = tuple(
            p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        )
        return cls(positional, named, needed, any(p.kind is p.VAR_KEYWORD for p in parameters))


def _taken(forward: Any) -> _Taken:
    """From the signature, cached by function: `inspect` takes longer than everything else before a step."""
    if isinstance(forward, types.MethodType) and isinstance(forward.__func__, types.FunctionType):
        found = _of_method(forward.__func__, _told_otherwise(forward.__func__))
        if found is not None:
            return found
    return _Taken.of(tuple(inspect.signature(forward).parameters.values()))


@functools.lru_cache(64)
def _of_method(function: types.FunctionType, _: Any) -> _Taken | None:
    """The signature without its first parameter, if that has a name."""
    own = tuple(inspect.signature(function).parameters.values())
    first = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return _Taken.of(own[1:]) if own and own[0].kind in first else None


def _told_otherwise(function: types.FunctionType) -> Any:
    said = function.__dict__
    found = (function.__code__, function.__defaults__, said.get("__wrapped__"), said.get("__signature__"))
    return (*map(Same, found), *(function.__kwdefaults__ or ()))


def _by_name(model: nn.Module, parameter: inspect.Parameter) -> bool:
    """Whether it is a named parameter, not ``*args`` or ``**kwargs``. Raises ValueError for a positional-only one."""
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise ValueError(
            f"batch: {_forward(model)} takes {parameter.name!r} by position only, needs all inputs by name; "
            "remove the / from the signature"
        )
    return parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def _unknown(model: nn.Module, name: str, free: set[str]) -> str:
    return f"batch: {_forward(model)} takes no {name!r}{did_you_mean(name, free) or '; leave it out'}"


def check_input_names(model: nn.Module, option: str, names: Iterable[str]) -> None:
    """Raises ValueError if an option names inputs that the forward does not take."""
    taken = _taken(model.forward)
    for name in () if taken.any_name else names:
        if name.partition(".")[0] not in taken.names:
            hint = did_you_mean(name, taken.names) or f"; name one of {', '.join(taken.names)}"
            raise ValueError(f"{option}: {_forward(model)} takes no {name!r}{hint}")


def _forward(model: nn.Module) -> str:
    """'Net.forward(x, target)'"""
    names = [str(p).partition(":")[0].partition("=")[0] for p in inspect.signature(model.forward).parameters.values()]
    more = ", ..." if len(names) > _MOST_NAMES else ""
    return f"{type(model).__name__}.forward({', '.join(names[:_MOST_NAMES])}{more})"


# --- values -----------------------------------------------------------------------------------------------


def check_values(batch: Mapping[str, Any], differentiated: bool, shapes_only: bool = False) -> None:
    """Raises ValueError for anything but tensors with values, and constants; with ``differentiated`` also for tensors
    that require a gradient, which only parameters get. ``shapes_only``: tensors on the meta device are accepted."""
    try:
        found = list(paths(batch))
    except RecursionError:
        raise ValueError("batch: needs finite nesting, found a list or dict that contains itself") from None
    for path, value in found:
        problem = _problem(value, differentiated, shapes_only) if isinstance(value, Tensor) else _of_constant(value)
        if problem:
            raise ValueError(f"batch: {path} {problem}")
    if len(dict(found)) < len(found):
        path, count = Counter(path for path, _ in found).most_common(1)[0]
        raise ValueError(f"batch: needs distinct names of values, found {path} {count} times; rename a key")


def _problem(x: Tensor, differentiated: bool, shapes_only: bool) -> str:
    """Why a tensor can't be an input, or ''."""
    if differentiated and x.requires_grad and torch.is_grad_enabled():
        return "requires a gradient, which only parameters get; pass x.detach(), or compute it inside the model"
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"needs to be a plain tensor, found a {type(x).__name__}; pass this rank's shard, such as x.to_local()"
    for kind, holds, way_out in (
        ("nested", x.is_nested, "x.to_padded_tensor(0)"),
        ("quantized", x.is_quantized, "x.dequantize()"),
        ("sparse", x.layout != torch.strided, "x.to_dense()"),
    ):
        if holds:
            return f"needs to be dense, found a {kind} tensor; pass {way_out}"
    if x.is_meta and not shapes_only:
        return "needs values, found a tensor on the meta device, which has none; build it on the CPU"
    return ""


def _of_constant(value: Any) -> str:
    if type(value) in CONSTANTS:
        return ""
    name = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
    numbers = "torch.as_tensor(x) of its numbers"
    way_out = numbers if hasattr(value, "__array__") else "its tensors in a dict, and set everything else on the model"
    return f"needs to be a tensor or a number, text or None, found a {name}; pass {way_out}"
