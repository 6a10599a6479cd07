"""Sentences about prices, and what is said when nothing fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from autopar.auto.explanation import _changed_beside, chosen_options, compared, gigabytes, neighbour, seconds
from autopar.auto.pricing import Pricing
from autopar.auto.space import Question
from autopar.cost.layout import Layout
from autopar.cost.layout_price import Cause, Price
from autopar.options import Options
from tests.auto.stand_in import StandIn


def priced(memory: float = 40e9, **causes: float) -> Price:
    rows = tuple(Cause(name, "", value, value) for name, value in causes.items())
    return Price(sum(causes.values()), 0.5, 1.0, rows, (memory / 2, memory), 80e9)


NOW = priced(products=8.0, tp=1.0, bubble=1.0)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (priced(products=8.0, tp=1.9, bubble=1.3), "takes 12% longer: 900 ms more exposed exchanges of tp"),
        (
            priced(60e9, products=8.0, tp=1.0, bubble=0.5),
            "takes 5% less time: 500 ms less pipeline bubble, 20.0 GB more memory",
        ),
        (priced(20e9, products=8.0, tp=1.0, bubble=1.0), "takes as long, 20.0 GB less memory"),
        (
            priced(91e9, products=8.0, tp=1.0, bubble=1.0),
            "does not fit: 91.0 GB on stage 1, of 80.0 GB (it would be in the same time)",
        ),
        (priced(91e9, products=8.0, tp=0.0), "does not fit: 91.0 GB on stage 1, of 80.0 GB (it would be 20% faster)"),
        (Price.of_refusal("heads: 3 do not divide"), "does not run: heads: 3 do not divide"),
    ],
)  # fmt: skip
def test_a_neighbour_is_compared_in_a_sentence(other: Price, said: str) -> None:
    assert compared(NOW, other) == said


def test_options_are_those_of_parallelize() -> None:
    layout = Layout(dp=4, tp=2, zero=3, microbatches=4, sequence_parallel=True)
    found = chosen_options(layout)
    assert found == {
        "zero": 3, "sequence_parallel": True, "microbatches": 4, "activation_checkpoint": "none", "loss_chunks": 1,
    }  # fmt: skip
    assert Options(**found) == layout.options()
    assert "zero" not in chosen_options(replace(layout, zero=0))


def test_numbers_are_short() -> None:
    assert [seconds(12.345), seconds(0.0123), gigabytes(81.25e9)] == ["12.3 s", "12.3 ms", "81.2 GB"]


@pytest.mark.parametrize(
    ("name", "value", "also"),
    [
        ("optimizer_cpu_offload", True, ""),
        ("zero", 1, ""),
        ("activation_checkpoint", "full", ""),
        ("micro_batch", 2, ""),
        ("tp", 2, " with sequence_parallel=True"),
        ("pp", 2, " with schedule=zb_h1"),
    ],
)
def test_one_value_is_changed(name: str, value: Any, also: str) -> None:
    """Without a pipeline too, whose schedule is no value that can be kept."""
    asked = Question(ranks=8, batch=64, seq=4096, layers=8)
    choice = Layout(dp=8, zero=3, microbatches=8, micro_batch=1)
    found, _ = neighbour(asked, choice, name, value, cast(Pricing, StandIn()))
    assert found is not None and getattr(found, name) == value
    assert found.zero == (value if name == "zero" else 3)
    assert _changed_beside(name, choice, found) == also
