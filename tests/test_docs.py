"""The generated page of passes says what the passes say."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from torch.fx import GraphModule

from autopar.pass_manager import Context

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """docs/make_passes.py as a module."""
    spec = importlib.util.spec_from_file_location("make_passes", ROOT / "docs" / "make_passes.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Tidy:
    """A pass of this module."""

    name: ClassVar[str] = "tidy"
    requires: ClassVar[tuple[str, ...]] = ("functional",)
    ensures: ClassVar[tuple[str, ...]] = ("tidy", "small")

    def apply(self, gm: GraphModule, ctx: Context) -> GraphModule:
        return gm


def test_a_pass_becomes_a_row_and_a_part(generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "__doc__", "tidy: sweep.\n\nConsumes    dust.\n\n    a --> b\n")
    page = generator.render({"global": [Tidy()]})
    assert "| [tidy](#tidy) | global | `functional` | `tidy`, `small` |" in page
    assert page.endswith("\n## tidy\n\nSweep.\n\n```text\nConsumes    dust.\n\n    a --> b\n```\n")


def test_the_page_is_up_to_date(generator: ModuleType) -> None:
    assert generator.main(["--check"]) == 0, "docs/passes.md is out of date; run make docs"
