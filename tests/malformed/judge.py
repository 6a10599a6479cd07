"""Malformed inputs: generated with a seed, judged alike. Each is refused, or gives what is right.

A `Case` is one malformed input: `run` takes it, `right` says of what came back whether it is what it ought to be.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import is_refusal

# What Python, torch and their libraries say when nobody spoke for them.
NOISE = re.compile(
    r"Traceback|<class '|object at 0x|has no attribute|unsupported operand|positional argument|not subscriptable|"
    r"not iterable|Expecting value|KeyError|TypeError|AttributeError|IndexError|AssertionError|JSONDecodeError|"
    r"TreeSpec|struct\.error|\n"
)
PREFIX = re.compile(r"^[a-z_][\w .,/='\-]*: \S")  # "plan: ...", "--stages: ..." without its dashes
MOST = 1200  # characters
# Values of JSON and of Python that belong nowhere in particular.
JSON = (None, True, -1, 0, 7, 2**70, 1.5, 1e400, "", "x", "π🙂", "dp", [], [0], ["a", 1], {}, {"a": 1}, [[]])
ANY = (*JSON, float("nan"), b"x", (), (1,), {1}, object(), print, "x" * 5000, -(2**70), "\0", 1j, range(3))


@dataclass(frozen=True)
class Case:
    """One malformed input, and what of its results is right."""

    name: str
    run: Callable[[], Any]
    right: Callable[[Any], bool]


def failures(cases: Sequence[Case]) -> list[str]:
    """Of each case that was neither refused nor right: what became of it."""
    out = []
    for case in cases:
        try:
            value = case.run()
        except ValueError as error:
            problem = unclear(str(error)) if is_refusal(error) else f"raised {type(error).__name__}: {error}"
        except Exception as error:
            problem = f"raised {type(error).__name__}: {str(error)[:300]}"
        else:
            problem = "" if case.right(value) else f"accepted, gave {str(value)[:200]}"
        if problem:
            out.append(f"{case.name}: {problem}")
    return out


def unclear(text: str) -> str:
    """What is wrong with a message, or ''."""
    if NOISE.search(text):
        return f"noise in {text[:400]!r}"
    if not PREFIX.match(text):
        return f"no word of who speaks in {text[:300]!r}"
    return "" if len(text) < MOST else f"{len(text)} characters: {text[:300]!r}"


# --- broken structures ------------------------------------------------------------------------------------


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything in a structure of dicts and lists."""
    yield path
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from places(value, (*path, key))


def broken(tree: Any, rng: random.Random, values: Sequence[Any] = JSON) -> tuple[str, Any]:
    """(what was done, a copy of a structure with one thing wrong): replaced, left out, added, renamed, twice."""
    tree = copy.deepcopy(tree)
    path = rng.choice([p for p in places(tree) if p])
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    key, how = path[-1], rng.choice(("replaced", "replaced", "replaced", "missing", "extra", "renamed"))
    if how == "replaced":
        parent[key] = rng.choice(values)
    elif how == "missing":
        del parent[key]
    elif isinstance(parent, list):
        parent.insert(key, parent[key] if how == "renamed" else rng.choice(values))
    else:
        parent[f"{key}_"] = parent.pop(key) if how == "renamed" else rng.choice(values)
    return f"{how} at {'.'.join(map(str, path))}: {str(tree)[:0]}{str(parent)[:60]}", tree
