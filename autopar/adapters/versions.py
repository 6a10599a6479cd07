"""The versions of torch and transformers that the project was tried with, and what is said of others.

How versions differ is not told here: each difference is a function of an adapter, which looks for what it needs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# (oldest, newest) minor releases that tests ran with: docs/versions.md. pyproject.toml has the oldest as lower bounds.
# torch 2.11 runs DTensor's own code for operators of a subclass, and never asks its __torch_dispatch__: a ShardedTensor
# becomes a DTensor, whose numbers are others. transformers before 5.10 knows other masks and experts.
TRIED = {"torch": ((2, 12), (2, 15)), "transformers": ((5, 10), (5, 24))}


def refuse_older(library: str, oldest: tuple[int, int] | None = None, who: str = "autopar") -> None:
    """Raises ValueError for a version older than ``oldest`` (default: that was tried). One that is not installed is
    none."""
    found, oldest = _installed(library), oldest or TRIED[library][0]
    if found and _minor(found) < oldest:
        raise ValueError(
            f"{who}: needs {library} {_text(oldest)} or newer, found {found}; "
            f"pip install -U '{library}>={_text(oldest)}'"
        )


@functools.cache
def warn_of_newer(library: str) -> None:
    """Of a version newer than the newest that was tried: once, on one rank."""
    found, (oldest, newest) = _installed(library), TRIED[library]
    if found and _minor(found) > newest and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"autopar: was tried with {library} {_text(oldest)} to {_text(newest)}, found {found}; compare with "
            "autopar.verify, or install one of those",
            stacklevel=3,
        )


@contextmanager
def told(library: str) -> Iterator[None]:
    """Within: what a version that was not tried lacks is a ValueError that names the version."""
    refuse_older(library)
    warn_of_newer(library)
    try:
        yield
    except (ImportError, AttributeError) as error:
        found, (oldest, newest) = _installed(library), TRIED[library]
        if not found or oldest <= _minor(found) <= newest:
            raise
        raise ValueError(
            f"autopar: {library} {found} lacks what it needs ({error}); install {_text(oldest)} to {_text(newest)}"
        ) from error


@functools.cache
def _installed(library: str) -> str:
    """Without importing it."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _minor(version: str) -> tuple[int, int]:
    """2.13.0+cpu, 2.14.0a0+git1234 -> its first two numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    assert found is not None, version
    return int(found[1]), int(found[2])


def _text(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))
