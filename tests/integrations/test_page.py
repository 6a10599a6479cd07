"""docs/loops.md shows what its code prints. In a process of its own: the page makes a mesh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys
from pathlib import Path
sys.path[:0] = ["docs", "."]
import run_pages
print("DIFFERENCE:" + run_pages.difference(Path("docs/loops.md")))
"""


@pytest.mark.full
def test_the_page_on_loops_shows_what_its_code_prints() -> None:
    found = subprocess.run([sys.executable, "-c", RUN], cwd=ROOT, capture_output=True, text=True, timeout=280)
    said = found.stdout.partition("DIFFERENCE:")[2].strip()
    assert found.returncode == 0 and not said, said or found.stderr
