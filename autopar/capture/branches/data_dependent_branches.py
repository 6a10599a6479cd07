"""Data-dependent branches that can be resolved while tracing: those that only guard numbers, or only raise.

    if not torch.isfinite(h).all():                      always taken: a clamp to the largest numbers does not change
        c = torch.finfo(h.dtype).max - 1000              finite ones
        h = torch.clamp(h, min=-c, max=c)
    if (lengths < 1).any():                              a check: skipped, with a warning, like an assertion
        raise ValueError("...")
    assert mask.all()                                    also mask.all().item()

No other branch on a tensor can be captured. What a branch does is decided from its source.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator, Sequence
from types import FrameType

import torch
from torch import Tensor

_PRINTS = {"warn", "warning", "warning_once", "info", "debug", "print"}
_FINITE = {"isfinite", "isinf", "isnan"}
_SPARED = 1000.0  # below the largest number, where only float16 has more numbers


def answered(frame: FrameType, is_item: bool = False) -> tuple[bool, str] | None:
    """(truth value to use for a tensor in the condition on this line, warning or ""); None if the branch cannot be
    resolved. ``is_item``: of a call of ``item``."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    statement = _statements("".join(linecache.getlines(file))).get(line)
    sign = _sign(statement.test) if statement is not None else None
    if statement is None or sign is None or (is_item and not _asks_items(statement.test)):
        return None
    if isinstance(statement, ast.Assert) or (_only_raises_or_prints(statement.body) and not statement.orelse):
        holds = sign if isinstance(statement, ast.Assert) else not sign
        return holds, f"capture: {file}:{line}: a check of tensor values is skipped in compiled steps"
    name = _clamped(statement)
    if name is None:
        return None
    value = frame.f_locals.get(name)
    half = isinstance(value, Tensor) and value.dtype == torch.float16
    text = f"{name} is clamped in every step, which changes values above 64504 even if all are finite"
    return sign, f"capture: {file}:{line}: {text}" if half else ""


@functools.lru_cache(64)
def _statements(text: str) -> dict[int, ast.If | ast.Assert | None]:
    """Line -> the if or assert statement whose condition is on it; None if the line has another condition, too, or if
    the exception may be caught."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    found: dict[int, ast.If | ast.Assert | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.Assert):
            for line in range(node.lineno, (node.test.end_lineno or node.lineno) + 1):
                found[line] = None if line in found else node
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp | ast.comprehension) or (isinstance(node, ast.Try) and node.handlers):
            inner = node.body if isinstance(node, ast.Try) else [node]
            found |= {x.lineno: None for part in inner for x in ast.walk(part) if hasattr(x, "lineno")}
        elif isinstance(node, ast.While):
            found |= {x.lineno: None for x in ast.walk(node.test) if hasattr(x, "lineno")}
    return found


def _sign(test: ast.expr) -> bool | None:
    """The truth value of the tensors in a condition that makes it true; None if they need different ones."""
    parts = list(_literals(test, True))
    signs = {sign for part, sign in parts if len(parts) == 1 or _may_be_tensor(part)}
    return signs.pop() if len(signs) == 1 else None


def _asks_items(test: ast.expr) -> bool:
    """Whether the operands of a condition are results of ``item`` themselves: all(x).item(), not x.item() == 0."""
    calls = [part for part, _ in _literals(test, True) if _may_be_tensor(part)]
    return all(isinstance(call, ast.Call) and _last(call.func) == "item" for call in calls)


def _literals(test: ast.expr, sign: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Operands of and, or and not in a condition, each with False if it is negated."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _literals(value, sign)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _literals(test.operand, not sign)
    else:
        yield test, sign


def _may_be_tensor(part: ast.expr) -> bool:
    """False for self.training, x.dtype == torch.float16, x is None."""
    if isinstance(part, ast.Compare):
        names = {x.attr for x in ast.walk(part) if isinstance(x, ast.Attribute)}
        return "dtype" not in names and not any(isinstance(op, ast.Is | ast.IsNot | ast.In) for op in part.ops)
    return not isinstance(part, ast.Attribute)


def _only_raises_or_prints(body: Sequence[ast.stmt]) -> bool:
    """Whether statements raise, warn, or print, and nothing else."""
    return all(isinstance(x, ast.Raise) or _prints(x) for x in body)


def _prints(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and _last(call.func) in _PRINTS


def _last(function: ast.expr) -> str:
    """'clamp' of torch.clamp and of h.clamp"""
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _clamped(statement: ast.If) -> str | None:
    """The name of the value that a statement clamps to the largest numbers if it is not finite; else None."""
    names = {_argument(x) for x in ast.walk(statement.test) if isinstance(x, ast.Call) and _last(x.func) in _FINITE}
    if len(names) != 1 or statement.orelse or not all(isinstance(x, ast.Assign) for x in statement.body):
        return None
    (name,) = names
    largest: set[str] = set()
    clamped = False
    for assign in statement.body:
        assert isinstance(assign, ast.Assign)
        target = assign.targets[0]
        if len(assign.targets) != 1 or not isinstance(target, ast.Name):
            return None
        if _is_largest(assign.value):
            largest.add(target.id)
        elif target.id == name and _clamps(assign.value, name, largest):
            clamped = True
        else:
            return None
    return name if clamped else None


def _argument(call: ast.Call) -> str | None:
    """x of isfinite(x) and of x.isfinite()"""
    given = call.args[0] if call.args else call.func.value if isinstance(call.func, ast.Attribute) else None
    return given.id if isinstance(given, ast.Name) else None


def _is_largest(x: ast.expr) -> bool:
    """finfo(...).max, or a little less"""
    if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Sub) and isinstance(x.right, ast.Constant):
        return isinstance(x.right.value, (int, float)) and 0 <= x.right.value <= _SPARED and _is_largest(x.left)
    return (
        isinstance(x, ast.Attribute)
        and x.attr == "max"
        and isinstance(x.value, ast.Call)
        and _last(x.value.func) == "finfo"
    )


def _clamps(x: ast.expr, name: str | None, largest: set[str]) -> bool:
    """clamp(h, min=-c, max=c)"""
    if not isinstance(x, ast.Call) or _last(x.func) not in ("clamp", "clip"):
        return False
    bounds = {k.arg: k.value for k in x.keywords} or dict(zip(("min", "max"), x.args[-2:], strict=False))
    low, high = bounds.get("min"), bounds.get("max")
    negative = isinstance(low, ast.UnaryOp) and isinstance(low.op, ast.USub)
    of_low = low.operand if isinstance(low, ast.UnaryOp) else None
    return (
        _argument(x) == name and negative and all(isinstance(v, ast.Name) and v.id in largest for v in (of_low, high))
    )
