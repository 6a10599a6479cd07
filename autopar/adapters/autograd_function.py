"""`torch.autograd.Function` in a captured model: its own backward, and not the derivative of its forward.

A graph of the forward alone would be differentiated as it stands: wrong for straight-through estimators, clipped
derivatives, whatever a backward says that the forward does not. A backward is a linear map B of the incoming gradient.
Its transpose B' is traced by differentiating B with respect to that gradient, and joins the graph where the function
is called:

    y = Function.apply(x)          y = with_gradient_of(forward(x), B'(x))       since   d(B' x) / dx  transposed = B

It is made of ordinary operators, which every pass knows. Of B'(x) only the backward, B itself, is left to run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def own_backwards() -> Iterator[None]:
    """Within: functions that are called are captured with their backward."""
    original = vars(Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch."):
            return original.__get__(None, cls)(*args, **kwargs)
        return _captured(cls, args)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]


class _Ctx:
    """What forward and backward see as ``ctx``."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self.materialize_grads = True
        self.without_gradient: list[int] = []

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.without_gradient = [id(x) for x in tensors]

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise ValueError("it writes into its inputs")


def _captured(cls: Any, args: tuple[Any, ...]) -> Any:
    needs = [isinstance(x, Tensor) and x.requires_grad for x in args]
    ctx = _Ctx(needs)
    with torch.no_grad():
        if cls.setup_context is Function.setup_context:
            result = cls.forward(ctx, *args)
        else:
            result = cls.forward(*args)
            cls.setup_context(ctx, args, result)
    outs = [result] if isinstance(result, Tensor) else list(result)
    if not any(needs):
        return result
    inputs = [x for x, need in zip(args, needs) if need]
    ends = [i for i, y in enumerate(outs) if isinstance(y, Tensor) and _is_differentiable(y, ctx)]
    leaves, spec = pytree.tree_flatten(vars(ctx))
    kept = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    try:
        transposed = _transposed(cls, ctx, leaves, spec, kept, outs, ends, inputs)
    except Exception as error:
        raise ValueError(
            f"the backward of the autograd function {cls.__qualname__} cannot be traced ({error}); write it with "
            "differentiable operators, or the whole function with torch.where and detach"
        ) from error
    zeros = [torch.zeros_like(outs[i]) for i in ends]
    found = transposed([leaves[i].detach() for i in kept], zeros, inputs)
    for i, source in zip(ends, found):
        if source is not None:
            outs[i] = torch.ops.autopar.with_gradient_of(outs[i].detach(), source.to(outs[i].dtype))
    return outs[0] if isinstance(result, Tensor) else tuple(outs)


def _is_differentiable(y: Tensor, ctx: _Ctx) -> bool:
    return (y.is_floating_point() or y.is_complex()) and id(y) not in ctx.without_gradient


def _transposed(
    cls: Any,
    ctx: _Ctx,
    leaves: list[Any],
    spec: Any,
    kept: list[int],
    outs: list[Any],
    ends: list[int],
    inputs: list[Tensor],
) -> GraphModule:
    """(saved tensors, gradients of which only the shapes count, inputs) -> B' of the inputs, for each of ``ends``."""
    backward = inspect.unwrap(cls.backward)  # once_differentiable forbids what is done here

    def run(saved: list[Tensor], grads: list[Tensor], values: list[Tensor]) -> tuple[Tensor | None, ...]:
        state = list(leaves)
        for i, x in zip(kept, saved):
            state[i] = x
        here = _Ctx(ctx.needs_input_grad)
        vars(here).update(pytree.tree_unflatten(state, spec))
        given: list[Any] = [torch.zeros_like(y) if ctx.materialize_grads and _floats(y) else None for y in like_outs]
        for i, g in zip(ends, grads):
            g.requires_grad_()
            given[i] = g.clone()  # backwards may write into it
        with torch.enable_grad():
            made = backward(here, *given)
        made = made if isinstance(made, tuple) else (made,)
        wanted = [x for x, need in zip(made, ctx.needs_input_grad) if need]
        pairs = [(x, v) for x, v in zip(wanted, values, strict=True) if x is not None and x.requires_grad]
        if not pairs:
            return tuple(None for _ in ends)
        return torch.autograd.grad([x for x, _ in pairs], grads, [v.to(x.dtype) for x, v in pairs], allow_unused=True)

    with _disable_current_modes(), FakeTensorMode():
        like_outs = [_like(y) if isinstance(y, Tensor) else y for y in outs]
        fakes = [[_like(x) for x in group] for group in ([leaves[i] for i in kept], [outs[i] for i in ends], inputs)]
        return make_fx(run)(*fakes)


def _floats(y: Any) -> bool:
    return isinstance(y, Tensor) and y.is_floating_point()


def _like(x: Tensor) -> Tensor:
    return torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device)
