"""Captures that a run of the tests shares: what is the same question, what is taken, and what is not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.front_end import capture
from autopar.compile import shared_capture
from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.passes.autodiff import vjp
from tests.support import capture_cache as shared
from tests.support.capture_cache import FEW, CapturedOnce, captured_by_each, captured_once
from tests.support.compile_cache import compiled_by_each
from tests.support.derived_once import DerivedOnce, share_derivatives
from tests.support.ranks import run_ranks


class Scaled(nn.Module):
    """Of as many modules as it takes to be shared."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.linear, self._scale = nn.Linear(4, 4), scale
        self.more = nn.ModuleList(nn.Identity() for _ in range(FEW))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self._scale).square().mean()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CapturedOnce:
    monkeypatch.setenv(shared.FOLDER, str(tmp_path))
    return CapturedOnce()


X = {"x": torch.zeros(2, 4)}


def test_one_capture_for_all_who_ask_the_same(fresh: CapturedOnce) -> None:
    """From memory, and, in another process, from the file: the same graph, which everybody may change."""
    first, again = fresh(Scaled(), X), fresh(Scaled(), X)
    assert (fresh.asked, fresh.made) == (2, 1)
    other = CapturedOnce()
    read = other(Scaled(), X)
    assert (other.asked, other.made) == (1, 0)
    own = capture(Scaled(), X)
    for found in (first, again, read):
        assert str(found.graph) == str(own.graph) and found.meta["signature"] == own.meta["signature"]
        for node, expected in zip(found.graph.nodes, own.graph.nodes, strict=True):
            assert str(node.meta.get("val")) == str(expected.meta.get("val"))
    next(reversed(again.graph.nodes)).args = (None,)
    assert str(fresh(Scaled(), X).graph) == str(own.graph)


def test_another_question_is_captured(fresh: CapturedOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that the forward reads, a shape, a hook, a flag, another code under the same name."""
    hooked, frozen = Scaled(), Scaled()
    hooked.linear.register_forward_hook(lambda module, given, out: out * 2)
    frozen.linear.weight.requires_grad_(False)
    for count, ask in enumerate(
        [
            lambda: fresh(Scaled(), X),
            lambda: fresh(Scaled(3.0), X),
            lambda: fresh(Scaled(), {"x": torch.zeros(3, 4)}),
            lambda: fresh(Scaled(), X, train=False),
            lambda: fresh(hooked, X),
            lambda: fresh(frozen, X),
        ],
        1,
    ):
        ask()
        assert fresh.made == count
    monkeypatch.setattr(Scaled, "forward", lambda self, x: self.linear(x).sum())
    assert "square" not in str(fresh(Scaled(), X).graph)


def test_what_cannot_be_told_is_captured(fresh: CapturedOnce) -> None:
    for _ in range(2):
        with torch.device("cpu"):  # a mode
            fresh(Scaled(), X)
    assert fresh.made == 2


def test_a_small_model_is_captured(fresh: CapturedOnce) -> None:
    for _ in range(2):
        fresh(Scaled().linear, {"input": torch.zeros(2, 4)})
    assert fresh.made == 2


def test_a_damaged_file_is_captured(fresh: CapturedOnce, tmp_path: Path) -> None:
    fresh(Scaled(), X)
    (file,) = tmp_path.rglob("*.step")
    file.write_bytes(file.read_bytes()[:-3])
    other = CapturedOnce()
    other(Scaled(), X)
    assert other.made == 1


def test_what_is_warned_of_is_warned_of_again(fresh: CapturedOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(model: nn.Module, batch: dict[str, Tensor], **how: object) -> object:
        exec(
            compile("warn('seen')", "autopar", "exec"), {"__name__": "autopar.capture.front_end", "warn": warnings.warn}
        )
        return capture(model, batch)

    monkeypatch.setattr(shared, "capture", told)
    for _ in range(2):
        with pytest.warns(UserWarning, match="seen"):
            fresh(Scaled(), X)


def _asked() -> tuple[int, int, bool]:
    compile_model(Scaled(), X, Mesh.of(dp=2))
    before = captured_once.asked, captured_once.made
    compile_model(Scaled(), X, Mesh.of(dp=1))
    with compiled_by_each():
        own = shared_capture.capture is capture
        compile_model(Scaled(), X, Mesh.of(dp=1))
    return captured_once.asked - before[0], captured_once.made - before[1], own


def test_on_ranks() -> None:
    """They share what any process of the run has captured; where each compiles, each captures."""
    assert run_ranks(2, _asked) == [(1, 0, True)] * 2


def test_everybody_captures_within() -> None:
    assert shared_capture.capture is captured_once
    with captured_by_each():
        assert shared_capture.capture is capture
    assert shared_capture.capture is captured_once


def test_derivatives_are_found_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process reads what they are made of, all of it; who has forgotten neither reads nor writes."""
    monkeypatch.setenv(shared.FOLDER, str(tmp_path))
    model, mesh = Scaled(), Mesh.of(dp=2)

    def compiled() -> DerivedOnce:
        share_derivatives(shared.FOLDER)
        known: Any = vjp._KNOWN
        compile_model(model, X, mesh)
        return known

    before = vjp._KNOWN
    try:
        first, second = compiled(), compiled()
    finally:
        vjp._KNOWN = before
    files = list((tmp_path / "derived").iterdir())
    assert first.read == 0 and first and first.keys() == second.keys()
    assert second.read == len(second) == len(files) and dict(first) == dict(second)
    second.clear()
    key, value = next(iter(first.items()))
    assert second.get(key) is None
    second[key] = value
    assert second.get(key) is value and list((tmp_path / "derived").iterdir()) == files
