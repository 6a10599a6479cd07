"""Lightning's Fabric beside a model on a mesh, as the page shows it. The extra `outside` has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

pytest.importorskip("lightning_fabric")
PAGE = Path(__file__).resolve().parents[2] / "docs/loops.md"


def _losses(axes: dict[str, int]) -> list[float]:
    (text,) = re.findall(r"^```python file=with_fabric.py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "with_fabric"}
    exec(compile(text, "with_fabric.py", "exec"), names)
    return [float(x) for x in names["main"](**axes)]


def test_the_loop_of_the_page_has_the_losses_of_one_process() -> None:
    (alone,) = run_ranks(1, _losses, {"dp": 1})
    for axes in ({"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}):
        for losses in run_ranks(4, _losses, axes, timeout=120.0):
            assert losses == pytest.approx(alone, rel=1e-5)
