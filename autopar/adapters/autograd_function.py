"""`torch.autograd.Function` in a captured model: its own backward, and not the derivative of its forward.

A graph of the forward alone would be differentiated as it stands: wrong for straight-through estimators, clipped
derivatives, whatever a backward says that the forward does not. A backward is a function of the incoming gradients and
of saved values, so it is traced where the function is called, of a gradient that is not known yet (`ops.gradient`):

    y = Function.apply(x)     y0 = forward(x);  g = gradient_of(y0);  gx = backward(g)
                              y = with_backward(y0, g, own_backward([x], [gx], [g]))

It is made of ordinary operators, which every pass knows, whatever it computes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

ops = torch.ops.autopar


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

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """For derivatives in forward mode, which a training step has none of."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.without_gradient = [id(x) for x in tensors]

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise ValueError("it writes into its inputs")


def _bound(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments in order. As in torch, only a forward without ctx has keywords and defaults."""
    if not _has_setup(cls):
        if kwargs:
            raise TypeError(f"{cls.__qualname__}.apply() takes no keyword arguments")
        return args
    bound = inspect.signature(cls.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def _has_setup(cls: Any) -> bool:
    return cls.setup_context is not Function.setup_context


def _captured(cls: Any, *args: Any) -> Any:
    needs = [isinstance(x, Tensor) and x.requires_grad for x in args]
    ctx = _Ctx(needs)
    with torch.no_grad():
        if _has_setup(cls):
            result = cls.forward(*args)
            cls.setup_context(ctx, args, result)
        else:
            result = cls.forward(ctx, *args)
    if not (any(needs) and torch.is_grad_enabled()):
        return result
    results = [result] if isinstance(result, Tensor) else list(result)
    ends = [i for i, y in enumerate(results) if _is_float(y) and id(y) not in ctx.without_gradient]
    values = {i: results[i].detach() for i in ends}
    inputs = [x for x, need in zip(args, needs) if need]
    holes = {i: ops.gradient_of(values[i], inputs) for i in ends}
    gradients = _gradients(cls, ctx, args, results, holes)
    pairs = [(x, _like(g, x)) for x, g in zip(args, gradients) if g is not None]
    if pairs:
        taken, made = [x for x, _ in pairs], [g for _, g in pairs]
        token = ops.own_backward(taken, made, [*holes.values()], cls.__qualname__)
        values = {i: ops.with_backward(values[i], holes[i], token) for i in ends}
    results = [values.get(i, y) for i, y in enumerate(results)]
    return results[0] if isinstance(result, Tensor) else tuple(results)


def _gradients(
    cls: Any, ctx: _Ctx, args: Sequence[Any], results: Sequence[Any], holes: dict[int, Tensor]
) -> list[Tensor | None]:
    """What the backward gives for each argument that needs a gradient."""
    given = [holes[i].clone() if i in holes else _nothing(y, ctx) for i, y in enumerate(results)]
    with torch.no_grad(), _Watched(given):
        made = (cls.backward if cls.vjp is Function.vjp else cls.vjp)(ctx, *given)
    made = made if isinstance(made, tuple) else (made,)
    return [g if need else None for g, need in zip(made, ctx.needs_input_grad)]


def _like(gradient: Tensor, x: Tensor) -> Tensor:
    """As autograd takes it: of the input's shape and dtype."""
    gradient = gradient.detach()
    if gradient.shape != x.shape:
        gradient = gradient.sum_to_size(x.shape)
    return gradient.to(x.dtype)


class _Watched(TorchFunctionMode):
    def __init__(self, given):
        super().__init__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _nothing(y: Any, ctx: _Ctx) -> Tensor | None:
    """What a backward gets for a result without gradient."""
    return torch.zeros_like(y) if isinstance(y, Tensor) and ctx.materialize_grads else None


def _is_float(y: Any) -> bool:
    return isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex())
