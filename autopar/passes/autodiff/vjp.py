"""The decomposition of an operator and of its derivative, traced once per way of calling it.

    mul(x[8, 4], w[4])        mul                    with a gradient like [8, 4]:  mul, mul, sum, view

A model calls few operators with few shapes many times, and a process compiles many graphs, so traces are cached. The
cache holds shapes and numbers of values, no tensors and no nodes. Its key is everything that an operator can see.
Operators of other libraries are traced each time, since they may read global state.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from autopar.adapters.operators import OpOverload, argument_defaults
from autopar.capture.trace.op_decomposition import CoreCall, Recorded, TensorMeta, Value, fake_of, record
from autopar.ir.graph import fake_mode, has_gradient, is_call
from autopar.ops.value_checks import CHECKED

_KNOWN: dict[Any, Recorded] = {}
SITE = 7_204_011_953_173  # placeholder for the site of any dropout
MOST = 20_000  # some tens of megabytes

# Two calls share a trace if all of this is equal.
PLAIN = (
    Value, int, float, complex, bool, str, type(None), slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def derivative(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    operands: Sequence[TensorMeta],
    needs: Sequence[bool],
    tangents: Sequence[TensorMeta | None] | None = None,
) -> Recorded:
    """See `autopar.capture.trace.op_decomposition.record`. Tensors in ``args`` and ``kwargs`` are replaced by a
    `Value`, the index of an operand."""
    place = _place_of_site(target)
    if place is None:
        return _found(target, args, kwargs, operands, needs, tangents)
    found = _found(target, (*args[:place], SITE, *args[place + 1 :]), kwargs, operands, needs, tangents)
    return replace(found, calls=tuple(_at_site(call, args[place]) for call in found.calls))


def _found(target: Any, args: Any, kwargs: Any, operands: Any, needs: Any, tangents: Any) -> Recorded:
    def run(*tensors: Any) -> Any:
        filled = map_aggregate((args, kwargs), lambda x: tensors[x.number] if isinstance(x, Value) else x)
        return target(*filled[0], **filled[1])

    if not _is_known_to_be_pure(target) or not _is_plain((args, kwargs)):
        return record(run, operands, needs, tangents, CHECKED)
    arriving = None if tangents is None else tuple(tangents)
    surroundings = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    key = target, repr((args, kwargs)), tuple(operands), tuple(needs), arriving, surroundings
    found = _KNOWN.get(key)
    if found is None:
        if len(_KNOWN) >= MOST:
            _KNOWN.clear()
        found = _KNOWN[key] = record(run, operands, needs, tangents, CHECKED)
    return found


def _is_known_to_be_pure(target: Any) -> bool:
    """True for torch's operators and ours. An operator of another library may read its own flags when traced."""
    if isinstance(target, OpOverload):
        return target.namespace in ("aten", "autopar")
    return str(getattr(target, "__module__", "")).partition(".")[0] == "autopar"


def _place_of_site(target: Any) -> int | None:
    """The argument of our operators that is the site of a dropout, unique to each call and only passed on."""
    if not isinstance(target, OpOverload) or target.namespace != "autopar":
        return None
    names = list(argument_defaults(target))
    return names.index("site") if "site" in names else None


def _at_site(call: CoreCall, site: int) -> CoreCall:
    return replace(call, args=map_aggregate(call.args, lambda x: site if isinstance(x, int) and x == SITE else x))


def marked(node: Node) -> tuple[tuple[Any, ...], dict[str, Any], list[Node]]:
    """(args, kwargs, operands) of a call, with the index of an operand in its place."""
    numbers: dict[Any, Any] = {}
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: numbers.setdefault(n, Value(len(numbers))))
    return args, kwargs, list(numbers)


def fake_result(node: Node) -> Any:
    """The result of a call on the fake values of its operands, from the cache where it has the call: the derivative of
    a local graph looks up the same entry."""
    if is_call(node, operator.getitem):
        return node.args[0].meta["val"][node.args[1]]  # type: ignore[union-attr]
    args, kwargs, operands = marked(node)
    likes = [TensorMeta.of(x.meta["val"]) for x in operands]
    found = derivative(node.target, args, kwargs, likes, [has_gradient(x) for x in operands])  # type: ignore[arg-type]
    mode = fake_mode(node.graph, operands)
    made = [like and fake_of(like, mode) for like in found.metas(found.results)]
    return tuple(made) if found.several else made[0]


def _is_plain(x: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return all(map(_is_plain, x))
    return all(map(_is_plain, x.values())) if isinstance(x, dict) else isinstance(x, PLAIN)


def forget() -> None:
    """Clear the cache: decompositions have changed."""
    _KNOWN.clear()
