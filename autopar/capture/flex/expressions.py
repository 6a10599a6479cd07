"""A function of positions as an expression: it is called once, with names in place of numbers.

    lambda b, h, q, k: (q >= k) & (document[b, q] == document[b, k])

    --> and(ge(q, k), eq(getitem(document, (b, q)), getitem(document, (b, k))))

Expressions consist of operators that work entry by entry and of lookups in tensors, so `value` can compute all entries
at once, by broadcasting.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_BINARY = (
    "ge", "gt", "le", "lt", "eq", "ne", "add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor",
    "pow",
)  # fmt: skip
_UNARY = ("neg", "invert", "abs")
_ENTRYWISE = {
    *(name.strip("_") for name in (*_BINARY, *_UNARY)), "where", "logical_and", "logical_or", "logical_not",
    "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "greater_equal", "greater", "less_equal", "less",
    "not_equal", "div", "floor_divide", "remainder", "minimum", "maximum", "clamp", "clip", "tanh", "exp", "exp2",
    "log", "square", "sqrt", "sigmoid", "relu", "to", "bool", "int", "long", "float", "double", "getitem", "rsub",
    "multiply", "subtract", "detach", "masked_fill", "sin", "cos", "log2", "log1p", "sign", "floor", "ceil", "round",
    "rsqrt", "reciprocal", "negative", "absolute",
}  # fmt: skip
AND = {"and", "logical_and", "bitwise_and"}


class Unreadable(Exception):
    """A function of positions does what no expression says; the message is the reason."""


class Expression:
    """``function`` of ``args``: numbers, tensors and expressions. names: the variables in it."""

    def __init__(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name, self.function, self.args, self.kwargs = name, function, args, kwargs
        self.names: frozenset[str] = frozenset().union(*(x.names for x in self.inner()))

    def inner(self) -> Iterator[Expression]:
        """The expressions among its arguments."""
        yield from (x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Expression))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in it."""
        own = [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]
        return own + [x for inside in self.inner() for x in inside.tensors]

    def new_ones(self, *_: Any, **__: Any) -> bool:
        return True

    def new_zeros(self, *_: Any, **__: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name in _ENTRYWISE:
            return lambda *args, **kwargs: _made(name, getattr(Tensor, name), (self, *args), kwargs)
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unreadable(f"it reads {name!r} of a position")

    def __bool__(self) -> bool:
        raise Unreadable("it branches on a position (use &, |, ~ and torch.where)")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _made(function.__name__.strip("_"), function, tuple(args), dict(kwargs or {}))

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(_text, self.args))})"


class Variable(Expression):
    """A position, or the number of an example or of a head, by name."""

    def __init__(self, name: str) -> None:
        super().__init__(name, operator.pos, (), {})
        self.names = frozenset({name})

    def __str__(self) -> str:
        return self.name


def _text(x: Any) -> str:
    if isinstance(x, tuple):
        return ", ".join(map(_text, x))
    return "tensor" if isinstance(x, Tensor) else str(x)


def _made(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name not in _ENTRYWISE:
        raise Unreadable(f"it calls {name!r}, which does not work entry by entry")
    if name in ("and", "or") and len(args) == 2:  # what and_masks and or_masks begin with
        for constant, other in (args, args[::-1]):
            if constant is (name == "and"):
                return other
    return Expression(name, function, args, kwargs)


def _operator(name: str, turned: bool) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: Expression, *others: Any) -> Any:
        args = (*others, self) if turned else (self, *others)
        return _made(name.strip("_"), function, args, {})

    return method


for _name in (*_BINARY, *_UNARY):
    setattr(Expression, f"__{_name.strip('_')}__", _operator(_name, turned=False))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor", "pow"):
    setattr(Expression, f"__r{_name.strip('_')}__", _operator(_name, turned=True))


class _Lookups(TorchFunctionMode):
    """tensor[position] becomes an expression, too."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, Expression) for x in pytree.tree_leaves((args, kwargs))):
            return Expression.__torch_function__(function, types, args, kwargs)
        return function(*args, **(kwargs or {}))


def expression_of(function: Callable[..., Any], *names: str) -> Any:
    """What a function returns for variables of these names; a number or tensor if it does not depend on them. Raises
    Unreadable."""
    with _Lookups():
        return function(*map(Variable, names))


def conjuncts(expression: Any) -> Iterator[Any]:
    """a & b & c --> a, b, c"""
    if isinstance(expression, Expression) and expression.name in AND and len(expression.args) == 2:
        for x in expression.args:
            yield from conjuncts(x)
    else:
        yield expression


def renamed(left: Any, right: Any, names: Mapping[str, str]) -> bool:
    """Whether ``right`` is ``left`` with its variables renamed."""
    if isinstance(left, Variable) or isinstance(right, Variable):
        both = isinstance(left, Variable) and isinstance(right, Variable)
        return both and names.get(left.name, left.name) == right.name
    if isinstance(left, Expression):
        same = isinstance(right, Expression) and left.name == right.name
        return same and renamed((*left.args, *left.kwargs.items()), (*right.args, *right.kwargs.items()), names)
    if isinstance(left, tuple):
        same = isinstance(right, tuple) and len(left) == len(right)
        return same and all(renamed(a, b, names) for a, b in zip(left, right, strict=True))
    if isinstance(left, Tensor):
        return left is right or (isinstance(right, Tensor) and _same_view(left, right))
    return type(left) is type(right) and left == right


def _same_view(left: Tensor, right: Tensor) -> bool:
    """Whether both are the same part of one tensor: document[0], twice."""
    bases = left._base, right._base
    parts = ((x.shape, x.stride(), x.storage_offset()) for x in (left, right))
    return bases[0] is not None and bases[0] is bases[1] and next(parts) == next(parts)


def value(expression: Any, variables: Mapping[str, Tensor]) -> Any:
    """The entries of an expression. ``variables``: per name all its values 0, 1, ..., with four dims, along one."""
    if isinstance(expression, Variable):
        return variables[expression.name]
    if not isinstance(expression, Expression):
        return expression
    if expression.name == "getitem" and isinstance(expression.args[0], Tensor):
        return _looked_up(expression.args[0], expression.args[1], variables)

    def of(x: Any) -> Any:
        return value(x, variables)

    args, kwargs = pytree.tree_map(of, (expression.args, expression.kwargs))
    return expression.function(*args, **kwargs)


def _looked_up(x: Tensor, index: Any, variables: Mapping[str, Tensor]) -> Tensor:
    """x[index], four dims. Where all of a dim is looked up in order, the dim stays, and with it its sharding."""
    index = index if isinstance(index, tuple) else (index,)
    if len(index) != x.dim() or any(i is None or i is Ellipsis or isinstance(i, slice) for i in index):
        raise Unreadable(f"it looks up {len(index)} of {x.dim()} dims of a tensor")
    kept: list[int] = []  # where a dim of x goes among the four
    for dim, i in enumerate(index):
        at = _along(variables[i.name]) if isinstance(i, Variable) else None
        if at is None or at in kept or variables[i.name].numel() != x.shape[dim]:
            break
        kept.append(at)
    if len(kept) < len(index):
        if kept[:1] != [0]:
            return x[tuple(value(i, variables) for i in index)]
        rest = tuple(value(i, variables) for i in index[1:])
        entries = torch.broadcast_tensors(*(i if isinstance(i, Tensor) else torch.tensor(i) for i in rest))
        found = x[(slice(None), *(e.reshape(-1) for e in entries))]
        if entries[0].shape[0] != 1:
            return x[tuple(value(i, variables) for i in index)]
        return found.reshape(x.shape[0], *entries[0].shape[1:])
    order = sorted(range(len(kept)), key=kept.__getitem__)
    sizes = [1, 1, 1, 1]
    for dim, at in enumerate(kept):
        sizes[at] = x.shape[dim]
    return x.permute(order).reshape(sizes)


def _along(x: Tensor) -> int | None:
    """The dim of a variable's values."""
    return next((dim for dim, size in enumerate(x.shape) if size == x.numel()), None)
