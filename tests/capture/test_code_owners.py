"""Whose a file of code is, by where it lies and who put it there."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.capture.reads.code_owners import LIBRARY, TRUSTED, USER, owner_of_file


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("/home/me/.local/lib/python3.11/site-packages/lib/a.py", LIBRARY),
        ("/usr/lib/python3/dist-packages/lib/a.py", LIBRARY),
        ("/home/me/clone/.venv/lib/python3.12/site-packages/lib/a.py", LIBRARY),
        ("/home/me/clone/site_packages/a.py", USER),
        ("/home/me/my-site-packages-list/a.py", USER),
        ("<frozen importlib._bootstrap>", TRUSTED),
    ],
)
def test_folders_of_environments(path: str, owner: str) -> None:
    assert owner_of_file(path) == owner


def test_what_an_installer_has_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside which a script may lie that nobody installed."""
    about = tmp_path / "lib-1.0.dist-info"
    about.mkdir()
    (about / "RECORD").write_text("lib/__init__.py,sha256=abc,12\nlib/deep/a.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, owner in (("lib/__init__.py", LIBRARY), ("lib/deep/a.py", LIBRARY), ("lib/b.py", USER), ("me.py", USER)):
        assert owner_of_file(str(tmp_path / name)) == owner
