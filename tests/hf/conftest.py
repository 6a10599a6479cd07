"""The marker ``full``: the whole product of models, meshes and options, which runs only when asked for."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: the whole product of models, meshes and options; run it with -m full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "full" in (config.getoption("markexpr") or ""):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=full)
    items[:] = [item for item in items if item not in set(full)]
