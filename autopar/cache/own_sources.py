"""A digest of autopar's own sources, and whether functions in its modules have been replaced."""

from __future__ import annotations

import functools
import hashlib
import operator
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from autopar.capture.reads.code_owners import OURS, TRUSTED, USER, owner_of_function, owner_of_module

_LOADED = time.time()  # about when the files of autopar were loaded


def is_foreign(value: Any) -> bool:
    """Whether a function, or the class of a callable, is not identified by a version: not in torch, numpy, autopar or
    Python."""
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if isinstance(value, types.FunctionType):
        return owner_of_function(value) != TRUSTED
    if isinstance(value, type) or callable(value):
        return owner_of_module((value if isinstance(value, type) else type(value)).__module__) != TRUSTED
    return False


@functools.cache
def own_digest() -> str:
    """Digest of all sources of autopar; "" if one was changed after this process has loaded it."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(OURS).rglob("*.py")):
        if file.stat().st_mtime > _LOADED:
            return ""
        digest.update(f"{file.relative_to(OURS)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """Versions of Python, torch and the libraries that it uses."""
    return (
        ("python", sys.version), ("torch", torch.__version__), ("git", str(torch.version.git_version)),
        ("cuda", str(torch.version.cuda)), ("numpy", numpy.__version__), ("autopar", own_digest()),
    )  # fmt: skip


def changed_autopar() -> str | None:
    """The name of a function in autopar that the user has replaced, or None."""
    for name, module in [pair for pair in list(sys.modules.items()) if pair[0].partition(".")[0] == "autopar"]:
        key = _foreign_key(module)
        if key is None:
            key = next((found for cls in _OWN[module].classes if (found := _foreign_key(cls)) is not None), None)
        if key is not None:
            return f"{name}.{key}"
    return None


@dataclass(frozen=True)
class _Holder:
    """The entries of a module or class of autopar when it was last checked. classes: those that a module defines."""

    values: list[Any]
    functions: list[types.FunctionType]
    codes: list[types.CodeType]
    classes: list[type]

    def is_still(self, holder: Any) -> bool:
        """Whether a module or class still has the same entries, and functions the same code. Functions are compared by
        identity, code objects by content."""
        try:
            same = [*vars(holder).values()] == self.values
        except Exception:  # comparing may run any code
            return False
        return same and [*map(_code_of, self.functions)] == self.codes


_code_of = operator.attrgetter("__code__")
_OWN: dict[Any, _Holder] = {}  # last check of each module and class


def _foreign_key(holder: Any) -> str | None:
    """The first entry of a module or class with the user's code. Unchanged ones are not checked again."""
    known = _OWN.get(holder)
    if known is not None and known.is_still(holder):
        return None
    entries, functions = dict(vars(holder)), []
    for key, value in entries.items():
        function = getattr(value, "fget", getattr(value, "__func__", value))
        if isinstance(function, types.FunctionType):
            if owner_of_function(function) == USER:
                return str(key)
            functions.append(function)
    classes = [x for x in entries.values() if isinstance(x, type) and x.__module__ == holder.__name__]
    _OWN[holder] = _Holder([*entries.values()], functions, [*map(_code_of, functions)], classes)
    return None
