"""Sentences about prices, and what is said when nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.auto.explanation import chosen_options, compared, gigabytes, seconds
from autopar.cost.layout import Layout
from autopar.cost.layout_price import Cause, Price
from autopar.options import Options


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
