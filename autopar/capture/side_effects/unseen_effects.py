"""Effects on autograd that no torch function shows: contexts that a forward enters, hooks on autograd nodes.

with torch.inference_mode(): ...            as under no_grad: its results have no gradient
with saved_tensors_hooks(pack, unpack): ... refused, except torch's own: the backward of a step would not call unpack
with a custom TorchDispatchMode: ...        refused: it sees operators below autograd, which are not those of the graph
h.grad_fn.register_hook(f)                  refused: a step has its own backward

They may be imported under any name, so methods of the classes are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import _HookMixin
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.adapters.grad_mode import InferenceRegion
from autopar.adapters.traced_threads import traced_by_this_thread

_OWN_BACKWARD = "a step has its own backward"


@contextmanager
def seen_effects(refuse: Callable[[str], None]) -> Iterator[None]:
    """Context manager: refuse or capture these effects while this thread traces. ``refuse`` raises."""
    traced, inference = traced_by_this_thread(), torch.inference_mode
    places: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (inference, "__enter__", _enter_inference_mode),
        (saved_tensors_hooks, "__enter__", lambda self: _check_hooks(self, refuse)),
        (TorchDispatchMode, "__enter__", lambda self: _check_mode(self, refuse)),
        (_HookMixin, "_register_hook", lambda *_: refuse(f"a hook on an autograd node would not be called: "
                                                         f"{_OWN_BACKWARD}; use an autograd.Function")),
    )  # fmt: skip
    originals = [vars(cls)[name] for cls, name, _ in places]
    for (cls, name, instead), original in zip(places, originals, strict=True):
        setattr(cls, name, _while(traced, instead, original))
    try:
        yield
    finally:
        for (cls, name, _), original in zip(places, originals, strict=True):
            setattr(cls, name, original)


def _while(traced: Callable[[], bool], instead: Callable[..., Any], original: Any) -> Any:
    """A method that calls ``instead`` while a forward is traced, and the original if that returns NotImplemented."""
    method = original.__func__ if isinstance(original, staticmethod) else original

    def called(*args: Any, **kwargs: Any) -> Any:
        made = instead(*args, **kwargs) if traced() else NotImplemented
        return method(*args, **kwargs) if made is NotImplemented else made

    return staticmethod(called) if isinstance(original, staticmethod) else called


def _enter_inference_mode(self: Any) -> None:
    """Enter a region without gradients; torch's own exit leaves it."""
    self._inference_mode_context = InferenceRegion(self.mode)


def _check_hooks(self: Any, refuse: Callable[[str], None]) -> Any:
    if type(self) is saved_tensors_hooks or not type(self).__module__.startswith("torch."):
        refuse(f"saved_tensors_hooks in the forward would not be called: {_OWN_BACKWARD}; use an autograd.Function")
    return NotImplemented


def _check_mode(self: Any, refuse: Callable[[str], None]) -> Any:
    cls = type(self)
    if not cls.__module__.startswith(("torch.", "autopar.")):
        refuse(
            f"the forward enters {cls.__qualname__}, a TorchDispatchMode, which sees operators below autograd instead "
            "of those of the graph; use a TorchFunctionMode"
        )
    return NotImplemented
