"""The search for zero-bubble orders against the paper's tables, orders made by hand, and all orders there are."""

from __future__ import annotations

import inspect
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.runtime.schedules import zb_auto
from autopar.runtime.schedules.zb_auto import row_problem, search
from autopar.runtime.schedules.zb_greedy import POLICIES, Policy, greedy
from autopar.runtime.schedules.zb_refine import refine
from autopar.runtime.schedules.zb_search import RowProblem, lower_bound, run_rows
from autopar.schedule.order_checks import validate
from autopar.schedule.request import SCHEDULES, Costs, Request
from autopar.schedule.simulate import Timeline, simulate
from tests.support.zero_bubble_tables import TABLE_5, Row

ALMOST = 1e-9
ZB_1P = (0.1585, 0.1242, 0.0674, 0.1323, 0.1045, 0.0554, 0.1397, 0.1088, 0.0576, 0.1421, 0.1106, 0.0594)
ZB_2P = (0.0433, 0.0039, 0.0026, 0.0029, 0.0022, 0.0010, 0.0066, 0.0054, 0.0028, 0.0038, 0.0029, 0.0018)
HEADS_AND_HIDDEN = {"1.5B": (24, 2304), "6.2B": (32, 4096), "14.6B": (40, 5120), "28.3B": (48, 6144)}


def searched(request: Request) -> Timeline:
    order = SCHEDULES["zb_auto"].make(request)
    validate(order)
    return simulate(order, request.costs or Costs())


def profiled(row: Row) -> Costs:
    """Table 9, in microbatches of memory: M_B is sb(34h + 5as), M_W 32sbh (section 2, table 1)."""
    a, h = HEADS_AND_HIDDEN[row.model]
    stash = 32 * h / (34 * h + 5 * a * 1024)
    return Costs(row.F, row.B, row.W, row.comm, activations=1.0, stash=stash)


FEW = {"1.5B": 64, "6.2B": 32, "14.6B": 48, "28.3B": 96}  # a number of microbatches for each size


def rows_of_table() -> list[Any]:
    """The others take long: they have most microbatches, or most ranks."""
    return [
        pytest.param(
            row, *bubbles, marks=() if FEW[row.model] == row.microbatches else pytest.mark.full,
            id=f"{row.model}-{row.microbatches}",
        )
        for row, *bubbles in zip(TABLE_5, ZB_1P, ZB_2P)
    ]  # fmt: skip


def test_few_have_each_size() -> None:
    assert {row.model for row in TABLE_5 if FEW[row.model] == row.microbatches} == {row.model for row in TABLE_5}


@pytest.mark.parametrize("row, zb_1p, zb_2p", rows_of_table())
def test_table_5(row: Row, zb_1p: float, zb_2p: float) -> None:
    """As good as what the paper found, by hand or by search, within the same memory; often the best there can be."""
    request = Request(row.ranks, row.microbatches, costs=profiled(row))
    one = searched(request)
    assert round(one.bubble, 4) <= min(row.zb_h1, zb_1p)
    assert max(one.memory) <= row.ranks * (1 + ALMOST)
    assert one.cost == pytest.approx(lower_bound(row_problem(request)), rel=ALMOST), "no order has a smaller bubble"
    two = searched(replace(request, memory_limit=2.0 * row.ranks))
    assert round(two.bubble, 4) <= min(row.zb_h2, zb_2p)
    assert max(two.memory) <= 2 * row.ranks * (1 + ALMOST)


def test_no_bubble_for_equal_times_and_twice_the_memory() -> None:
    timeline = searched(Request(8, 24, memory_limit=15.0))
    assert timeline.cost == 24 * 3.0 and max(timeline.memory) <= 15


def test_drawing_in_the_docstring_is_true() -> None:
    shown = searched(Request(3, 4, costs=Costs(stash=0.5), memory_limit=2.0)).show().splitlines()
    text = inspect.getdoc(zb_auto) or ""
    assert [line.strip() for line in text.splitlines() if line.startswith("    rank ")] == shown
    for limit, name in ((3.0, "zb_h1"), (4.0, "zb_h2")):
        found = searched(Request(3, 4, costs=Costs(stash=0.5), memory_limit=limit)).order
        assert found.ranks == SCHEDULES[name].make(Request(3, 4)).ranks


# --- any costs ----------------------------------------------------------------------------------------


def any_costs(rng: random.Random, ranks: int) -> Costs:
    """Even or uneven; W and transfers may take no time; M_W is at most M_B."""
    even = rng.random() < 0.4

    def draw(low: float, high: float) -> tuple[float, ...]:
        one = rng.uniform(low, high)
        return tuple(one if even else rng.uniform(low, high) for _ in range(ranks))

    F, B, W = draw(0.5, 2), draw(0.5, 2), draw(0, 2) if rng.random() < 0.8 else (0.0,) * ranks
    held = draw(0.5, 1.5)
    stash = tuple(part * each for part, each in zip(draw(0, 1), held))
    return Costs(F, B, W, rng.choice((0.0, rng.uniform(0, 1))), activations=held, stash=stash)


def any_request(rng: random.Random, ranks: int, microbatches: int) -> Request:
    costs = any_costs(rng, ranks)
    assert isinstance(costs.activations, tuple)
    limit = rng.choice((None, max(costs.activations) * rng.uniform(1, 2 * ranks)))
    return Request(ranks, microbatches, costs=costs, memory_limit=limit)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 6), st.integers(1, 12))
def test_never_worse_than_by_hand(seed: int, ranks: int, microbatches: int) -> None:
    request = any_request(random.Random(seed), ranks, microbatches)
    assert request.costs is not None
    found, problem = searched(request), row_problem(request)
    assert max(found.memory) <= problem.limit * (1 + ALMOST)
    assert found.cost >= lower_bound(problem) * (1 - ALMOST)
    for name in ("1f1b", "zb_h1", "zb_h2"):
        by_hand = simulate(SCHEDULES[name].make(Request(ranks, microbatches)), request.costs)
        if max(by_hand.memory) <= problem.limit * (1 + ALMOST):
            assert found.cost <= by_hand.cost * (1 + ALMOST), name
        else:
            assert request.memory_limit is not None or name == "zb_h2", "the default is what 1F1B needs"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 6), st.integers(1, 10), st.sampled_from(POLICIES), st.booleans())
def test_greedy_rows_fit_and_end(seed: int, ranks: int, microbatches: int, policy: Policy, large_stash: bool) -> None:
    """Whatever the policy, even where B needs more memory than it frees; and the fast run is the run of `simulate`."""
    rng = random.Random(seed)
    request = any_request(rng, ranks, microbatches)
    problem = row_problem(request)
    if large_stash:
        stash = tuple(each * rng.uniform(1, 2) for each in problem.held)
        problem = replace(problem, stash=stash, limit=max(problem.limit, *stash))
    rows = greedy(problem, policy)
    assert all(problem.fits(rank, row) and len(row) == 3 * microbatches for rank, row in enumerate(rows))
    made = run_rows(problem, rows)
    assert made is not None and made.cost >= lower_bound(problem) * (1 - ALMOST)
    better = refine(problem, rows, 5, lower_bound(problem))
    assert better.cost <= made.cost and all(problem.fits(rank, row) for rank, row in enumerate(better.rows))
    order = zb_auto.one_chain("test", request, map(zb_auto._actions, range(ranks), better.rows))
    assert request.costs is not None
    assert simulate(order, request.costs).cost == pytest.approx(better.cost, rel=ALMOST)


# --- the best there is --------------------------------------------------------------------------------


def all_rows(microbatches: int) -> list[str]:
    """Every row in which B follows F and W follows B."""
    words = [""]
    for _ in range(3 * microbatches):
        words = [word + kind for word in words for kind in "FBW" if may_follow(word, kind, microbatches)]
    return words


def may_follow(word: str, kind: str, microbatches: int) -> bool:
    limit = {"F": microbatches, "B": word.count("F"), "W": word.count("B")}[kind]
    return word.count(kind) < limit


def best_of_all(problem: RowProblem) -> float:
    rows = all_rows(problem.microbatches)
    choices = ([row for row in rows if problem.fits(rank, row)] for rank in range(problem.ranks))
    runs = (run_rows(problem, rows) for rows in itertools.product(*choices))
    return min((made.cost for made in runs if made is not None), default=inf)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks, microbatches", ((2, 3), (3, 2), (4, 2)))
def test_small_cases_are_optimal(ranks: int, microbatches: int, seed: int) -> None:
    problem = row_problem(any_request(random.Random(seed), ranks, microbatches))
    made = run_rows(problem, search(problem, []))
    assert made is not None
    best = best_of_all(problem)
    assert lower_bound(problem) <= best * (1 + ALMOST)
    assert made.cost == pytest.approx(best, rel=ALMOST)


def test_refinement_finds_what_no_policy_finds() -> None:
    row = TABLE_5[0]
    problem = row_problem(Request(8, 24, costs=profiled(row), memory_limit=15.0))
    bound = lower_bound(problem)
    best, rows = min((run_cost(problem, rows := greedy(problem, policy)), rows) for policy in POLICIES)
    assert best > bound * (1 + 1e-4)
    assert refine(problem, rows, 200, bound).cost == pytest.approx(bound, rel=ALMOST)


def run_cost(problem: RowProblem, rows: tuple[str, ...]) -> float:
    made = run_rows(problem, rows)
    assert made is not None
    return made.cost


def test_deadlock() -> None:
    problem = RowProblem(2, (1.0,) * 2, (1.0,) * 2, (1.0,) * 2, 0.0, (1.0,) * 2, (0.0,) * 2, 2.0)
    assert run_rows(problem, ("FBFBWW", "FFBBWW")) is None  # rank 1 wants a second F before it gives the first B


# --- limits -------------------------------------------------------------------------------------------


def test_time_to_find() -> None:
    """The largest of the paper's sizes, with costs for which no order by hand is good."""
    times = tuple(1 + 0.1 * (rank % 3) for rank in range(32))
    costs = Costs(times, times, times, 0.05, stash=0.4)
    before = time.process_time()
    SCHEDULES["zb_auto"].make(Request(32, 256, costs=costs, memory_limit=48.0))
    assert time.process_time() - before < 5


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda costs: {"memory_limit": 1.5, "costs": replace(costs, activations=(1.0, 2.0, 1.0))},
            r"schedule: zb_auto needs a memory_limit of at least 2, for one microbatch on rank 1, found 1\.5; raise",
        ),
        (lambda costs: {"memory_limit": 1.0, "costs": replace(costs, stash=1.25)}, r"at least 1\.25"),
        (lambda costs: {"memory_limit": float("nan")}, "found nan"),
        (lambda costs: {"costs": replace(costs, F=(1.0, 1.0))}, r"costs: F needs one value per part \(3\), found 2"),
        (lambda costs: {"costs": replace(costs, W=-1.0)}, "costs: W needs values of at least 0, found -1"),
        (lambda costs: {"virtual_stages": 2}, "zb_auto runs 1 parts per rank, found 2"),
        (lambda costs: {"token_slices": 2}, "zb_auto runs whole microbatches, found 2 token slices"),
        (lambda costs: {"microbatches": 0}, "zb_auto needs microbatches >= 1, found 0"),
    ],
)
def test_what_cannot_be(change: Callable[[Costs], dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SCHEDULES["zb_auto"].make(replace(Request(3, 4), **change(Costs())))  # type: ignore[arg-type]


def test_the_least_limit_is_enough() -> None:
    timeline = searched(Request(3, 4, costs=Costs(stash=1.25), memory_limit=1.25))
    assert timeline.memory == (1.25,) * 3
