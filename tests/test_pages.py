"""Pages that start ranks or make a mesh show what their code prints: in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def shown(*pages: str) -> None:
    run = [sys.executable, "docs/run_pages.py", "--check", *pages]
    found = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stdout or found.stderr


def test_the_guide_shows_what_its_code_prints() -> None:
    shown("guide")


@pytest.mark.full
@pytest.mark.parametrize("name", ["memory", "precision", "saving", "experts", "loops", "shapes"])
def test_page_shows_what_its_code_prints(name: str) -> None:
    shown(name)
