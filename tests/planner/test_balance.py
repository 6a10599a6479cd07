"""Cutting a model into parts: the dynamic program against every cut there is, and what a planner expects of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.planner.pipeline.stage_balance import UnitCosts, balance

Counts = tuple[int, ...]


def every_cut(units: int, parts: int) -> Iterator[Counts]:
    for ends in itertools.combinations(range(1, units), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *ends, units)))


def pieces(counts: Sequence[int]) -> list[slice]:
    ends = np.cumsum([0, *counts])
    return [slice(a, b) for a, b in itertools.pairwise(ends.tolist())]


def times(units: list[UnitCosts], counts: Sequence[int]) -> list[float]:
    return [sum(u.time for u in units[p]) for p in pieces(counts)]


def memory(
    units: list[UnitCosts], counts: Sequence[int], in_flight: Sequence[int], rank_of: Sequence[int]
) -> list[int]:
    """Bytes of every rank."""
    found = dict.fromkeys(rank_of, 0)
    for p, m, rank in zip(pieces(counts), in_flight, rank_of, strict=True):
        found[rank] += sum(u.static + m * u.activations for u in units[p])
    return list(found.values())


def bytes_sent(sent: Sequence[int | None], counts: Sequence[int]) -> int | None:
    """None where a boundary is forbidden."""
    cut = [sent[p.stop - 1] for p in pieces(counts)[:-1]]
    return None if None in cut else sum(b for b in cut if b is not None)


UNITS = st.lists(st.builds(UnitCosts, st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=8)


# --- one part per rank ---------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(units=UNITS, parts=st.integers(1, 5), data=st.data())
def test_no_cut_is_better(units: list[UnitCosts], parts: int, data: st.DataObject) -> None:
    """Time, then bytes, then the sum of squares, over all cuts that are allowed; refusals are right, and say enough."""
    sent = data.draw(st.lists(st.none() | st.integers(0, 5), min_size=len(units) - 1, max_size=len(units) - 1))
    limit = data.draw(st.none() | st.integers(0, 60))
    in_flight, ranks = [parts - i for i in range(parts)], list(range(parts))

    def key(counts: Sequence[int]) -> tuple[float, int, float]:
        moved = bytes_sent(sent, counts)
        assert moved is not None
        return max(times(units, counts)), moved, sum(t**2 for t in times(units, counts))

    cuts = [c for c in every_cut(len(units), parts) if bytes_sent(sent, c) is not None]
    fitting = [c for c in cuts if limit is None or max(memory(units, c, in_flight, ranks)) <= limit]
    if fitting:
        found = balance(units, parts, sent=sent, in_flight=in_flight, limit=limit)
        assert tuple(found) in fitting
        assert key(found) == min(map(key, fitting))
        return
    with pytest.raises(ValueError) as refused:
        balance(units, parts, sent=sent, in_flight=in_flight, limit=limit)
    if cuts:
        least = min(max(memory(units, c, in_flight, ranks)) for c in cuts)
        assert f"the least that would do is {least:,} bytes" in str(refused.value)


def test_an_embedding_and_a_head_take_layers_from_their_neighbours() -> None:
    units = [UnitCosts(0.3), *[UnitCosts(1.0)] * 32, UnitCosts(3.5)]
    counts = balance(units, 8)
    assert sum(counts) == 34 and counts[-1] == 2 and max(times(units, counts)) == 5.0
    assert balance([UnitCosts(1.0)] * 6, 3) == [2, 2, 2]


def test_later_parts_take_what_is_over() -> None:
    """They hold fewer microbatches under 1F1B."""
    assert balance([UnitCosts(0.1)] * 126, 16) == [7, 7] + [8] * 14


def test_activations_in_flight_move_layers_to_later_stages() -> None:
    units = [UnitCosts(1.0, static=10, activations=5)] * 16
    in_flight = [4, 3, 2, 1]
    assert balance(units, 4, in_flight=in_flight, limit=120) == [4, 4, 4, 4]
    counts = balance(units, 4, in_flight=in_flight, limit=100)
    assert counts == [3, 4, 4, 5] and max(memory(units, counts, in_flight, range(4))) <= 100


def test_a_forbidden_boundary_is_never_cut() -> None:
    sent = [None if i % 2 == 0 else 8 for i in range(11)]
    assert balance([UnitCosts(1.0)] * 12, 3, sent=sent) == [4, 4, 4]
    assert balance([UnitCosts(1.0)] * 12, 4, sent=sent) == [2, 2, 4, 4]


def test_of_equal_times_the_fewest_bytes() -> None:
    """Between an encoder and a decoder more is sent: 5 layers can be cut as 3 + 2 or as 2 + 3."""
    assert balance([UnitCosts(1.0)] * 5, 2, sent=[9, 9, 1, 9]) == [3, 2]
    assert balance([UnitCosts(1.0)] * 5, 2, sent=[9, 1, 9, 9]) == [2, 3]


def test_126_layers_over_16_stages_take_no_time() -> None:
    rng = np.random.default_rng(0)
    units = [UnitCosts(float(t), 10, 1) for t in rng.uniform(0.5, 1.5, 126)]
    start = time.perf_counter()
    counts = balance(units, 16, in_flight=[16 - i for i in range(16)], limit=220)
    assert time.perf_counter() - start < 1.0
    assert max(memory(units, counts, [16 - i for i in range(16)], range(16))) <= 220


# --- several parts per rank ----------------------------------------------------------------------------------

INTERLEAVED, V = (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)


@settings(max_examples=40, deadline=None)
@given(
    units=st.lists(st.builds(UnitCosts, st.integers(1, 9), st.integers(0, 9)), min_size=6, max_size=10),
    rank_of=st.sampled_from([INTERLEAVED, V]),
)
def test_parts_of_a_rank_share_the_limit(units: list[UnitCosts], rank_of: Counts) -> None:
    """Without a limit the slowest part is as fast as can be. A limit holds per rank, and the least one that a refusal
    names is honoured."""
    ones = [1] * 6
    best = min(max(times(units, c)) for c in every_cut(len(units), 6))
    free = balance(units, 6, rank_of_part=rank_of)
    assert max(times(units, free)) == best
    with pytest.raises(ValueError, match="the least that would do is") as refused:
        balance([UnitCosts(u.time, u.static + 1) for u in units], 6, rank_of_part=rank_of, limit=0)
    least = int(str(refused.value).partition("would do is ")[2].partition(" bytes")[0].replace(",", ""))
    heavier = [UnitCosts(u.time, u.static + 1) for u in units]
    found = balance(heavier, 6, rank_of_part=rank_of, limit=least)
    assert max(memory(heavier, found, ones, rank_of)) <= least


@pytest.mark.parametrize("rank_of", [INTERLEAVED, V])
def test_the_descent_is_near_the_best_rank_time(rank_of: Counts) -> None:
    """On 40 random models of 11 layers: never more than a tenth above the best of all cuts, and equal in most."""
    rng = np.random.default_rng(1)
    equal = 0
    for _ in range(40):
        units = [UnitCosts(int(t)) for t in rng.integers(5, 15, 11)]
        cuts = np.array(list(every_cut(11, 6)))
        ends = np.concatenate([np.zeros((len(cuts), 1), int), cuts.cumsum(1)], 1)
        of_parts = np.diff(np.cumsum([0, *(u.time for u in units)])[ends], axis=1)
        of_ranks = of_parts @ (np.array(rank_of)[:, None] == np.arange(3))
        best = of_ranks.max(1)[of_parts.max(1) == of_parts.max(1).min()].min()
        found = times(units, balance(units, 6, rank_of_part=rank_of))
        here = max(sum(t for t, r in zip(found, rank_of, strict=True) if r == rank) for rank in range(3))
        assert max(found) == of_parts.max(1).min() and here <= 1.1 * best
        equal += here == best
    assert equal >= 30


def test_a_shared_rank_evens_out_a_heavy_head() -> None:
    """The head's rank (2) takes less of the first chunk: 1 layer, and the others 2."""
    units = [*[UnitCosts(1.0)] * 9, UnitCosts(2.0)]
    counts = balance(units, 6, rank_of_part=INTERLEAVED)
    of_ranks = [a + b for a, b in zip(times(units, counts)[:3], times(units, counts)[3:], strict=True)]
    assert max(times(units, counts)) == 2.0 and sorted(of_ranks) == [3.0, 4.0, 4.0]


# --- refusals ------------------------------------------------------------------------------------------------


def test_more_parts_than_layers() -> None:
    with pytest.raises(ValueError, match=r"8 stages need at least 8 layers .* found 6; use at most 6 stages"):
        balance([UnitCosts(1.0)] * 6, 8)
    with pytest.raises(ValueError, match="found 2"):
        balance([UnitCosts(1.0)] * 6, 3, sent=[None, None, 1, None, None])


@pytest.mark.parametrize(("unit", "parts"), [(UnitCosts(-1.0), 1), (UnitCosts(float("nan")), 1), (UnitCosts(1.0), 0)])
def test_senseless_costs(unit: UnitCosts, parts: int) -> None:
    with pytest.raises(ValueError, match="pipeline"):
        balance([unit], parts)
