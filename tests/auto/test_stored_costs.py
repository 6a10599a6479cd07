"""Costs of layers are read from disk by value: the same model compiles nothing again, another does not use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.auto import stored_costs as module
from autopar.auto.costed_model import CostedModel
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
