"""The wheel holds every package, under autopar only."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from autopar.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "autopar"


def test_every_package_has_an_init_file() -> None:
    """A folder without one would be missing from the wheel."""
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel built from a copy, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    shutil.copytree(PACKAGE, source / "autopar", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(folder),
    ]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        return set(archive.namelist())


def test_wheel_has_every_file(wheel: set[str]) -> None:
    expected = {"autopar/py.typed", "autopar/report/html/page.html"}
    expected |= {file.relative_to(ROOT).as_posix() for file in PACKAGE.rglob("*.py")}
    assert expected <= wheel, f"missing from the wheel: {sorted(expected - wheel)}"


def test_wheel_has_nothing_beside_autopar(wheel: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"autopar"}


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
