"""Questions of a forward about how it runs, answered as in eager mode.

    if torch.compiler.is_compiling(): ...       False in a forward; torch and transformers see that they are exported
    if torch.is_grad_enabled(): ...             noted: the forward then has another graph under no_grad,
    if torch.is_inference_mode_enabled(): ...   and a third one under inference_mode
    if type(x) is torch.Tensor: ...             True for a fake tensor, too

Python functions may have been imported under any name, so their code objects are replaced. C functions are replaced
under all their names in modules.
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

from autopar.adapters.grad_mode import InferenceRegion, seen_inference
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
# Models of transformers compute the same either way, but store tensors or read values if they are not traced.
_TOLD, _PASSES_ON = "transformers.", "transformers.utils.import_utils"
_ASKED: dict[tuple[str, str], Callable[[], bool]] = {}  # (module, name) -> the function with its original code
_OF_GRAD_MODE = (torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_inference)


@contextmanager
def answered_as_eager() -> Iterator[None]:
    """Context manager: code outside of torch, transformers and autopar sees no compilation or export."""
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
    """The answer for the caller of a replaced function; ``asked``: the frame of the function."""
    frame = asked.f_back
    while frame is not None and frame.f_globals.get("__name__") == _PASSES_ON:
        frame = frame.f_back
    sees_export = frame is None or not is_outside(frame) or frame.f_globals.get("__name__", "").startswith(_TOLD)
    return sees_export and _ASKED[asked.f_globals["__name__"], asked.f_code.co_name]()


# --- the grad mode ------------------------------------------------------------------------------------


@contextmanager
def noticed_grad_mode(note: Callable[[], None], mode: str, note_tensor: Callable[[], None]) -> Iterator[None]:
    """Context manager: code outside of torch and autopar sees the grad mode ``mode``. ``note`` is called when it reads
    the grad mode, ``note_tensor`` when it reads ``is_inference`` of a tensor."""

    enabled, inference, _ = _OF_GRAD_MODE

    def is_grad_enabled() -> bool:
        if is_outside(sys._getframe(1)):
            note()
        return enabled()

    def is_inference_mode_enabled() -> bool:
        inferring = seen_inference()
        if inferring is None or not is_outside(sys._getframe(1)):
            return inference()
        note()
        return inferring

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
    """(namespace of a module, name of the function in it, the function). Modules whose number of names has not changed
    are not searched again."""
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
    """Context manager: in the user's modules that the model's classes reach, ``type`` of a fake tensor is Tensor or
    Parameter, as without autopar."""
    scopes = [scope for scope in _files_of(model) if "type" not in scope and _names_type(scope)]
    for scope in scopes:
        scope["type"] = _EagerType
    try:
        yield
    finally:
        for scope in scopes:
            scope.pop("type", None)


class _AsksEager(type):
    """Metaclass of a class that is used like ``type``."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Tensor) and type(args[0]) not in REAL and not kwargs:
            return nn.Parameter if isinstance(args[0], nn.Parameter) else Tensor
        return type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)


class _EagerType(type, metaclass=_AsksEager):
    """``type``, as the user's code sees it."""


def _files_of(model: nn.Module) -> list[dict[str, Any]]:
    """Namespaces of the user's Python modules that define classes of the model, and of modules that these import."""
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
