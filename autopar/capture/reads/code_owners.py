"""Whose code a file, a module or a function is: a library's that is known by its version, the user's, or trusted.

Trusted are Python's own files, torch, numpy and autopar: nobody writes there but by replacing what stands in them.
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
_SITES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))  # of whatever environment
_TRUSTED = (TORCH, str(Path(numpy.__file__).parent), OURS)
_STANDARD = tuple({_PATHS["stdlib"], _PATHS["platstdlib"]})
_FROZEN = ("<frozen ", "<__array_function__ internals>")

TRUSTED, LIBRARY, USER = "trusted", "library", "user"


@functools.lru_cache(4096)
def owner_of_file(path: str) -> str:
    """Whose a file of code is."""
    if path.startswith(_FROZEN):
        return TRUSTED
    if lies_in(path, _TRUSTED):
        return TRUSTED
    if any(site in path for site in _SITES) or _is_recorded(path):
        return LIBRARY
    return TRUSTED if lies_in(path, _STANDARD) else USER


def _is_recorded(path: str) -> bool:
    """Whether an installer put the file into a folder that Python looks into (`pip install --target`). It writes down
    each file; what is installed as editable lies elsewhere, and is the user's."""
    return any(path[len(folder) + 1 :] in _files_installed(folder) for folder in sys.path if lies_in(path, (folder,)))


@functools.lru_cache(64)
def _files_installed(folder: str) -> frozenset[str]:
    """The records of a folder."""
    found = Path(folder).glob("*.dist-info/RECORD")
    records = (record.read_text(encoding="utf-8", errors="replace") for record in found)
    return frozenset(os.path.normpath(line.partition(",")[0]) for text in records for line in text.splitlines())


def is_ours(path: str) -> bool:
    """Whether a file of code is autopar's."""
    return lies_in(path, (OURS,))


def is_torchs(path: str) -> bool:
    """Whether a file of code is torch's."""
    return lies_in(path, (TORCH,))


def lies_in(path: str, folders: Iterable[str]) -> bool:
    """Whether a file lies in one of these folders. (torchvision does not lie in torch.)"""
    return path.startswith(tuple(f"{folder}{os.sep}" for folder in folders))


def owner_of_module(name: Any) -> str:
    """Whose a module is, by its file; one without a file is the user's if it was made by hand, such as __main__ of a
    notebook."""
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
    """Whose code it runs. What was made of a text (a dataclass's methods) belongs to the module around it."""
    file = function.__code__.co_filename
    if not file.startswith("<") or file.startswith(_FROZEN):
        return owner_of_file(file)
    module = str(function.__globals__.get("__name__"))
    return TRUSTED if module.startswith("namedtuple_") else owner_of_module(module)
