"""The registry: order, both ways to add, and the error for an unknown name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autopar.registry import Registry


def test_entries_keep_their_order() -> None:
    numbers: Registry[int] = Registry("number")
    assert numbers.add("two", 2) == 2
    numbers.add("one", 1)
    assert list(numbers) == ["two", "one"] and numbers.items() == [("two", 2), ("one", 1)]
    assert numbers["one"] == 1 and "one" in numbers and "three" not in numbers and len(numbers) == 2


def test_register_decorates() -> None:
    kinds: Registry[type] = Registry("kind")

    @kinds.register("a")
    class A:
        pass

    assert kinds["a"] is A


def test_unknown_name_lists_the_known_ones_and_the_closest() -> None:
    schedules: Registry[str] = Registry("schedule")
    schedules.add("gpipe", "")
    schedules.add("interleaved", "")
    with pytest.raises(
        ValueError, match=r"schedule: unknown name 'interleave'; known are gpipe, interleaved; did you mean 'inter"
    ):
        schedules["interleave"]
    with pytest.raises(ValueError, match="known are none"):
        Registry[int]("axis")["x"]


def test_entries_can_be_added_by_a_module_that_is_imported_when_somebody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "number_two.py").write_text("from tests.house.test_registry import LATER\nLATER.add('two', 2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    LATER.add("one", 1)
    LATER.add_later("two", "number_two")
    LATER.add("three", 3)
    assert list(LATER) == ["one", "two", "three"] and "two" in LATER and "number_two" not in sys.modules
    assert LATER["two"] == 2 and LATER.items() == [("one", 1), ("two", 2), ("three", 3)]
    with pytest.raises(ValueError, match="known are one, two, three; did you mean 'two'"):
        LATER["twoo"]
    with pytest.raises(AssertionError, match="'two' is registered twice"):
        LATER.add_later("two", "number_two")


LATER: Registry[int] = Registry("number")


def test_a_name_has_one_owner() -> None:
    names: Registry[int] = Registry("number")
    names.add("one", 1)
    with pytest.raises(AssertionError, match="registered twice"):
        names.add("one", 1)


def test_what_is_removed_can_be_added_again() -> None:
    table: Registry[int] = Registry("number")
    table.add("one", 1)
    table.add_later("two", "nowhere")
    table.remove("one")
    table.remove("two")
    assert list(table) == [] and "one" not in table
    assert table.add("one", 2) == table["one"] == 2
