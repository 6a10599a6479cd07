"""Mistakes that a compiler of this kind can make, planted one by one: each is stopped, and the table says by what.

"types" and "step checks" stop it when the model compiles, before anything runs; "rule soundness" and "numbers" are
tests: of each rule against its operator, and of loss and gradients against one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from autopar.passes.autodiff import vjp
from tests.faulty.planted import (
    STOPPED,
    Subject,
    stopped_by,
    subjects,
)
from tests.faulty.planted_page import PAGE, page
from tests.faulty.planted_table import FAULTS, Fault

EXACT = 1e-10


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Subject]]:
    yield subjects()


@pytest.mark.parametrize("name", ["ddp", "tp", "both", "zero"])
def test_without_a_fault_nothing_stops(made: dict[str, Subject], name: str) -> None:
    found, error = stopped_by(lambda: made[name].error(made[name].compiled))
    assert found == "nothing" and error < EXACT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.area}: {f.name}")
def test_a_planted_fault_is_stopped(fault: Fault, made: dict[str, Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    if fault.area == "conversions":  # derivatives that are known hold those of before
        vjp.forget()
    found, error = fault.run(made, monkeypatch)
    if fault.area == "conversions":
        vjp.forget()
    assert found == fault.stopped_by
    assert found != "numbers" or error > STOPPED


def test_every_area_has_faults_and_few_need_numbers() -> None:
    assert len(FAULTS) >= 40 and len({f.name for f in FAULTS}) == len(FAULTS)
    areas = Counter(f.area for f in FAULTS)
    assert set(areas) == {
        "rules", "conversions", "propagation", "differentiation", "accumulation", "buckets", "step passes", "losses",
    }  # fmt: skip
    by = Counter(f.stopped_by for f in FAULTS)
    assert 2 * by["numbers"] < len(FAULTS), by


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "docs/soundness.md is out of date; run make docs"
