"""The documents say what is so: pages run, generated ones are current, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from torch.fx import GraphModule

from autopar.rewrite.compilation import Compilation
from tests.support.launched import serve

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))


def script(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    """docs/make_passes.py"""
    yield script("make_passes")
    del sys.modules["make_passes"]


@pytest.fixture(scope="module")
def runner() -> Iterator[ModuleType]:
    """docs/run_pages.py"""
    yield script("run_pages")
    del sys.modules["run_pages"]


# --- the page of passes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tidy:
    """A pass of this module."""

    name: ClassVar[str] = "tidy"
    requires: ClassVar[tuple[str, ...]] = ("functional",)
    ensures: ClassVar[tuple[str, ...]] = ("tidy", "small")

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        return gm


def test_a_pass_becomes_a_row_and_a_part(generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "__doc__", "tidy: sweep.\n\nConsumes    dust.\n\n    a --> b\n")
    page = generator.render({"global": [Tidy()]})
    assert "| [tidy](#tidy) | global | `functional` | `tidy`, `small` |" in page
    assert page.endswith("\n## tidy\n\nSweep.\n\n```text\nConsumes    dust.\n\n    a --> b\n```\n")


def test_every_file_of_passes_has_a_part() -> None:
    page = (DOCS / "passes.md").read_text(encoding="utf-8")
    folders = [ROOT / "autopar" / "passes" / name for name in ("partition", "autodiff", "stage", "step")]
    names = [f.stem for folder in folders for f in folder.glob("*.py") if f.stem != "__init__"]
    assert names and not [name for name in names if f"\n## {name}\n" not in page]


def test_the_page_of_passes_is_up_to_date(generator: ModuleType) -> None:
    assert generator.main(["--check"]) == 0, "docs/passes.md is out of date; run make docs"
    assert script("make_options").main(["--check"]) == 0, "docs/options.md is out of date; run make docs"


def test_the_page_of_public_names_is_up_to_date() -> None:
    page = script("make_api")
    assert page.main(["--check"]) == 0, "docs/api.md is out of date; run make docs"
    text = page.render()
    assert "\nparallelize(\n    model: nn.Module,\n    mesh: DeviceMesh | str,\n    *,\n" in text
    assert "\nParallelModule.train_step(*args: Any, **batch: Any) -> Tensor\n    Run forward and backward" in text
    assert "\n## Loader" not in text and "## ShardSampler, which sampler makes" in text


# --- pages that run ---------------------------------------------------------------------------------------


def test_output_goes_behind_its_code(runner: ModuleType) -> None:
    page = "# A\n\n```python\nx = 1\n```\n\n```python\nprint(x + 1)\n```\n\n```text\nold\n```\n\nend\n"
    assert runner.run(page) == page.replace("old", "2")
    assert runner.run(page.replace("\n\n```text\nold\n```", "")) == page.replace("old", "2")


def test_an_error_names_the_line_of_the_page(runner: ModuleType) -> None:
    with pytest.raises(ZeroDivisionError) as found:
        runner.run("one\n\n```python\nx = 1\nx / 0\n```\n", "page")
    assert 'File "page.md", line 5' in "".join(traceback.format_exception(found.value))


def test_what_a_page_adds_is_gone_afterwards(runner: ModuleType) -> None:
    before = dict(runner.RULES)
    page = '```python\nfrom autopar.rules.table import RULES\nRULES["mine"] = None\n```\n'
    assert runner.run(page) == page
    assert before == runner.RULES


@pytest.mark.parametrize("name", ["walkthrough", "adding", "pipelines", "context_parallel"])
def test_page_shows_what_its_code_prints(runner: ModuleType, name: str) -> None:
    serve()
    found = runner.difference(DOCS / f"{name}.md")
    assert not found, f"{found}\n{name}.md shows old output; run python docs/run_pages.py"


# --- all pages --------------------------------------------------------------------------------------------

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


@pytest.mark.parametrize("file", PAGES, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(file: Path) -> None:
    text = _FENCE.sub("", file.read_text(encoding="utf-8"))
    targets = [target.partition("#") for target in _LINK.findall(text) if "://" not in target]
    missing = [path for path, _, _ in targets if path and not (file.parent / path).exists()]
    heads = {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    missing += [f"#{anchor}" for path, _, anchor in targets if not path and anchor not in heads]
    assert not missing


def test_code_of_the_readme_compiles(runner: ModuleType) -> None:
    blocks = [b for b in runner.blocks_of((ROOT / "README.md").read_text(encoding="utf-8")) if b.language == "python"]
    assert blocks
    for block in blocks:
        compile(block.text, "README.md", "exec")


def test_files_that_pages_name_exist() -> None:
    for page in PAGES:
        named = re.findall(r"`((?:autopar|tests|docs)/[\w/]+\.(?:py|md))`", page.read_text())
        assert not [name for name in named if not (ROOT / name).exists()], page.name


def test_modules_that_design_pages_name_exist() -> None:
    there = {path.name for path in (*(ROOT / "autopar").rglob("*.py"), *(ROOT / "tests").rglob("*.py"))}
    for page in (DOCS / "design").glob("*.md"):
        assert not {*re.findall(r"`(\w+\.py)`", page.read_text())} - there, page.name


def test_pages_need_nothing_but_the_installed_package() -> None:
    files = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert not [f.name for f in files if re.search(r"^\s*(from|import) tests\b", f.read_text(), re.MULTILINE)]


def test_errors_that_the_guide_explains_are_said_somewhere() -> None:
    """The words of the first column, as the source has them: texts that go on in the next line are one."""
    page = (DOCS / "guide" / "troubleshooting.md").read_text()
    told = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    files = (ROOT / "autopar").rglob("*.py")
    source = re.sub(r"[\"']\s*\n\s*f?[\"']", "", "\n".join(f.read_text(encoding="utf-8") for f in files))
    assert len(told) > 8 and not [words for words in told if words not in source]
