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
FOLDERS = {"autopar": ROOT / "autopar", **{f"autopar.{n}": ROOT / n for n in ("passes", "runtime", "models")}}


def packages_on_disk() -> set[str]:
    """Dotted names of every folder with Python files; the symlinks in autopar/ are not followed."""
    found = set()
    for name, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            parts = file.parent.relative_to(folder).parts
            if parts[:1] not in (("passes",), ("runtime",), ("models",)):
                found.add(".".join((name, *parts)))
    return found


def test_every_package_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(settings["packages"]) == packages_on_disk()
    assert set(settings["package-dir"]) == set(FOLDERS), "subpackages follow from these four"


def test_every_package_has_an_init_file() -> None:
    for name in packages_on_disk():
        assert (ROOT / "autopar" / Path(*name.split(".")[1:]) / "__init__.py").exists(), name


def test_symlinks_lead_to_the_folders() -> None:
    for name in ("passes", "runtime", "models"):
        link = ROOT / "autopar" / name
        assert link.is_symlink() and link.resolve() == ROOT / name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel built from a copy, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("autopar", "passes", "runtime", "models"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
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
    expected = {"autopar/py.typed", "autopar/report/page.html"}
    for name, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            path = file.relative_to(folder)
            if name != "autopar" or path.parts[0] not in ("passes", "runtime", "models"):
                expected.add(str(Path(*name.split(".")) / path))
    assert expected <= wheel, f"missing from the wheel: {sorted(expected - wheel)}"


def test_wheel_has_nothing_beside_autopar(wheel: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"autopar"}


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
