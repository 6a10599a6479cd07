"""Families of transformers on two real ranks: as docs/families.md says of them."""

from __future__ import annotations

import re

import pytest

from tests.outside.every_family import EXACT, MESHES, PAGE, families, outcome, rows_of_page, text
from tests.outside.family_facts import LEFT_OUT

ROWS = rows_of_page(PAGE.read_text(encoding="utf-8"))
REFUSED = {family for family, line in ROWS.items() if line.count(f"| {EXACT} ") != len(MESHES)}


def test_the_page_is_of_families_and_nothing_is_wrong() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert (
        ROWS.keys() <= families().keys() and not ROWS.keys() & LEFT_OUT.keys() and LEFT_OUT.keys() <= families().keys()
    )
    assert "wrong" not in page.partition("| family |")[2] and text(ROWS) == page
    assert len(REFUSED) <= len(ROWS) / 10


def test_a_family() -> None:
    assert outcome("squeezebert", "dp=2") == EXACT


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", ROWS)
def test_as_the_page_says(family: str, mesh: str) -> None:
    said = outcome(family, mesh)
    assert said != EXACT and re.match(r"\w[\w ]*: ", said) if family in REFUSED else said == EXACT, said
