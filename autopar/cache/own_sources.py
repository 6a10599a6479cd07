"""autopar's own code, by content, and whether somebody has put code of their own into it."""

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

from autopar.capture.reads.code_owners import OURS, TRUSTED, USER, owner_of_function

_LOADED = time.time()  # about when the files of autopar were read


def is_foreign(value: object) -> bool:
    """Whether a function's code is in no file of a library that is known by its version."""
    return isinstance(value, types.FunctionType) and owner_of_function(value) != TRUSTED


@functools.cache
def own_digest() -> str:
    """Of all sources of autopar; "" where one is younger than this process, which has read what it was before."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(OURS).rglob("*.py")):
        if file.stat().st_mtime > _LOADED:
            return ""
        digest.update(f"{file.relative_to(OURS)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """Of Python, torch and what it computes with."""
    return (
        ("python", sys.version), ("torch", torch.__version__), ("git", str(torch.version.git_version)),
        ("cuda", str(torch.version.cuda)), ("numpy", numpy.__version__), ("autopar", own_digest()),
    )  # fmt: skip


def changed_autopar() -> str | None:
    """Where somebody has put code of their own into autopar, if they have."""
    for name, module in [pair for pair in list(sys.modules.items()) if pair[0].partition(".")[0] == "autopar"]:
        key = _foreign_key(module)
        if key is None:
            key = next((found for cls in _OWN[module].classes if (found := _foreign_key(cls)) is not None), None)
        if key is not None:
            return f"{name}.{key}"
    return None


@dataclass(frozen=True)
class _Holder:
    """A module or class that has been looked at, with nothing but our code. classes: that a module defines."""

    values: list[Any]
    functions: list[types.FunctionType]
    codes: list[types.CodeType]
    classes: list[type]

    def is_still(self, holder: Any) -> bool:
        """Whether it holds the same things, and the functions among them the same code. A function is equal to itself
        alone, a code to one that does the same."""
        try:
            same = [*vars(holder).values()] == self.values
        except Exception:  # what is compared with another may do anything
            return False
        return same and [*map(_code_of, self.functions)] == self.codes


_code_of = operator.attrgetter("__code__")
_OWN: dict[Any, _Holder] = {}  # an entry that is replaced lives until its module is looked at again


def _foreign_key(holder: Any) -> str | None:
    """The first entry of a module or class whose code is the user's. The same entries with the same code are looked at
    once."""
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
