"""Which attributes of its module a forward sets, by its code: ``self.calls += 1``, ``self.last = x``."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

from torch import nn


def names_written(kind: type) -> frozenset[str]:
    """The names of attributes that the forward of a class of modules, or a method that it names, may set."""
    methods: dict[str, Any] = {}
    for cls in reversed(kind.__mro__):
        if cls not in (nn.Module, object):
            methods.update(vars(cls))
    left, seen, found = ["forward", "__call__"], set[str](), set[str]()
    while left:
        name = left.pop()
        if name not in seen and name in methods:
            seen.add(name)
            for code in _codes(methods[name]):
                left += code.co_names
                found |= {x.argval for x in dis.get_instructions(code) if x.opname == "STORE_ATTR"}
    return frozenset(found)


def _codes(value: Any) -> Iterator[types.CodeType]:
    """Of a function, of those within it, and of those that it is wrapped around."""
    left, seen = [value], set[int]()
    while left:
        x = left.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, types.CodeType):
            yield x
            left += x.co_consts
        elif isinstance(x, (staticmethod, classmethod, types.MethodType)):
            left.append(x.__func__)
        elif isinstance(x, property):
            left += [x.fget, x.fset]
        elif isinstance(x, types.FunctionType):
            left.append(x.__code__)
            left += [cell.cell_contents for cell in x.__closure__ or () if _is_function(cell)]


def _is_function(cell: types.CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, types.FunctionType)
    except ValueError:
        return False
