"""Shared fixtures: real ranks, one thread, and the warnings that are errors."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("AUTOPAR_SILENCE", "16")  # read at import; eight ranks on two busy cores are slow to beat

from tests.ranks import run_ranks

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: a whole product of cases; runs only with -m full")
    # An op without a backward gives a silently wrong gradient: never only a warning.
    config.addinivalue_line("filterwarnings", "error:.*an autograd kernel was not registered.*:UserWarning")
    # torch 2.13 renamed the *_tensor collectives; the old names are the ones older torch knows too.
    config.addinivalue_line("filterwarnings", "ignore:.*(all_gather_into_tensor|reduce_scatter_tensor).*:FutureWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "full" in (config.getoption("markexpr") or ""):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=full)
    items[:] = [item for item in items if item not in set(full)]


@pytest.fixture(autouse=True, scope="module")
def _old_objects_rest() -> Iterator[None]:
    """What a module leaves alive (caches of torch, compiled graphs) is never looked through again: compiling makes
    objects by the million, and each full collection, here and in every forked rank, would walk over all of it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """``ranks(n, fn, *args, timeout=60)``: results of fn on n gloo ranks (see tests/ranks.py)."""
    return run_ranks
