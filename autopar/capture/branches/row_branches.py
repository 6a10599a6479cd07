"""Branches that skip work on no rows: captured as taken, since work on rows of a mask has no effect on others.

    if mask.any():                               for expert in experts:
        y[mask] += expert(x[mask])                   if token.numel() == 0:
                                                         continue
                                                     y.index_add_(0, token, expert(x[token]))

Only if what is skipped does nothing else: it assigns names that nothing else reads, and writes to rows.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType

Lines = tuple[CodeType, range]
# y = y.index_add(...): what such a call makes may be replaced by y where the branch is not taken.
UPDATES = {"index_add", "scatter_add", "scatter_reduce", "scatter", "index_put", "index_copy", "index_fill"} | {
    "masked_scatter",
    "masked_fill",
}


def skipped_lines(frame: FrameType, truth: bool) -> Lines | None:
    """The lines that a branch on this line skips where there are no rows, if it may be taken as if there are some:
    ``truth`` is what its condition is then. None if it does something else, too."""
    found = _branch("".join(linecache.getlines(frame.f_code.co_filename)), frame.f_lineno, truth)
    return (frame.f_code, found) if found is not None else None


@functools.lru_cache(256)
def _branch(text: str, line: int, truth: bool) -> range | None:
    for function in functions_at(text, line):
        for block, loops in _blocks(function):
            for i, statement in enumerate(block):
                if isinstance(statement, ast.If) and statement.lineno <= line <= (statement.test.end_lineno or 0):
                    return _skipped(function, statement, block[i + 1 :], loops, truth)
    return None


def functions_at(text: str, line: int) -> Iterator[ast.FunctionDef]:
    """The functions that a line of a source is in, the outermost first."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            yield node


def _blocks(node: ast.AST) -> Iterator[tuple[list[ast.stmt], bool]]:
    """(statements of a block, whether it is the body of a loop)"""
    for x in ast.walk(node):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(x, name, None)
            if isinstance(block, list):
                yield block, isinstance(x, ast.For) and name == "body"


def _skipped(
    function: ast.FunctionDef, statement: ast.If, after: list[ast.stmt], loops: bool, truth: bool
) -> range | None:
    test = statement.test
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, truth = test.operand, not truth
    if isinstance(test, ast.BoolOp) or statement.orelse:
        return None
    if truth:
        work = statement.body
    elif loops and all(isinstance(x, ast.Continue) for x in statement.body):
        work = after
    else:
        return None
    if not work or not all(map(is_plain, work)) or not stays(function, work):
        return None
    return range(work[0].lineno, (work[-1].end_lineno or work[-1].lineno) + 1)


def is_plain(statement: ast.stmt) -> bool:
    """Whether a statement assigns names, or writes to a tensor."""
    if isinstance(statement, ast.Assign):
        return all(map(_is_target, statement.targets))
    if isinstance(statement, ast.AugAssign | ast.AnnAssign):
        return _is_target(statement.target)
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) or _writes_tensor(statement.value)
    return isinstance(statement, ast.Pass)


def _writes_tensor(call: ast.expr) -> bool:
    """y.index_add_(...), not found.append(...), which is there or not by the branch"""
    name = call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
    return name in UPDATES or (name.endswith("_") and not name.endswith("__"))


def _is_target(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple):
        return all(map(_is_target, target.elts))
    if isinstance(target, ast.Subscript):  # of a dict or a list: a name or an attribute is kept either way
        return not any(isinstance(x, ast.Constant) for x in ast.walk(target.slice))
    return isinstance(target, ast.Name)


def stays(function: ast.AST, work: Sequence[ast.stmt]) -> bool:
    """Whether no name that is assigned here is read elsewhere, but for the value that it had: y = y.index_add(...)."""
    inside = {id(x) for statement in work for x in ast.walk(statement)}
    assigned: set[str] = set()
    for statement in work:
        for x in ast.walk(statement):
            if isinstance(x, ast.NamedExpr):
                return False
            if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store) and not updates(statement, x.id):
                assigned.add(x.id)
    read = {
        x.id
        for x in ast.walk(function)
        if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load) and id(x) not in inside
    }
    return not assigned & read


def updates(statement: ast.stmt, name: str) -> bool:
    """name = name.index_add(...), torch.index_add(name, ...) or torch.where(mask, values, name)"""
    call = statement.value if isinstance(statement, ast.Assign) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    function, owner = call.func.attr, call.func.value
    if function == "where":
        return len(call.args) == 3 and _is_name(call.args[2], name)
    return function in UPDATES and (_is_name(owner, name) or (bool(call.args) and _is_name(call.args[0], name)))


def _is_name(x: ast.expr, name: str) -> bool:
    return isinstance(x, ast.Name) and x.id == name
