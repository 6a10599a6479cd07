"""Pieces through concatenations: a bucket has many parts, each of which may be read in several ways."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from autopar.rules import local_types
from autopar.rules.local_types import PART, SAME, LocalType, through
from autopar.rules.rule import Cat, Rule


def joined(count: int, rows: int = 8) -> Rule:
    """[d0, rows] each, side by side along dim 1; and the last of them again, as a second result."""
    parts = tuple(f"part{i}" for i in range(count))
    operands = tuple((("d0",), (part,)) for part in parts)
    results = ((("d0",), Cat(parts)), (("d0",), (parts[-1],)))
    return Rule(operands, results, sizes={"d0": 2, **dict.fromkeys(parts, rows)})


def every_way(options: Mapping[str, Sequence[local_types.Rows]]) -> list[dict[str, local_types.Rows]]:
    return [dict(zip(options, rows, strict=True)) for rows in itertools.product(*options.values())]


@pytest.mark.parametrize("seed", range(40))
def test_ways_that_are_looked_at_give_all_results(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    known = [(1, 8), (1, 4), (1, 2), (1, 0), (0, 1), (0, 0), SAME, PART]
    operands: list[LocalType] = [frozenset(draw.sample(known, draw.randint(1, 4))) for _ in range(draw.randint(2, 4))]
    rule = joined(len(operands))
    found = through(rule, operands)
    monkeypatch.setattr(local_types, "_readings", every_way)
    assert found == through(rule, operands)


def test_a_bucket_of_many_parts_that_are_read_in_several_ways() -> None:
    """2**200 ways, of which as many matter as there are parts."""
    several: LocalType = frozenset({(1, 8), (1, 4), (1, 0), PART})
    made, last = through(joined(200), [several] * 200)
    assert made == {(1, 8), (1, 0)} and last >= {(1, 8), (1, 4), (1, 0)}
