"""Operators of others without a fake: shapes of results come from a run on random tensors of the same shapes.

@torch.library.custom_op("mine::scan", mutates_args=())         a fake of `torch.library` is registered for the
def scan(x): ...                                                operator when a forward calls it
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._library import custom_ops, simple_registry
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.adapters.dispatch import has_kernel, without_modes
from autopar.capture.custom_autograd.opaque import MOST_ELEMENTS, example

_BUILT_IN = ("aten", "prims", "autopar", "autopar_functions", "_c10d_functional", "c10d", "prim", "higher_order")
_COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
_AUTOGRAD = ("Autograd", "AutogradCPU", "AutogradCUDA")
_SEEN: set[str] = set()


def with_fake(function: Any, args: Any, kwargs: Any) -> None:
    """Register a fake for an operator that is about to be called, if it has none, and for those of its backward."""
    if isinstance(function, OpOverloadPacket):
        for name in function.overloads():
            with_fake(getattr(function, name), args, kwargs)
    if not isinstance(function, OpOverload) or function.namespace in _BUILT_IN or function.name() in _SEEN:
        return
    _SEEN.add(function.name())
    if function._schema.is_mutable:
        return
    if not _has_fake(function):
        _register(function)
    if any(has_kernel(function.name(), key) for key in _AUTOGRAD):
        _try_backward(function, args, kwargs)


def _register(function: OpOverload) -> None:
    definition, fake = custom_ops.OPDEFS.get(function.name()), _fake_of(function)
    if definition is not None:
        definition.register_fake(fake)
    else:
        torch.library.register_fake(function.name().removesuffix(".default"), fake)


class _Calls(TorchDispatchMode):
    """Registers fakes of operators that are called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with_fake(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _try_backward(op: OpOverload, args: Any, kwargs: Any) -> None:
    """Run an operator and its backward on random tensors."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if sum(x.numel() for x in tensors) > MOST_ELEMENTS:
        return
    wanted = {id(x) for x in tensors if x.is_floating_point()}
    with without_modes(), torch.random.fork_rng(devices=[]), contextlib.suppress(Exception), torch.enable_grad():
        given = pytree.tree_map_only(Tensor, lambda x: example(x).requires_grad_(id(x) in wanted), (args, kwargs))
        for move in _places():
            with contextlib.suppress(Exception):
                moved, named = pytree.tree_map_only(Tensor, move, given)
                made = [y for y in pytree.tree_leaves(op(*moved, **named)) if isinstance(y, Tensor) and y.requires_grad]
                with _Calls():
                    torch.autograd.backward(made, [torch.ones_like(y) for y in made])
                return


def _has_fake(op: OpOverload) -> bool:
    definition = custom_ops.OPDEFS.get(op.name())
    if definition is not None:
        return definition._abstract_fn is not None
    entry = simple_registry.singleton._data.get(op.name().removesuffix(".default"))
    known = entry is not None and entry.fake_impl.kernel is not None
    return known or has_kernel(op.name(), "Meta") or any(has_kernel(op.name(), key) for key in _COMPOSITE)


def _fake_of(op: OpOverload) -> Any:
    shapes: dict[Any, Any] = {}

    def fake(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        key = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
        if key not in shapes:
            if sum(x.numel() for x in tensors) > MOST_ELEMENTS:
                raise ValueError(
                    f"{op} has no fake, and its inputs are too large to find shapes by a run; register one"
                )
            with without_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
                shapes[key] = pytree.tree_map_only(Tensor, _shape, _run(op, args, kwargs))
        return pytree.tree_map_only(_Shape, lambda x: tensors[0].new_empty(x.sizes, dtype=x.dtype), shapes[key])

    return fake


class _Shape:
    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        self.sizes, self.dtype = sizes, dtype


def _shape(x: Tensor) -> _Shape:
    return _Shape(tuple(x.shape), x.dtype)


def _run(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """A run on the CPU; on the GPU for an operator that needs one."""
    args, kwargs = pytree.tree_map_only(Tensor, example, (args, kwargs))
    for move in _places():
        with contextlib.suppress(Exception):
            moved, named = pytree.tree_map_only(Tensor, move, (args, kwargs))
            return op(*moved, **named)
    return op(*args, **kwargs)


def _places() -> Iterator[Any]:
    yield lambda x: x
    if torch.cuda.is_available():
        yield lambda x: x.cuda()
