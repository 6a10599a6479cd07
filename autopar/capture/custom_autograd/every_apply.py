"""Intercepts `torch.autograd.Function.apply` under any name.

    f = MyFunction.apply     from torch 2.14 on a builtin method: a class, and an entry of C's method table

Such objects are in global variables, closures, partials and hooks, where Python code cannot replace what they call. But
all of them share the entry of the table. While a model is captured, the entry points to another C function, which takes
the same arguments and calls a method of the class's metaclass: the one that CPython has for `__get__`.

    entry -> slot_tp_descr_get(cls, args, kwargs) -> FunctionMeta.__get__(cls, args, kwargs or None)

Reading a class from an attribute of another class calls the same method, with that class as last argument.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import FunctionMeta

_FLAGS = 0x10 | 0x2 | 0x1  # METH_CLASS, METH_KEYWORDS, METH_VARARGS: calling convention of the other function
_DESCR_GET = 54  # Py_tp_descr_get in Python's stable ABI
_BASE: Any = torch._C._FunctionBase

Answer = Callable[..., Any]  # (class, *args, **kwargs) -> the result


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


class _Descriptor:
    """A class whose tp_descr_get slot is the C function that calls `__get__`."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self


def _entry_of_apply() -> _Method:
    """The entry of C's method table: a builtin object has a pointer to it behind the common object header."""
    method = _BASE.apply
    entry = ctypes.POINTER(_Method).from_address(id(method) + object.__basicsize__).contents
    assert entry.name == b"apply"
    return entry


_ENTRY = _entry_of_apply()
_KEPT = _Method(_ENTRY.name, _ENTRY.function, _ENTRY.flags, _ENTRY.doc)
_slot = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_int)(("PyType_GetSlot", ctypes.pythonapi))
_classmethod = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.POINTER(_Method))(
    ("PyDescr_NewClassMethod", ctypes.pythonapi)
)
_CALLS_GET = _slot(_Descriptor, _DESCR_GET)
_ORIGINAL = _classmethod(_BASE, ctypes.byref(_KEPT))
_ANSWERS: dict[int, Answer] = {}  # thread -> replacement of apply
_LOCK = threading.Lock()


def plain_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's own ``apply``, also within `every_apply`."""
    return _ORIGINAL.__get__(None, cls)(*args, **kwargs)


@contextmanager
def every_apply(answer: Answer) -> Iterator[None]:
    """Context manager: this thread calls ``answer(cls, *args, **kwargs)`` instead of any `apply`."""
    thread = threading.get_ident()
    before = _ANSWERS.get(thread)
    with _LOCK:
        _ANSWERS[thread] = answer
        _replace()
    try:
        yield
    finally:
        with _LOCK:
            if before is None:
                del _ANSWERS[thread]
            else:
                _ANSWERS[thread] = before
            if not _ANSWERS:
                _put_back()


def _replace() -> None:
    FunctionMeta.__get__ = _asked  # type: ignore[attr-defined]
    _ENTRY.flags, _ENTRY.function = _FLAGS, _CALLS_GET


def _put_back() -> None:
    _ENTRY.function, _ENTRY.flags = _KEPT.function, _KEPT.flags
    del FunctionMeta.__get__  # type: ignore[attr-defined]


def _asked(cls: Any, args: Any, kwargs: Any = None) -> Any:
    """Called for ``cls.apply(*args, **kwargs)``; with a class as ``kwargs``, for reading ``cls`` as its attribute."""
    if isinstance(kwargs, type):
        return cls
    return _ANSWERS.get(threading.get_ident(), plain_apply)(cls, *args, **(kwargs or {}))
