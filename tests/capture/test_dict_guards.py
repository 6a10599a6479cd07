"""Guards on dicts see every write, with every Python: none of them reports all."""

from __future__ import annotations

from collections import defaultdict

import pytest

from autopar.capture.reads.read_guards import ReadGuards, Where
from tests.capture.test_read_guards import Held


@pytest.mark.parametrize("size", [0, 1, 29, 30, 31, 40])
def test_writes_to_dicts_of_any_size_are_seen(size: int) -> None:
    """To an empty one as a whole, to attributes through their object, names that come and go."""
    held = Held()
    for i in range(size):
        setattr(held, f"more{i}", i)
    for holder in (defaultdict(int, {f"more{i}": i for i in range(size)}), vars(held)):
        names = ["more0"] if size else []
        watch = ReadGuards()
        watch.attributes(holder, names, Where("held", "here"), {"late"})
        watch.done()
        assert watch.holds()
        holder.update(late=2.0)
        assert not watch.holds()
        del holder["late"]
        assert watch.holds()
        if size:
            holder["more0"] = "other"
            assert not watch.holds()
            holder["more0"] = 0
            assert watch.holds()
    held.late = 1.0  # type: ignore[attr-defined]
    assert not watch.holds()
