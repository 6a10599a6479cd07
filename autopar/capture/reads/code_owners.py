"""Owners of files, modules and functions: the user, a library (identified by its version), or trusted.

Trusted are the standard library, torch, numpy and autopar: their files do not change, though functions in them may be
replaced.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import torch

TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parents[2])
_PATHS = sysconfig.get_paths()
_SITES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))  # of any environment
_TRUSTED = (TORCH, str(Path(numpy.__file__).parent), OURS)
_STANDARD = tuple({_PATHS["stdlib"], _PATHS["platstdlib"]})
_FROZEN = ("<frozen ", "<__array_function__ internals>")

TRUSTED, LIBRARY, USER = "trusted", "library", "user"


@functools.lru_cache(4096)
def owner_of_file(path: str) -> str:
    """The owner of a source file."""
    if path.startswith(_FROZEN):
        return TRUSTED
    if lies_in(path, _TRUSTED):
        return TRUSTED
    if any(site in path for site in _SITES) or _is_recorded(path):
        return LIBRARY
    return TRUSTED if lies_in(path, _STANDARD) else USER


def _is_recorded(path: str) -> bool:
    """Whether an installer recorded the file in a folder of ``sys.path`` (`pip install --target`). Editable installs
    are elsewhere, and count as the user's."""
    return any(path[len(folder) + 1 :] in _files_installed(folder) for folder in sys.path if lies_in(path, (folder,)))


@functools.lru_cache(64)
def _files_installed(folder: str) -> frozenset[str]:
    """Files in the RECORDs of a folder."""
    found = Path(folder).glob("*.dist-info/RECORD")
    records = (record.read_text(encoding="utf-8", errors="replace") for record in found)
    return frozenset(os.path.normpath(line.partition(",")[0]) for text in records for line in text.splitlines())


def is_ours(path: str) -> bool:
    """Whether a source file is part of autopar."""
    return lies_in(path, (OURS,))


def is_torchs(path: str) -> bool:
    """Whether a source file is part of torch."""
    return lies_in(path, (TORCH,))


def lies_in(path: str, folders: Iterable[str]) -> bool:
    """Whether a file is in one of these folders. (torchvision is not in torch.)"""
    return path.startswith(tuple(f"{folder}{os.sep}" for folder in folders))


def owner_of_module(name: Any) -> str:
    """The owner of a Python module, by its file. A module without a file, such as __main__ of a notebook, is the
    user's."""
    if not isinstance(name, str):  # a metaclass may have a descriptor under `__module__`
        return USER
    if name.partition(".")[0] in ("torch", "numpy", "autopar", "builtins"):
        return TRUSTED
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return owner_of_file(file)
    return TRUSTED if name.partition(".")[0] in sys.stdlib_module_names and name != "__main__" else USER


def owner_of_function(function: types.FunctionType) -> str:
    """The owner of a function. Generated code (methods of a dataclass) belongs to its module."""
    file = function.__code__.co_filename
    if not file.startswith("<") or file.startswith(_FROZEN):
        return owner_of_file(file)
    module = str(function.__globals__.get("__name__"))
    return TRUSTED if module.startswith("namedtuple_") else owner_of_module(module)
