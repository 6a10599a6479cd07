"""`autopar.ir.meta` lists every key under which autopar notes something on a node or a graph, and no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from autopar.ir import meta
from tests.house.test_architecture import relative, trees

LISTED = {*meta.NODES, *meta.GRAPHS}
ACCESSORS = {"inherit": 2, "remembered": 1}  # function -> the place of its keys among the arguments


def is_meta(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def keys_of(tree: ast.AST) -> Iterator[tuple[ast.expr, int]]:
    """(key, line) of everything that is written to a ``meta`` or read from one, the key as it is written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and is_meta(node.value):
            yield node.slice, node.lineno
        elif isinstance(node, ast.Compare) and any(map(is_meta, node.comparators)):
            yield node.left, node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_meta(node.func.value):
            yield from ((key, node.lineno) for key in node.args[:1])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ACCESSORS:
            yield node.args[ACCESSORS[node.func.id]], node.lineno
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(map(is_meta, targets)):
                dicts = [d for d in ast.walk(node.value) if isinstance(d, ast.Dict)]
                yield from ((key, node.lineno) for d in dicts for key in d.keys if key is not None)


def names_in(key: ast.expr) -> Iterator[str | None]:
    """The keys that an expression names: a string, a tuple or list of them, a constant of `autopar.ir.meta`, or a
    variable (None)."""
    if isinstance(key, ast.Constant):
        yield key.value
    elif isinstance(key, ast.Tuple | ast.List):
        for one in key.elts:
            yield from names_in(one.value if isinstance(one, ast.Starred) else one)
    elif isinstance(key, ast.Name) and key.id.isupper():
        yield from getattr(meta, key.id)
    else:
        yield None


def unlisted(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for key, line in keys_of(tree):
        yield from ((name or f"variable {ast.unparse(key)}", line) for name in names_in(key) if name not in LISTED)


def test_every_key_is_listed() -> None:
    """Keys in variables stand only beside the list."""
    wrong = [
        f"{relative(file)}:{line}: {name}"
        for file, tree in trees().items()
        if relative(file) != "autopar/ir/meta.py"
        for name, line in unlisted(tree)
    ]
    assert not wrong, "not in autopar/ir/meta.py:\n" + "\n".join(wrong)


def test_every_listed_key_is_used() -> None:
    used = {name for tree in trees().values() for key, _ in keys_of(tree) for name in names_in(key)}
    assert not LISTED - used


@pytest.mark.parametrize(
    "text",
    [
        'n.meta["stray"] = 1',
        'x = n.meta["stray"]',
        'gm.meta.get("stray", 0)',
        'n.meta.pop("stray")',
        '"stray" in node.meta',
        'n.meta |= {"stray": 1, "val": 2}',
        'n.meta = {**old.meta, "stray": 1}',
        'inherit(new, old, ("val", "stray"))',
        'remembered(node, "stray", ask)',
        "n.meta[name] = 1",
    ],
)
def test_stray_keys_are_found(text: str) -> None:
    assert len(list(unlisted(ast.parse(text)))) == 1
