"""Sets of strings with the same iteration order in every process, while a model is traced.

    for kind in set(config.layer_types): masks[kind] = ...        Gemma 3, ModernBERT and others

Python hashes strings with a different seed in each process, and a set iterates in the order of hashes, so ranks started
by torchrun could trace different graphs. While tracing, `set` and `frozenset` in the modules that define the model's
classes create sets that iterate in sorted order. (A set display such as ``{"a", "b"}`` does not.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_TEXTS = (str, bytes)


class _LikeItsBase(type):
    """Metaclass: ``isinstance(x, set)`` works as before."""

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, cls.__mro__[1])


def _sorted(found: list[Any]) -> Iterator[Any]:
    return iter(sorted(found) if all(isinstance(x, _TEXTS) for x in found) else found)


class SortedSet(set[Any], metaclass=_LikeItsBase):
    """Iterates over strings in sorted order."""

    def __iter__(self) -> Iterator[Any]:
        return _sorted(list(super().__iter__()))


class SortedFrozenSet(frozenset[Any], metaclass=_LikeItsBase):
    """Iterates over strings in sorted order."""

    def __iter__(self) -> Iterator[Any]:
        return _sorted(list(super().__iter__()))


@contextmanager
def sets_in_order(model: nn.Module) -> Iterator[None]:
    """Context manager: sets that code of the model's classes creates iterate in sorted order."""
    names = {cls.__module__ for m in model.modules() for cls in type(m).__mro__}
    modules = [sys.modules[n] for n in sorted(names) if n in sys.modules and n.partition(".")[0] not in _NOT_MODELS]
    changed = [(m, name) for m in modules for name in _SETS if name not in vars(m)]
    for module, name in changed:
        setattr(module, name, _SETS[name])
    try:
        yield
    finally:
        for module, name in changed:
            delattr(module, name)


_SETS = {"set": SortedSet, "frozenset": SortedFrozenSet}
_NOT_MODELS = ("torch", "builtins", "abc", "typing", "collections")
