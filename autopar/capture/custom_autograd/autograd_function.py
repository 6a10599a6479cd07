"""`torch.autograd.Function` in a captured model: captured with its custom backward.

Differentiating a graph of the forward alone would be wrong for straight-through estimators, clipped gradients, and any
backward that is not the derivative of its forward. A backward is a function of the incoming gradients and of saved
values, so it is traced where the function is called, on a placeholder of the incoming gradient (`ops.gradient`):

    y = Function.apply(x)     y0 = forward(x);  g = gradient_of(y0);  gx = backward(g)
                              y = with_backward(y0, g, own_backward([x], [gx], [g]))

The traced backward consists of ordinary operators, so every pass can handle it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import CustomFunctionHigherOrderOperator
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from autopar.adapters.ac_regions import asked_for
from autopar.adapters.traced_threads import traced_by_this_thread
from autopar.capture.custom_autograd.every_apply import every_apply, plain_apply
from autopar.capture.custom_autograd.missing_gradients import none_is_zeros
from autopar.capture.custom_autograd.opaque import OpaqueError, opaque
from autopar.capture.reads.code_owners import is_ours

ops = torch.ops.autopar


@contextlib.contextmanager
def captured_backwards() -> Iterator[None]:
    """Context manager: autograd functions that this thread calls while tracing are captured with their backward.

    Every ``apply``, under any name, reaches C's function (`every_apply`) or functorch.
    """
    traced = traced_by_this_thread()
    transformed: Any = CustomFunctionHigherOrderOperator

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Internal functions of torch's operators are not captured.
        if cls.__module__.startswith("torch._") or torch._C._are_functorch_transforms_active() or not traced():
            return plain_apply(cls, *args, **kwargs)
        if cls is CheckpointFunction:
            return _run_checkpointed(*args)
        return _traced_or_called(cls, *_bound(cls, args, kwargs))

    call = transformed.__call__

    def refused(self: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._are_functorch_transforms_active() and traced():
            raise ValueError(
                f"the autograd function {cls.__qualname__} is called under a torch.func transform (vmap), where its "
                "backward cannot be captured; call it on the batch without vmap"
            )
        return call(self, cls, *args, **kwargs)

    transformed.__call__ = refused
    try:
        with every_apply(apply):
            yield
    finally:
        transformed.__call__ = call


def _run_checkpointed(function: Any, preserve: bool, *args: Any) -> Any:
    """Run the function of a reentrant activation checkpoint. As in torch, nothing within it has a gradient if no
    argument has one."""
    if any(isinstance(x, Tensor) and x.requires_grad for x in args):
        with asked_for():
            return function(*args)
    with torch.no_grad():
        return function(*args)


class _CheckpointError(ValueError):
    """A backward that runs another backward, as custom activation checkpointing does."""


def _check_no_checkpoint(cls: Any) -> None:
    code = getattr(cls.backward, "__code__", None)
    if code is not None and {"autograd", "backward"} <= {*code.co_names}:
        raise _CheckpointError(
            f"the autograd function {cls.__qualname__} calls torch.autograd.backward in its backward, as custom "
            "activation checkpointing does, which adds to .grad of parameters instead of returning gradients and "
            "cannot be captured; use torch.utils.checkpoint.checkpoint instead"
        )


class _Ctx:
    """The ``ctx`` of forward and backward."""

    def __init__(self, needs: Sequence[bool], name: str) -> None:
        self.name_of_function = name
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self.materialize_grads = True
        self.without_gradient: list[int] = []

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """For forward-mode derivatives, which a training step does not use."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.without_gradient = [id(x) for x in tensors]

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise ValueError(
            f"the autograd function {self.name_of_function} writes to its inputs in place (mark_dirty); return a new "
            "tensor instead"
        )


def _bound(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments in order. As in torch, only a forward without ctx takes keyword arguments and defaults."""
    if not _has_setup(cls):
        if kwargs:
            raise TypeError(f"{cls.__qualname__}.apply() takes no keyword arguments")
        return args
    bound = inspect.signature(cls.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def _has_setup(cls: Any) -> bool:
    return cls.setup_context is not Function.setup_context


class _UntraceableError(Exception):
    """A function that does not run on fake tensors."""


def _traced_or_called(cls: Any, *args: Any) -> Any:
    """A function, traced with its backward, or called as one operator if it does not run on fake tensors."""
    _check_no_checkpoint(cls)
    last = _last_node()
    try:
        return _captured(cls, *args)
    except _UntraceableError as error:
        why = error.__cause__
    _erase_after(last)
    needs = [isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled() for x in args]
    try:
        return opaque(cls, args, needs, lambda needs: _Ctx(needs, cls.__qualname__))
    except OpaqueError as error:
        raise ValueError(
            f"the autograd function {cls.__qualname__} can neither be traced ({_first_line(why)}) nor be called as one "
            f"operator: {error}; write it with torch operators, or as a torch.library.custom_op with register_fake"
        ) from error


def _first_line(error: BaseException | None) -> str:
    return next((x.strip() for x in str(error).splitlines() if x.strip()), type(error).__name__)


def _last_node() -> Any:
    mode: Any = get_proxy_mode()
    return mode.tracer.graph._root._prev if mode is not None else None


def _erase_after(last: Any) -> None:
    """Remove the calls of a function that could not be traced."""
    while last is not None and (node := _last_node()) is not last:
        node.graph.erase_node(node)


def _captured(cls: Any, *args: Any) -> Any:
    needs = [isinstance(x, Tensor) and x.requires_grad for x in args]
    ctx = _Ctx(needs, cls.__qualname__)
    try:
        with torch.no_grad():
            if _has_setup(cls):
                result = cls.forward(*args)
                cls.setup_context(ctx, args, result)
            else:
                result = cls.forward(ctx, *args)
    except ValueError as error:
        if is_ours_error(error):
            raise
        raise _UntraceableError from error
    except Exception as error:
        raise _UntraceableError from error
    if not (any(needs) and torch.is_grad_enabled()):
        return result
    found = result if isinstance(result, tuple) else (result,)
    ends = [i for i, y in enumerate(found) if _is_float(y) and id(y) not in ctx.without_gradient]
    results = [y.detach() if _is_float(y) else y for y in found]
    inputs = [x for x, need in zip(args, needs) if need]
    incoming = {i: ops.gradient_of(results[i], inputs) for i in ends}
    pairs = _pairs(cls, ctx, args, results, incoming)
    if pairs:
        taken, made = [x for x, _ in pairs], [g for _, g in pairs]
        given = [incoming[i].clone() if i in incoming else None for i in range(len(results))]
        zeros = ctx.materialize_grads or none_is_zeros(_again(cls, ctx), vars(ctx), given, ends)
        token = ops.own_backward(taken, made, [*incoming.values()], cls.__qualname__, zeros)
        results = [ops.with_backward(y, incoming[i], token) if i in incoming else y for i, y in enumerate(results)]
    return tuple(results) if isinstance(result, tuple) else results[0]


def _pairs(
    cls: Any, ctx: _Ctx, args: Sequence[Any], results: Sequence[Any], incoming: dict[int, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """(argument, its gradient) of all arguments that get one."""
    given = [incoming[i].clone() if i in incoming else _no_gradient(y, ctx) for i, y in enumerate(results)]
    try:
        made = _run(cls, ctx, given)
        if len(made) < len(args) or any(g is not None for g in made[len(args) :]):
            raise ValueError(f"it returns {len(made)} gradients for {len(args)} inputs")
        needed = zip(args, made, ctx.needs_input_grad)
        return [(x, _like(g, x)) for x, g, need in needed if need and g is not None]
    except Exception as error:
        if not is_ours_error(error):
            raise _UntraceableError from error
        raise ValueError(
            f"the backward of the autograd function {cls.__qualname__} cannot be traced ({error}); write it with torch "
            "operators on its gradients and saved tensors, without branches on their values"
        ) from error


def _run(cls: Any, ctx: _Ctx, given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Run the backward: one gradient for each argument of the forward."""
    watch = _ValueWatch(given)
    with torch.no_grad():
        with watch:
            made = _backward_of(cls)(ctx, *given)
        watch.check()
    return made if isinstance(made, tuple) else (made,)


def _backward_of(cls: Any) -> Any:
    return cls.backward if cls.vjp is Function.vjp else cls.vjp


def _again(cls: Any, ctx: _Ctx) -> Any:
    """The backward as a function of the attributes of its ctx and of the gradients."""

    def run(state: Mapping[str, Any], given: Sequence[Tensor | None]) -> tuple[Any, ...]:
        other = copy.copy(ctx)
        vars(other).update(state)
        made = _backward_of(cls)(other, *given)
        return made if isinstance(made, tuple) else (made,)

    return run


def _like(gradient: Any, x: Tensor) -> Tensor:
    """The gradient as autograd converts it: to the shape and dtype of the input."""
    if not isinstance(gradient, Tensor):
        raise ValueError(f"it returns a {type(gradient).__name__} where a tensor or None is expected")
    gradient = gradient.detach()
    if gradient.shape != x.shape:
        gradient = gradient.sum_to_size(x.shape)
    return gradient.to(x.dtype)


_READS_VALUES = {getattr(Tensor, name) for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__")}


class _ValueWatch(TorchFunctionMode):
    """Checks a backward: it must not read values, nor write to tensors that it did not create."""

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.made: dict[int, Any] = {id(x): x for x in given}
        self.seen: dict[int, tuple[Tensor, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS_VALUES:
            raise ValueError(f"{func.__name__} reads a value, which depends on the gradient or the batch")
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and id(x) not in self.made:
                self.seen.setdefault(id(x), (x, x._version))
        result = func(*args, **(kwargs or {}))
        self.made |= {id(x): x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and id(x) not in self.seen}
        return result

    def check(self) -> None:
        """Raises ValueError for a write to a tensor from outside: the forward would see it."""
        for x, version in self.seen.values():
            if x._version != version:
                raise ValueError(
                    f"it writes to a tensor of shape {list(x.shape)} that it did not create; clone it first"
                )


def _no_gradient(y: Any, ctx: _Ctx) -> Tensor | None:
    """The incoming gradient of a result without gradient: zeros, or None."""
    return torch.zeros_like(y) if isinstance(y, Tensor) and ctx.materialize_grads else None


def is_ours_error(error: BaseException) -> bool:
    """Whether autopar has raised an error, or what it was raised from."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if isinstance(error, ValueError) and trace is not None and is_ours(trace.tb_frame.f_code.co_filename):
            return True
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return False


def _is_float(y: Any) -> bool:
    return isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex())
