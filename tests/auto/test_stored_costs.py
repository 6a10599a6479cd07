"""Costs of layers, and answers, are read from disk by value: the same model compiles nothing again, another does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.auto import choice
from autopar.auto import stored_costs as module
from autopar.auto.choice import Asked, choose
from autopar.auto.costed_model import CostedModel
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import stack_named
from autopar.cost.layout import Layout
from tests.auto.test_choice import LLAMA, SEQ


def test_a_second_process_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "own_digest", lambda: "sources")
    monkeypatch.setattr(module, "changed_autopar", lambda: None)
    placement = Layout(tp=2, sequence_parallel=True).placement
    first = CostedModel.from_config(LLAMA, SEQ).costs(placement)

    def none(*_: Any) -> Any:
        raise AssertionError("compiled")

    again = CostedModel.from_config(LLAMA, SEQ)
    longer = CostedModel.from_config(LLAMA, 2 * SEQ)
    for model in (again, longer):
        monkeypatch.setattr(model, "_compiled_costs", none)
    found = again.costs(placement)
    assert found.placement == placement and found.flops(2.0) == first.flops(2.0)
    assert module._Encoder().encode(found) == module._Encoder().encode(first)
    with pytest.raises(AssertionError, match="compiled"):
        longer.costs(placement)
    with pytest.raises(AssertionError, match="compiled"):
        again.costs(Layout(tp=4, sequence_parallel=True).placement)


def test_a_question_that_is_asked_again_is_not_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "own_digest", lambda: "sources")
    monkeypatch.setattr(module, "changed_autopar", lambda: None)
    cluster, stack = Cluster.parse("H100:1x4"), stack_named("autopar-eager", "H100")

    def said(asked: Asked) -> dict[str, Any]:
        return choose(CostedModel.from_config(LLAMA, SEQ), asked, cluster, stack).as_dict()

    asked = Asked(4, 8, SEQ, {"tp": 1})
    first = said(asked)

    def none(*_: Any) -> Any:
        raise AssertionError("searched")

    monkeypatch.setattr(choice, "search", none)
    assert said(asked) == first
    for other in (replace(asked, batch=16), replace(asked, given={"tp": 2}), replace(asked, finish=2)):
        with pytest.raises(AssertionError, match="searched"):
            said(other)
