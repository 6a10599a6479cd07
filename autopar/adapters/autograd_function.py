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
from dataclasses import dataclass
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
        return _captured(cls, *_bound(cls, args, kwargs))

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


def _has_setup(cls: Any) -> bool:
    return cls.setup_context is not Function.setup_context


def _bound(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments in order. As in torch, only a forward without ctx has keywords and defaults."""
    if not _has_setup(cls):
        if kwargs:
            raise TypeError(f"{cls.__qualname__}.apply() takes no keyword arguments")
        return args
    bound = inspect.signature(cls.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def _captured(cls: Any, *args: Any) -> Any:
    needs = [isinstance(x, Tensor) and x.requires_grad for x in args]
    ctx = _Ctx(needs)
    with torch.no_grad():
        if _has_setup(cls):
            result = cls.forward(*args)
            cls.setup_context(ctx, args, result)
        else:
            result = cls.forward(ctx, *args)
    if not any(needs):
        return result
    outs = [result] if isinstance(result, Tensor) else list(result)
    ends = [i for i, y in enumerate(outs) if _is_float(y) and id(y) not in ctx.without_gradient]
    inputs = [x for x, need in zip(args, needs) if need]
    leaves, spec = pytree.tree_flatten(vars(ctx))
    backward = _Backward(inspect.unwrap(cls.backward), leaves, spec, outs, ends)
    try:
        transposed = backward.transposed(inputs)
    except Exception as error:
        raise ValueError(
            f"the backward of the autograd function {cls.__qualname__} cannot be traced ({error}); write it with "
            "differentiable operators, or the whole function with torch.where and detach"
        ) from error
    found = transposed(backward.saved, [torch.zeros_like(outs[i]) for i in ends], inputs)
    for i, source in zip(ends, found):
        if source is not None:
            outs[i] = torch.ops.autopar.with_gradient_of(outs[i].detach(), source.to(outs[i].dtype))
    return outs[0] if isinstance(result, Tensor) else tuple(outs)


@dataclass
class _Backward:
    """The backward of one call. function: without the wrapper that forbids to differentiate it. leaves, spec: what its
    ctx holds, flat. outs: results of the forward; ends: which of them have a gradient."""

    function: Any
    leaves: list[Any]
    spec: Any
    outs: list[Any]
    ends: list[int]

    @property
    def saved(self) -> list[Tensor]:
        """The tensors of the ctx, cut off from their own gradients."""
        return [x.detach() for x in self.leaves if isinstance(x, Tensor)]

    def transposed(self, inputs: list[Tensor]) -> GraphModule:
        """(saved tensors, gradients of which only the shapes count, inputs) -> B' of the inputs, for each end."""
        with _disable_current_modes(), FakeTensorMode():
            saved = [_like(x) for x in self.leaves if isinstance(x, Tensor)]
            grads, values = [_like(self.outs[i]) for i in self.ends], [_like(x) for x in inputs]
            return make_fx(lambda s, g, v: self._transpose(s, g, v))(saved, grads, values)

    def _transpose(self, saved: list[Tensor], grads: list[Tensor], values: list[Tensor]) -> Sequence[Tensor | None]:
        ctx = self._ctx(saved)
        made = self._run(ctx, [g.requires_grad_() for g in grads])
        wanted = [x for x, need in zip(made, ctx.needs_input_grad) if need]
        pairs = [(x, v) for x, v in zip(wanted, values, strict=True) if x is not None and x.requires_grad]
        if not pairs:
            return [None for _ in grads]
        return torch.autograd.grad([x for x, _ in pairs], grads, [v.to(x.dtype) for x, v in pairs], allow_unused=True)

    def _ctx(self, saved: list[Tensor]) -> _Ctx:
        """As the forward left it, with other tensors."""
        tensors, ctx = iter(saved), _Ctx(())
        state = [next(tensors) if isinstance(x, Tensor) else x for x in self.leaves]
        vars(ctx).update(pytree.tree_unflatten(state, self.spec))
        return ctx

    def _run(self, ctx: _Ctx, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
        """The backward itself: a gradient for each argument of the forward."""
        given = dict(zip(self.ends, grads))
        ends = [given[i].clone() if i in given else self._nothing(y, ctx) for i, y in enumerate(self.outs)]
        with torch.enable_grad():
            made = self.function(ctx, *ends)
        return made if isinstance(made, tuple) else (made,)

    def _nothing(self, y: Any, ctx: _Ctx) -> Tensor | None:
        """What a backward gets for a result without gradient."""
        return torch.zeros_like(_like(y)) if isinstance(y, Tensor) and ctx.materialize_grads else None


def _is_float(y: Any) -> bool:
    return isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex())


def _like(x: Tensor) -> Tensor:
    return torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device)
