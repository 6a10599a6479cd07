"""The critical path of every schedule takes as long as a simulation, however unlike its stages are."""

from __future__ import annotations

import random

import pytest

import autopar.runtime.schedules  # noqa: F401  (fills the table)
from autopar.schedule.critical_path import STEADY, CriticalPath, by_part, steady_pipeline
from autopar.schedule.order import Order
from autopar.schedule.request import SCHEDULES, Costs, Request
from autopar.schedule.simulate import simulate

NAMES = [name for name, entry in SCHEDULES.items() if not entry.searches]
UNLIKE = ("ends", "cut", "random", "halves")


def sizes(name: str) -> list[tuple[int, int]]:
    """(ranks, virtual stages)"""
    parts = (2, 4) if name == "interleaved" else (SCHEDULES[name].virtual_stages,)
    return [(ranks, count) for ranks in (2, 4, 8) for count in parts]


def drawn(draw: random.Random, parts: int, unlike: str) -> Costs:
    """Times of parts. ends: a head and fewer layers at the ends; cut: a layer more on some; random: all; halves: an
    encoder and a decoder."""
    if unlike == "ends":
        size = [draw.uniform(0.5, 1.0), *[1.0] * (parts - 2), draw.uniform(0.5, 1.8)]
    elif unlike == "cut":
        layers = draw.randint(2, 4)
        size = [draw.choice((layers, layers - 1)) / layers for _ in range(parts)]
    elif unlike == "random":
        size = [draw.uniform(0.5, 1.5) for _ in range(parts)]
    else:
        border, other = draw.randrange(parts), draw.uniform(0.5, 1.8)
        size = [1.0 if k < border else other for k in range(parts)]
    backward, weights = draw.uniform(0.8, 2.2), draw.uniform(0.3, 1.0)
    F, B, W = (tuple(times * one for one in size) for times in (1.0, backward, weights))
    return Costs(F, B, W, comm=draw.choice((0.0, 0.01, 0.05)))


def slowest(order: Order, costs: Costs) -> float:
    """Seconds that the slowest rank computes for one microbatch."""
    timeline = simulate(order, costs)
    return max(timeline.busy) / order.microbatches


def steady(name: str, request: Request, order: Order, costs: Costs) -> tuple[int, float, float]:
    times = by_part(costs)
    return steady_pipeline(name, request, lambda path: path.seconds(times), slowest(order, costs), max)


@pytest.mark.parametrize("unlike", UNLIKE)
@pytest.mark.parametrize("name", NAMES)
def test_a_few_microbatches_take_what_a_simulation_says(name: str, unlike: str) -> None:
    draw = random.Random(f"{name} {unlike}")
    for ranks, parts in sizes(name):
        order = SCHEDULES[name].make(Request(ranks, draw.choice((2, 3)) * ranks, parts))
        path, costs = CriticalPath(order), drawn(draw, order.parts, unlike)
        times = by_part(costs)
        assert path.seconds(times) == pytest.approx(simulate(order, costs).cost, rel=1e-12)
        counts = path.path(times)
        assert sum(times[part] * count for part, count in counts.items()) == pytest.approx(path.seconds(times))


@pytest.mark.parametrize("unlike", UNLIKE)
@pytest.mark.parametrize("name", NAMES)
def test_many_microbatches_take_nearly_what_a_simulation_says(name: str, unlike: str) -> None:
    draw = random.Random(f"many {name} {unlike}")
    for ranks, parts in sizes(name):
        request = Request(ranks, draw.choice((4, 8)) * ranks, parts)
        order = SCHEDULES[name].make(request)
        costs = drawn(draw, order.parts, unlike)
        few, seconds, more = steady(name, request, order, costs)
        assert few == STEADY * ranks
        assert seconds + (request.microbatches - few) * more == pytest.approx(simulate(order, costs).cost, rel=0.03)


def test_uneven_parts_make_an_interleaved_pipeline_wait_in_every_round() -> None:
    """The first parts of both ranks are long: at the end of a round, one rank waits for the other's."""
    request, times = Request(2, 16, 2), (3.0, 3.0, 1.0, 1.0)
    order, costs = SCHEDULES["interleaved"].make(request), Costs(times, times, (0.0,) * 4)
    *_, more = steady("interleaved", request, order, costs)
    assert more > 1.12 * slowest(order, costs)


def test_a_schedule_that_does_not_run_says_so() -> None:
    with pytest.raises(ValueError, match="dual_pipe needs an even number of microbatches"):
        steady_pipeline("dual_pipe", Request(4, 6), lambda p: 0.0, 0.0, max)
