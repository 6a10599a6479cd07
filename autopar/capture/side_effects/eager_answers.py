"""What a forward asks of how it runs: it is told what it would be without autopar.

    if torch.compiler.is_compiling(): ...       False in a forward; torch and transformers see that an export goes on
    if torch.is_grad_enabled(): ...             that the forward has asked is noted: under no_grad it has another graph,
    if torch.is_inference_mode_enabled(): ...   and under inference_mode a third one
    if type(x) is torch.Tensor: ...             of a tensor that stands for one, too

Functions of Python may have been imported under any name, so their code is what is replaced. One of C is looked for
under its names in torch and in what is not torch.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.adapters.grad_mode import InferenceRegion, told_inference
from autopar.capture.branches.known_values import REAL
from autopar.capture.reads.code_names import names_in
from autopar.capture.reads.code_owners import USER, owner_of_function, owner_of_module
from autopar.capture.side_effects.function_watch import is_outside

_OF_COMPILERS = (
    ("torch.compiler", "is_compiling"),
    ("torch.compiler", "is_exporting"),
    ("torch._utils", "is_compiling"),
    ("torch._dynamo.external_utils", "is_compiling"),
    ("torch.fx._symbolic_trace", "is_fx_tracing"),
)
# transformers' own models compute the same either way, and keep tensors or look at values where nobody traces.
_TOLD, _PASSES_ON = "transformers.", "transformers.utils.import_utils"
_ASKED: dict[tuple[str, str], Callable[[], bool]] = {}  # (module, name) -> the function with its own code
_OF_GRAD_MODE = (torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_inference)


@contextmanager
def answered_as_eager() -> Iterator[None]:
    """Within: code that is neither torch's, transformers' nor ours is told that nobody compiles or exports."""
    functions: list[Any] = [getattr(sys.modules[m], name) for m, name in _OF_COMPILERS if m in sys.modules]
    codes = [function.__code__ for function in functions]
    for function, code in zip(functions, codes, strict=True):
        _ASKED[function.__globals__["__name__"], code.co_name] = types.FunctionType(code, function.__globals__)
        function.__code__ = _stand_in.__code__.replace(co_name=code.co_name)
    try:
        yield
    finally:
        for function, code in zip(functions, codes, strict=True):
            function.__code__ = code


def _stand_in() -> bool:  # runs with the global names of the function that it stands in for
    import sys

    from autopar.capture.side_effects.eager_answers import answer

    return answer(sys._getframe())


def answer(asked: FrameType) -> bool:
    """What a question, in its frame, is answered to who asks it."""
    frame = asked.f_back
    while frame is not None and frame.f_globals.get("__name__") == _PASSES_ON:
        frame = frame.f_back
    told = frame is None or not is_outside(frame) or frame.f_globals.get("__name__", "").startswith(_TOLD)
    return told and _ASKED[asked.f_globals["__name__"], asked.f_code.co_name]()


# --- the grad mode ------------------------------------------------------------------------------------


@contextmanager
def noticed_grad_mode(note: Callable[[], None], mode: str, note_tensor: Callable[[], None]) -> Iterator[None]:
    """Within: ``note`` is called when code that is neither torch's nor ours asks for the grad mode, which is answered
    as in ``mode``; ``note_tensor``, when it asks that of a tensor."""

    enabled, inference, _ = _OF_GRAD_MODE

    def is_grad_enabled() -> bool:
        if is_outside(sys._getframe(1)):
            note()
        return enabled()

    def is_inference_mode_enabled() -> bool:
        told = told_inference()
        if told is None or not is_outside(sys._getframe(1)):
            return inference()
        note()
        return told

    def is_inference(x: Tensor) -> bool:
        if is_outside(sys._getframe(1)):
            note_tensor()
        return x.is_inference()

    places = _names_of_grad_mode()
    answers = dict(zip(_OF_GRAD_MODE, (is_grad_enabled, is_inference_mode_enabled, is_inference), strict=True))
    for scope, name, function in places:
        scope[name] = answers[function]
    try:
        with InferenceRegion(mode == "inference"):
            yield
    finally:
        for scope, name, function in places:
            scope[name] = function


def _names_of_grad_mode() -> list[tuple[dict[str, Any], str, Callable[..., bool]]]:
    """(names of a module, the one by which it knows a function, the function). Modules that are as long as they were
    are known."""
    for key, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", {})
        if _LENGTHS.get(key) != len(names) and not key.startswith(("torch.", "autopar.")):
            _LENGTHS[key] = len(names)
            _HOLDERS[key] = [name for name, value in names.items() if _tells_grad_mode(value)]
    scopes = [(vars(sys.modules[key]), names) for key, names in _HOLDERS.items() if names and key in sys.modules]
    return [(scope, x, scope[x]) for scope, names in scopes for x in names if _tells_grad_mode(scope.get(x))]


def _tells_grad_mode(value: Any) -> bool:
    return any(value is function for function in _OF_GRAD_MODE)


_LENGTHS: dict[str, int] = {}
_HOLDERS: dict[str, list[str]] = {}


# --- type(x) ------------------------------------------------------------------------------------------


@contextmanager
def eager_types(model: nn.Module) -> Iterator[None]:
    """Within: in the user's files that the model's classes lead to, ``type`` of a tensor that stands for one is what
    it would be without autopar."""
    scopes = [scope for scope in _files_of(model) if "type" not in scope and _names_type(scope)]
    for scope in scopes:
        scope["type"] = _EagerType
    try:
        yield
    finally:
        for scope in scopes:
            scope.pop("type", None)


class _AsksEager(type):
    """Of a class that is used like ``type``."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Tensor) and type(args[0]) not in REAL and not kwargs:
            return nn.Parameter if isinstance(args[0], nn.Parameter) else Tensor
        return type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)


class _EagerType(type, metaclass=_AsksEager):
    """``type``, to the user's code."""


def _files_of(model: nn.Module) -> list[dict[str, Any]]:
    """The names of the user's files that classes of modules are of, and of those that these name."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    left = [f.__globals__ for cls in classes for f in vars(cls).values() if _is_users(f)]
    found: dict[int, dict[str, Any]] = {}
    while left:
        scope = left.pop()
        if id(scope) not in found:
            found[id(scope)] = scope
            values = list(scope.values())
            left += [f.__globals__ for f in values if _is_users(f)]
            left += [vars(x) for x in values if isinstance(x, types.ModuleType) and owner_of_module(x.__name__) == USER]
    return list(found.values())


def _is_users(x: Any) -> bool:
    return isinstance(x, types.FunctionType) and owner_of_function(x) == USER


def _names_type(scope: dict[str, Any]) -> bool:
    classes = [vars(x).values() for x in scope.values() if isinstance(x, type)]
    functions = (x for values in (scope.values(), *classes) for x in list(values) if isinstance(x, types.FunctionType))
    return any("type" in names_in(f.__code__).names for f in functions)
