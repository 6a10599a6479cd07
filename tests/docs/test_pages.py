"""Pages that start ranks or make a mesh show what their code prints: in a process of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from pathlib import Path

import pytest

from tests.support.launched import in_child, serve
from tests.support.preload import warm

ROOT = Path(__file__).resolve().parents[2]
LIKE_EXAMPLES = ("guide/experts", "guide/feeding_data", "guide/long_sequences")  # docs/examples starts the like
GUIDE = tuple(sorted(f"guide/{file.stem}" for file in (ROOT / "docs" / "guide").glob("*.md")))


def checked(folder: str, pages: tuple[str, ...]) -> str:
    """What docs/run_pages.py --check says; "" if it is content. Of several ranks one compiles, as of users' ranks."""
    os.environ["AUTOPAR_CACHE"] = folder
    spec = importlib.util.spec_from_file_location("run_pages", ROOT / "docs" / "run_pages.py")
    assert spec and spec.loader
    runner = importlib.util.module_from_spec(spec)
    sys.modules["run_pages"] = runner  # dataclasses look themselves up
    spec.loader.exec_module(runner)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = runner.main(["--check", *pages])
    return said.getvalue() if status else ""


def shown(folder: Path, *pages: str) -> None:
    serve()
    warm()
    found = in_child(checked, str(folder), pages)
    assert not found, found


def test_the_guide_shows_what_its_code_prints(tmp_path: Path) -> None:
    shown(tmp_path, *(name for name in GUIDE if name not in LIKE_EXAMPLES))


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["memory", "precision", "few_bits", "saving", "experts", "loops", "shapes", "packed_documents", *LIKE_EXAMPLES],
)
def test_page_shows_what_its_code_prints(tmp_path: Path, name: str) -> None:
    shown(tmp_path, name)
