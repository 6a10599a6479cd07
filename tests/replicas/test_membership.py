"""The record of members: who computes what, and what follows what."""

from __future__ import annotations

import itertools

import pytest

from autopar.runtime.replicas.membership import Record

ALL = Record(3, 10, {0: "a", 1: "b", 2: "c", 3: "d"}, claims=4)


def test_its_text_is_the_same_each_time() -> None:
    record = Record(3, 10, {2: "c", 0: "a"}, (2,), 4)
    again = Record.of(str(record))
    assert again == record and str(again) == str(record)
    assert Record.of("") is None


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_each_shard_is_computed_once(count: int) -> None:
    for size in range(1, count + 1):
        for members in itertools.combinations(range(count), size):
            record = Record(0, 0, dict.fromkeys(members, ""))
            found = [record.shards(index, count, repeat=True) for index in members]
            assert sorted(itertools.chain(*found)) == [*range(count)]
            assert max(map(len, found)) - min(map(len, found)) <= 1, "they share the work"
            assert [record.shards(index, count, repeat=False) for index in members] == [[index] for index in members]


def test_a_step_is_done() -> None:
    assert ALL.next(True, (), {}, 4) == Record(3, 11, ALL.members, (), 4)


def test_a_member_is_lost() -> None:
    assert ALL.next(False, [1], {}, 4) == Record(4, 10, {0: "a", 2: "c", 3: "d"}, (), 4)


def test_one_joins_and_is_fresh_until_a_step_is_done() -> None:
    joined = ALL.next(False, [1], {}, 4).next(True, (), {1: "e"}, 5)
    assert joined == Record(5, 11, {0: "a", 2: "c", 3: "d", 1: "e"}, (1,), 5)
    assert joined.donor == 0
    assert joined.next(False, [0], {}, 5).fresh == (1,), "it still needs the state"
    assert joined.next(False, [0], {}, 5).donor == 2
    assert joined.next(True, (), {}, 5).fresh == ()


def test_one_that_was_not_seen_to_die_is_replaced_by_its_new_start() -> None:
    found = ALL.next(False, [2], {2: "new"}, 5)
    assert found.members == {0: "a", 1: "b", 3: "d", 2: "new"} and found.fresh == (2,)


def test_nobody_has_the_state() -> None:
    joined = ALL.next(True, (), {1: "e"}, 5)
    assert joined.next(False, [0, 2, 3], {}, 5).donor is None
