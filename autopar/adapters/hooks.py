"""Private hook tables of tensors and modules: finding hooks, and running them.

Forward hooks of modules are Python code that is traced with the forward. What follows a backward is not: a step
differentiates a graph, no module is called, and gradients exist for parameters only.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

# attributes of a module that hold hooks
HOOKS_OF_MODULES = tuple(
    sorted(
        name
        for name, x in vars(nn.Module()).items()
        if isinstance(x, dict) and name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
    )
)


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether a leaf has gradient hooks."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def hooks_so_far() -> int:
    """Number of hooks registered in this process so far, on modules, tensors and autograd nodes. If it has not changed,
    no hook was registered."""
    return int(RemovableHandle.next_id)


class Observers:
    """`observed` for fixed leaves, cached while no hook is registered."""

    def __init__(self) -> None:
        self._leaves: list[int] = []
        self._hooks = -1  # as many were registered when nobody observed these leaves

    def of(self, leaves: Sequence[Tensor]) -> list[bool]:
        """See `observed`."""
        known, hooks = list(map(id, leaves)), hooks_so_far()
        if hooks == self._hooks and known == self._leaves:
            return [False] * len(leaves)
        found = observed(leaves)
        self._leaves, self._hooks = known, -1 if any(found) else hooks
        return found


class _Touch(torch.autograd.Function):
    """An autograd node with leaves of any type as inputs; computes nothing."""

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("never differentiated")


def _accumulators(leaves: Sequence[Tensor]) -> list[Any]:
    """The AccumulateGrad node of each leaf, created if there is none."""
    if not leaves:
        return []
    with torch.enable_grad():
        touched: Any = super(torch.autograd.Function, _Touch).apply(*leaves)  # no look at functorch
    return [node for node, _ in touched.grad_fn.next_functions]


def observed(leaves: Sequence[Tensor]) -> list[bool]:
    """Whether a leaf may have hooks, on itself or on its AccumulateGrad node. The hooks of a node cannot be counted,
    but registering one keeps the node alive, so a mark on it is still there at a second look. About 1 us per leaf."""
    if not all(map(_WANTS_GRADIENT, leaves)):
        return [x.requires_grad and observed([x])[0] for x in leaves]
    for marks in map(_MARKS, _accumulators(leaves)):
        marks[""] = True
    held = list(map(bool, map(_MARKS, _accumulators(leaves))))
    return [has_gradient_hooks(x) or again for x, again in zip(leaves, held, strict=True)]


_MARKS, _WANTS_GRADIENT = operator.attrgetter("metadata"), operator.attrgetter("requires_grad")


def forward_hooks(module: nn.Module) -> list[Any]:
    """Forward hooks of a module."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks."""
    return bool(forward_hooks(module))


def hooks_of_all() -> list[dict[int, Any]]:
    """The global dicts of forward hooks for all modules."""
    return [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]


def accumulate_gradient(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Accumulate into ``.grad`` of leaves as one backward does, with hooks, in torch's order."""
    with torch.enable_grad():
        torch.autograd.backward(parameters, gradients)


def skip_hooks_without_gradient(leaves: Sequence[Tensor]) -> None:
    """Call within the backward of a node: do not run hooks of leaves without a gradient from it, unless they get one
    from elsewhere. torch's engine calls hooks of every input of a node, with None."""
    for leaf in leaves:
        _call_with_gradient_only(leaf._backward_hooks)
        if leaf._post_accumulate_grad_hooks:
            Tensor.register_hook(leaf, _SkipOnce(leaf))


def _call_with_gradient_only(hooks: Any) -> None:
    for key, hook in [*(hooks or {}).items()]:
        if getattr(hook, "__module__", "") != torch.autograd.graph.__name__:  # multi-grad hooks count calls
            hooks[key] = _replaced_once(hooks, key, hook, lambda grad: grad is not None)


def _replaced_once(hooks: dict[int, Any], key: int, hook: Any, called: Callable[[Any], bool]) -> Callable[[Any], Any]:
    def once(given: Any) -> Any:
        if hooks.get(key) is once:
            hooks[key] = hook
        return hook(given) if called(given) else None

    return once


class _SkipOnce:
    """A pre-accumulation hook that suppresses post-accumulation hooks if there is no gradient."""

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = weakref.ref(leaf)

    def __call__(self, grad: Tensor | None) -> None:
        leaf: Any = self._leaf()
        for key, hook in [*leaf._backward_hooks.items()]:
            if hook is self:
                del leaf._backward_hooks[key]
        after = leaf._post_accumulate_grad_hooks or {}
        for key, hook in [*after.items()]:
            if grad is None:
                after[key] = _replaced_once(after, key, hook, lambda _: False)


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raises ValueError for the first hook of a model that a captured step would not call."""
    for where, what, way_out in _backward_hooks(model):
        raise ValueError(f"hooks: {where} has a {what}, which a captured step does not call; {way_out}")


def _backward_hooks(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    move = "remove it, and use an autograd.Function in the forward, or a hook on parameters of the parallelized model"
    if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        yield "torch.nn.modules.module", "backward hook for all modules", move
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            hook: Any = next(iter({**module._backward_hooks, **module._backward_pre_hooks}.values()))
            yield f"module {name or type(model).__name__}", f"backward hook ({_name(hook)})", move
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            move = "register it on the parameter of the same name of the parallelized model"
            yield f"parameter {name}", "gradient hook", move
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, node in zip(trained, _accumulators(list(trained.values()))):
        if any(isinstance(x, dict) and x for x in gc.get_referents(node)):  # hooks by id
            move = "register it on that of the same parameter of the parallelized model"
            yield f"parameter {name}", "hook on its AccumulateGrad node", move


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
