"""The versions of torch and transformers that autopar is tested with, and the warnings and errors for others.

Differences between versions are handled elsewhere: each in a function of an adapter, which looks for what it needs.
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
# torch 2.11 runs DTensor's own code for operators of a subclass and never calls its __torch_dispatch__: a ShardedTensor
# becomes a DTensor, with other numbers. transformers before 5.10 has other masks and experts.
TRIED = {"torch": ((2, 12), (2, 15)), "transformers": ((5, 10), (5, 24))}


def refuse_older(library: str, oldest: tuple[int, int] | None = None, who: str = "autopar") -> None:
    """Raises ValueError for an installed version older than ``oldest`` (default: the oldest tested)."""
    found, oldest = _installed(library), oldest or TRIED[library][0]
    if found and _minor(found) < oldest:
        raise ValueError(
            f"{who}: needs {library} {_text(oldest)} or newer, found {found}; "
            f"pip install -U '{library}>={_text(oldest)}'"
        )


@functools.cache
def warn_of_newer(library: str) -> None:
    """Warn once, on rank 0, of a version newer than the newest tested."""
    found, (oldest, newest) = _installed(library), TRIED[library]
    if found and _minor(found) > newest and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"autopar: is tested with {library} {_text(oldest)} to {_text(newest)}, found {found}; check your model "
            "with autopar.verify, or install a tested version",
            stacklevel=3,
        )


@contextmanager
def version_errors(library: str) -> Iterator[None]:
    """Context manager: an ImportError or AttributeError due to an untested version is a ValueError that names it."""
    refuse_older(library)
    warn_of_newer(library)
    try:
        yield
    except (ImportError, AttributeError) as error:
        found, (oldest, newest) = _installed(library), TRIED[library]
        if not found or oldest <= _minor(found) <= newest:
            raise
        raise ValueError(
            f"autopar: {library} {found} lacks what autopar needs ({error}); install {_text(oldest)} to {_text(newest)}"
        ) from error


@functools.cache
def _installed(library: str) -> str:
    """The installed version, without importing the library; "" if there is none."""
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
