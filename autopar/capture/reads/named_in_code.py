"""Names in the code of modules: attributes that a forward sets (``self.calls += 1``), and all that it may read."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

from torch import nn


def names_written(kind: type) -> frozenset[str]:
    """Names of attributes that the forward of a module class, or a method that it calls, may set."""
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


def names_in_code(root: nn.Module) -> set[str]:
    """All names and strings in the code of the modules' classes, in other functions of their Python modules, and in
    attributes: they include every attribute of a tensor that the code may read."""
    classes = {cls for m in root.modules() for cls in type(m).__mro__ if cls not in (nn.Module, object)}
    scopes = {id(f.__globals__): f.__globals__ for cls in classes for f in vars(cls).values() if _is_plain_function(f)}
    left = [x for cls in classes for x in vars(cls).values()]
    left += [x for scope in scopes.values() for x in scope.values() if _is_plain_function(x)]
    left += [x for m in root.modules() for x in vars(m).values() if _is_plain_function(x)]
    found = set[str]()
    for code in (code for value in left for code in _codes(value)):
        found |= {*code.co_names, *(x for x in code.co_consts if isinstance(x, str))}
    return found | {x for m in root.modules() for value in vars(m).values() for x in _texts(value)}


def _texts(value: Any) -> Iterator[str]:
    """Strings in an attribute, which may be names of other attributes."""
    if isinstance(value, str):
        yield value
    elif type(value) in (list, tuple, set, dict):
        yield from (x for x in value if isinstance(x, str))
        yield from (x for x in (value.values() if isinstance(value, dict) else ()) if isinstance(x, str))


def _is_plain_function(x: Any) -> bool:
    return isinstance(x, types.FunctionType)


def _codes(value: Any) -> Iterator[types.CodeType]:
    """Code objects of a function, of nested functions, and of functions that it wraps."""
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
