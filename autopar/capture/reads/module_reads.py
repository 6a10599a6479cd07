"""Attributes of one module that must not be read. Its class is replaced by a subclass that checks names.

refuse_reads(block, ["last"], error)     block.last raises until it is assigned
allow_reads(copy)                        a copy of such a module gets its original class
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

_REFUSED = "_autopar_refused"  # attribute of such a class: the names


def refuse_reads(module: nn.Module, names: Iterable[str], error: Callable[[str], Exception]) -> None:
    """Make reads of these attributes of this module raise ``error(name)``."""
    refused = vars(type(module)).get(_REFUSED)
    if refused is None:
        refused = set[str]()
        object.__setattr__(module, "__class__", _watched(type(module), refused, error))
    refused.update(names)


def allow_reads(module: nn.Module) -> None:
    """Restore the original class of a module."""
    if _REFUSED in vars(type(module)):
        object.__setattr__(module, "__class__", type(module).__mro__[1])


def _watched(cls: Any, refused: set[str], error: Callable[[str], Exception]) -> type:
    def get(self: Any, name: str) -> Any:
        if name in refused:
            raise error(name)
        return cls.__getattribute__(self, name)

    def put(self: Any, name: str, value: Any) -> None:
        refused.discard(name)
        cls.__setattr__(self, name, value)

    def drop(self: Any, name: str) -> None:
        refused.discard(name)
        cls.__delattr__(self, name)

    attributes = {key: getattr(cls, key) for key in ("__module__", "__qualname__", "__doc__")}
    methods = {"__getattribute__": get, "__setattr__": put, "__delattr__": drop, _REFUSED: refused}
    made: type = type(cls)(cls.__name__, (cls,), {**attributes, **methods})
    return made
