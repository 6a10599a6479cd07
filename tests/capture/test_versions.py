"""What is said of versions that were not tried; operators that a version has no more; the server that cannot start."""

from __future__ import annotations

import importlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.adapters import distributed, versions
from autopar.adapters.operators import packet_named
from autopar.runtime.training import launch as launching
from tests.versions.__main__ import RESULTS, TORCH, TRANSFORMERS, counts, page

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``installed("2.11.0")``: what is found of each library from now on."""
    versions.warn_of_newer.cache_clear()
    yield lambda found: monkeypatch.setattr(versions, "_installed", lambda _: found)
    versions.warn_of_newer.cache_clear()


@pytest.mark.parametrize("found", ["2.11.0", "2.11.0a0+git12", "1.13.1"])
def test_older_ones_are_refused(installed: Any, found: str) -> None:
    installed(found)
    with pytest.raises(ValueError, match=rf"needs torch 2.12 or newer, found {found.replace('+', '.')}; pip install"):
        versions.refuse_older("torch")


@pytest.mark.parametrize("found", ["", "2.12.0", "2.13.0+cpu", "2.15.1", "2.16.0", "3.0.0.dev20270101"])
def test_others_are_not(installed: Any, found: str) -> None:
    installed(found)
    versions.refuse_older("torch")


def test_newer_ones_are_told_of_once_by_one_rank(
    installed: Any, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    installed("2.16.0")
    monkeypatch.setenv("RANK", "1")
    versions.warn_of_newer("torch")
    assert not recwarn.list
    versions.warn_of_newer.cache_clear()
    monkeypatch.setenv("RANK", "0")
    for _ in range(2):
        versions.warn_of_newer("torch")
    (said,) = recwarn.list
    assert "is tested with torch 2.12 to 2.15, found 2.16.0" in str(said.message)


@pytest.mark.parametrize("found", ["2.12.0", "2.15.2", "2.13.0+cpu"])
def test_nothing_is_said_of_those_in_range(installed: Any, recwarn: pytest.WarningsRecorder, found: str) -> None:
    installed(found)
    versions.warn_of_newer("torch")
    assert not recwarn.list


def test_what_an_untried_version_lacks_names_it(installed: Any) -> None:
    installed("5.30.0")
    with (
        pytest.raises(
            ValueError, match=r"transformers 5.30.0 lacks what autopar needs .*no_such.*; install 5.10 to 5.24"
        ),
        pytest.warns(UserWarning, match="is tested with"),
        versions.version_errors("transformers"),
    ):
        importlib.import_module("transformers.no_such_module")
    installed("5.23.0")
    with pytest.raises(ImportError, match="no_such"), versions.version_errors("transformers"):
        importlib.import_module("transformers.no_such_module")


def test_bounds_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    for library, ((major, minor), _) in versions.TRIED.items():
        assert f"{library}>={major}.{minor}" in wanted
    for library, tried in (("torch", TORCH), ("transformers", TRANSFORMERS)):
        assert tuple(f"{a}.{b}" for a, b in versions.TRIED[library]) == (tried[0], tried[-1])


def test_the_page_is_of_the_results(tmp_path: Path) -> None:
    assert (ROOT / "docs" / "versions.md").read_text() == page(json.loads(RESULTS.read_text()))
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="x"/>'
        '<testcase classname="tests.a" name="y"><failure message="no"/></testcase>'
        '<testcase classname="tests.b" name="z"><skipped message="why"/></testcase></testsuite></testsuites>'
    )
    found = counts(report)
    assert found["failed"] == ["tests.a::y"] and found["skipped"] == {"why": 1}
    assert found["files"] == {"tests.a": {"passed": 1, "failed": 1}, "tests.b": {"skipped": 1}}
    text = page({"2.12,5.10": {"found": ["3.11"], "date": "today", **found}})
    assert "| 2.12 | 1 passed, 1 failed, 1 skipped | not run | not run |" in text
    assert "2.12,5.10 failed: `tests.a::y`" in text and "skipped 1: why" in text


def test_only_removed_operators_may_be_missing() -> None:
    assert packet_named("aten", "silu") is torch.ops.aten.silu
    with pytest.raises(AttributeError):
        packet_named("aten", "sillu")


def test_collectives_go_by_the_name_that_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(torch.distributed, distributed.ALL_GATHER, lambda *a, **k: called.append((a, k)))
    distributed.all_gather_single(torch.ones(2), torch.ones(1), async_op=True)
    assert [how for _, how in called] == [{"async_op": True}]
    assert distributed._either("all_reduce", "old") == "all_reduce"
    assert distributed._either("no_such", "all_reduce") == "all_reduce"


class _Ended:
    """A process whose server has ended."""

    def start(self) -> None:
        raise EOFError


def test_why_the_server_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends_at_import.py").write_text("import torch\ntorch.no_such_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    process: Any = _Ended()
    with pytest.raises(AttributeError, match="no_such_name"):
        launching._forked(process, ["autopar.api", "ends_at_import"])
    with pytest.raises(RuntimeError, match="the process that forks ranks has ended"):
        launching._forked(process, ["autopar.api"])
