"""The scripts of docs/examples run, as they are, on the ranks that their first lines name."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"
SHARED = "corpus"
NAMES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != SHARED)


@contextlib.contextmanager
def as_script(name: str, *arguments: str) -> Iterator[Any]:
    """Within: the script as a module, in a folder of its own, started with these arguments."""
    path, argv, here = list(sys.path), list(sys.argv), os.getcwd()
    sys.path.insert(0, str(FOLDER))
    sys.argv[:] = [f"{name}.py", *arguments]
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found)
    os.chdir(found[0])
    try:
        yield importlib.import_module(name)
    finally:
        os.chdir(here)
        sys.path[:], sys.argv[:] = path, argv
        sys.modules.pop(name, None)


def ran(name: str, *arguments: str) -> Any:
    with as_script(name, *arguments) as script:
        given = [script.arguments()] if hasattr(script, "arguments") else []
        return script.main(*given)


def ranks_of(name: str) -> int:
    """As the first line with torchrun says."""
    return int(re.search(r"torchrun --nproc-per-node (\d)", (FOLDER / f"{name}.py").read_text())[1])  # type: ignore[index]


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("resume", "inference")])
def test_losses_fall(name: str) -> None:
    first, *others = run_ranks(ranks_of(name), ran, name, timeout=120)
    assert len(first) > 3 and first[-1] < first[0] and all(x == first for x in others)


def stopped_and_whole() -> tuple[list[float], list[float]]:
    with as_script("resume") as script:
        sys.argv[1:] = ["--dp", "2", "--until", "2"]
        first = script.main(script.arguments())
        sys.argv[1:] = ["--pp", "2", "--until", "4"]
        then = script.main(script.arguments())
        sys.argv[1:] = ["--tp", "2", "--until", "4", "--folder", "whole"]
        return first + then, script.main(script.arguments())


def test_a_run_goes_on_on_another_mesh() -> None:
    for parts, whole in run_ranks(2, stopped_and_whole, timeout=120):
        assert len(whole) == 4 and parts == pytest.approx(whole, abs=1e-4)


def test_every_rank_answers_alike() -> None:
    (perplexity, text), other = run_ranks(ranks_of("inference"), ran, "inference", "--tokens", "3", timeout=120)
    assert 500 < perplexity < 2000 and text.startswith("A schedule is") and other == (perplexity, text)


def test_each_is_short_and_on_the_page() -> None:
    page = (FOLDER / "README.md").read_text()
    assert len(NAMES) == 10
    for name in NAMES:
        text = (FOLDER / f"{name}.py").read_text()
        assert len(text.splitlines()) <= 60 and f"torchrun --nproc-per-node {ranks_of(name)}" in text
        assert f"[{name}.py]({name}.py) | `torchrun --nproc-per-node {ranks_of(name)} {name}.py" in page
