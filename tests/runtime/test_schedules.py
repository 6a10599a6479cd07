"""Every schedule against the same obligations, and each against the formulas and tables of its paper."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar.runtime.schedules  # noqa: F401  (fills the registry)
from autopar.planner.pipeline.pipeline_plan import chosen
from autopar.report.schedule_summary import run_schedule
from autopar.schedule.formulas import evaluated, expression, of_equal_stages
from autopar.schedule.lowering import lower
from autopar.schedule.order import TRANSFERS, Order, P2PEdge
from autopar.schedule.order_checks import channels, check_streams, counterpart, validate
from autopar.schedule.request import SCHEDULES, Costs, Request
from autopar.schedule.simulate import Timeline, simulate
from tests.support.drawn_timeline import drawn
from tests.support.zero_bubble_tables import TABLE_5, Row

SETTINGS = ((4, 4), (4, 8), (4, 16), (2, 2), (2, 4), (8, 4), (8, 8), (8, 16))  # (ranks, microbatches)

# What a method cannot do; all others take any number of ranks and microbatches.
CAN: dict[str, Callable[[int, int], bool]] = {
    "dual_pipe": lambda p, m: p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
    "dual_pipe_v": lambda p, m: m >= 2 * p,
}


def can(name: str, ranks: int, microbatches: int) -> bool:
    return name not in CAN or CAN[name](ranks, microbatches)


@cache
def make(name: str, ranks: int, microbatches: int, slices: int = 1, chunks: int = 0) -> Order:
    entry = SCHEDULES[name]
    return entry.make(Request(ranks, microbatches, chunks or entry.virtual_stages, slices, Costs()))


def run(name: str, ranks: int, microbatches: int, costs: Costs, **options: int) -> Timeline:
    return simulate(make(name, ranks, microbatches, **options), costs)


def neighbours(order: Order) -> list[P2PEdge]:
    return [P2PEdge("x", i, i + 1) for i in range(order.parts - 1)]


# --- all of them --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, microbatches", SETTINGS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_all(name: str, ranks: int, microbatches: int) -> None:
    """A schedule is complete, keeps its promises in the registry, and runs as well when it is lowered."""
    entry = SCHEDULES[name]
    if not can(name, ranks, microbatches):
        with pytest.raises(ValueError, match=rf"schedule: {name} needs .*found {microbatches}; use"):
            make(name, ranks, microbatches)
        return
    order = make(name, ranks, microbatches, slices=3 if entry.sliced else 1)
    validate(order)
    assert order.name == name == entry.name and entry.summary
    assert order.microbatches == microbatches and len(order.ranks) == ranks
    assert len(order.rank_of) == ranks * entry.virtual_stages * entry.copies and len(order.chains) == entry.copies
    assert order.parts == ranks * entry.virtual_stages
    lowered = lower(order, neighbours(order), gathers={0}, reductions={order.parts - 1})
    validate(lowered)
    for fused in (True, False):
        costs = Costs(F=1.0, B=1.25, W=0.75, comm=0.125)
        assert simulate(lowered, costs, fused=fused).makespan == simulate(order, costs, fused=fused).makespan


@pytest.mark.parametrize("name", SCHEDULES)
def test_odd_sizes(name: str) -> None:
    """Few and uneven numbers of microbatches, one rank, other numbers of slices."""
    for ranks in range(1, 6):
        for microbatches in (*range(1, 2 * ranks + 4), 3 * ranks + 1):
            if can(name, ranks, microbatches):
                order = make(name, ranks, microbatches, slices=2 if SCHEDULES[name].sliced else 1)
                validate(order)
                simulate(order)


def forwards_ahead(edge: tuple[int, int, bool], parts: int) -> P2PEdge | None:
    source, target = sorted((edge[0] % parts, edge[1] % parts))
    return P2PEdge("x", source, target, edge[2]) if source < target else None


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.booleans()), max_size=6),
    st.booleans(),
)
def test_lowered_orders_never_deadlock(
    name: str, ranks: int, microbatches: int, slices: int, skips: list[tuple[int, int, bool]], chain: bool
) -> None:
    """Whatever the edges: every edge of every microbatch is moved, each channel in one order at both ends."""
    if not can(name, ranks, microbatches):
        return
    order = make(name, ranks, microbatches, slices=slices if SCHEDULES[name].sliced else 1)
    edges = [edge for skip in skips if (edge := forwards_ahead(skip, order.parts))]
    edges += neighbours(order) if chain else []
    lowered = lower(order, edges)
    simulate(lowered)
    check_streams(lowered)
    for (source, target), (sends, receives) in channels(lowered).items():
        sent = [lowered.ranks[rank][index] for rank, index in sends]
        received = [lowered.ranks[rank][index] for rank, index in receives]
        assert [counterpart(action) for action in sent] == received and source != target
    moved = [a for row in lowered.ranks for a in row if a.kind in TRANSFERS]
    assert len(moved) == len(set(moved)) == 2 * len(expected_sends(order, edges))
    assert {(a.kind, a.stage, a.peer, a.microbatch, a.slice) for a in moved if a.kind[0] == "S"} == expected_sends(
        order, edges
    )


def expected_sends(order: Order, edges: list[P2PEdge]) -> set[tuple[str, int, int, int, int]]:
    out = set()
    for microbatch, index in enumerate(order.chain_of):
        for edge in edges:
            source, target = order.chains[index][edge.source], order.chains[index][edge.target]
            if order.rank_of[source] != order.rank_of[target]:
                for piece in range(order.slices):
                    out.add(("SF", source, target, microbatch, piece))
                    out |= {("SB", target, source, microbatch, piece)} if edge.gradient else set()
    return out


@pytest.mark.parametrize("name", SCHEDULES)
def test_requests_that_make_no_sense(name: str) -> None:
    entry = SCHEDULES[name]
    with pytest.raises(ValueError, match=f"schedule: {name} needs microbatches >= 1, found 0"):
        entry.make(Request(2, 0, entry.virtual_stages))
    if not entry.sliced:
        with pytest.raises(ValueError, match="found 4 token slices; use tera_pipe or seq1f1b"):
            entry.make(Request(2, 4, entry.virtual_stages, token_slices=4))
    if name not in ("interleaved", "zb_auto"):
        with pytest.raises(ValueError, match="parts per rank, found 3; "):
            entry.make(Request(2, 4, 3))


def test_dual_pipe_has_pairs_of_ranks() -> None:
    with pytest.raises(ValueError, match="needs an even number of ranks, found 3; use zb_v or dual_pipe_v"):
        make("dual_pipe", 3, 6)


DRAWN = {"interleaved": (2, 2), "zb_h1": (3, 4), "zb_h2": (3, 4), "tera_pipe": (2, 2), "seq1f1b": (2, 2)}
DRAWN |= {"gpipe": (2, 4), "1f1b": (2, 4), "zb_v": (2, 4), "dual_pipe": (4, 8), "dual_pipe_v": (2, 4)}


@pytest.mark.parametrize("name", DRAWN)
def test_drawings_in_the_docstrings_are_true(name: str) -> None:
    entry, (ranks, microbatches) = SCHEDULES[name], DRAWN[name]
    slices = 2 if entry.sliced else 1
    apart = any(action.kind == "W" for row in make(name, ranks, microbatches, slices=slices).ranks for action in row)
    costs = Costs(1, 1, 1) if apart else Costs(2, 2, 0) if entry.sliced else Costs(1, 1, 0)
    shown = drawn(run(name, ranks, microbatches, costs, slices=slices)).splitlines()
    text = inspect.getdoc(sys.modules[entry.make.__module__]) or ""
    assert f"p = {ranks}, m = {microbatches}" in text
    text_of_ranks = [line.strip() for line in text.splitlines() if line.startswith("    rank ")]
    assert len(text_of_ranks) == len(shown) and all(len(line) > 40 for line in text_of_ranks)
    assert all(full.startswith(line.removesuffix(" ...")) for full, line in zip(shown, text_of_ranks))


# --- bubbles ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TABLE_5, ids=lambda row: f"{row.model}-{row.microbatches}")
def test_bubbles_of_zero_bubble_table_5(row: Row) -> None:
    costs = Costs(row.F, row.B, row.W, row.comm)
    for name in ("1f1b", "zb_h1", "zb_h2"):
        expected = {"1f1b": row.one_f_one_b, "zb_h1": row.zb_h1, "zb_h2": row.zb_h2}[name]
        assert round(run(name, row.ranks, row.microbatches, costs).bubble, 4) == expected, name


TIMES = Costs(F=1.0, B=1.25, W=0.75)  # together 3


ONLY_EQUAL = ("zb_v", "dual_pipe", "dual_pipe_v")  # formulas for F = B = W alone


@pytest.mark.parametrize("ranks, microbatches", [(p, m) for p, m in SETTINGS if m >= 2 * p])
@pytest.mark.parametrize("name", SCHEDULES)
def test_formulas(name: str, ranks: int, microbatches: int) -> None:
    """Idle time, averaged over ranks, and memory of the fullest one, in closed form."""
    entry = SCHEDULES[name]
    for chunks in (2, 3, 4) if name == "interleaved" else (entry.virtual_stages,):
        sizes = Request(ranks, microbatches, chunks, 3 if entry.sliced else 1)
        for times in (Costs(stash=0.5), *([] if name in ONLY_EQUAL else [replace(TIMES, stash=0.5)])):
            timeline = run_schedule(name, sizes, times)
            idle, peak = timeline.cost * timeline.bubble, max(timeline.memory)
            assert idle == pytest.approx(evaluated(entry.bubble, sizes, times), abs=1e-9), times
            assert peak == pytest.approx(evaluated(entry.memory, sizes, times)), times
            assert of_equal_stages(entry.bubble, timeline) == pytest.approx(evaluated(entry.bubble, sizes, times))


def test_formulas_know_their_symbols() -> None:
    assert str(expression("(p - 1)*(F + B + W)").subs({"F": 1})) == "(p - 1)*(B + W + 1)"
    with pytest.raises(ValueError, match=r"have the symbols p, m, v, n, F, B, W, FB, found q in 'q \+ p'"):
        expression("q + p")


@pytest.mark.parametrize("ranks, microbatches", [(4, 2), (4, 4), (8, 5)])
def test_zero_bubble_with_few_microbatches(ranks: int, microbatches: int) -> None:
    """m <= p: (m+p-1)(F+B) + W, against 1F1B's (m+p-1)(F+B+W)."""
    fill = microbatches + ranks - 1
    assert run("zb_h1", ranks, microbatches, TIMES).makespan == fill * 2.25 + 0.75
    assert run("1f1b", ranks, microbatches, TIMES).makespan == fill * 3.0


@pytest.mark.parametrize("microbatches", range(1, 20))
def test_interleaved_takes_any_number(microbatches: int) -> None:
    """The same bubble where p does not divide m, with few more microbatches alive."""
    ranks, chunks = 4, 2
    timeline = run("interleaved", ranks, microbatches, Costs().divided(chunks))
    if microbatches >= ranks:
        assert timeline.makespan == pytest.approx(microbatches * 3.0 + (ranks - 1) * 3.0 / chunks)
        largest = -(-microbatches // (microbatches // ranks))
        assert timeline.live[0] == min(2 * (ranks - 1) + (chunks - 1) * largest + 1, chunks * microbatches)


def test_1f1b_step_by_step() -> None:
    """F = B = 1, p = 4, m = 6: makespan (m+p-1)(F+B)."""
    timeline = run("1f1b", 4, 6, Costs(1, 1, 0))
    shown = [line.split()[2:] for line in drawn(timeline).replace("BW", "B").splitlines()]
    expected = (
        "F1 F2 F3 F4 -- -- -- B1 F5 B2 F6 B3 -- B4 -- B5 -- B6",
        "-- F1 F2 F3 -- -- B1 F4 B2 F5 B3 F6 B4 -- B5 -- B6 --",
        "-- -- F1 F2 -- B1 F3 B2 F4 B3 F5 B4 F6 B5 -- B6 -- --",
        "-- -- -- F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 -- -- --",
    )
    counted = [[word if word == "--" else f"{word[1]}{int(word[2:]) + 1}" for word in row] for row in shown]
    assert counted == [row.split() for row in expected] and timeline.makespan == 18


@pytest.mark.parametrize("cell, bubble", [(3.0, 6.0), (2.2, 3.6)])
def test_dual_pipe_bubble(cell: float, bubble: float) -> None:
    """(p/2-1)(F&B + B_full - 3W), exact for F = B = W: of ranks all of whose pairs are cells."""
    for name, ranks in (("dual_pipe", 8), ("dual_pipe_v", 4)):
        timeline = run(name, ranks, 20 if ranks == 8 else 10, Costs(FB=cell))
        assert max(timeline.idle) == pytest.approx(bubble)
    assert len(set(run("dual_pipe", 8, 20, Costs()).idle)) == 1, "without overlap, all ranks idle the same"


@pytest.mark.parametrize("ranks", [4, 8])
def test_dual_pipe_unfused(ranks: int) -> None:
    """Actions that wait for their own input only: (p/2-1)(F + B_full - 2W), half of it in the unit case."""
    order = make("dual_pipe", ranks, 20)
    assert simulate(order, fused=False).idle == (ranks / 2 - 1,) * ranks
    assert simulate(order).idle == (ranks - 2.0,) * ranks
    unequal = Costs(F=1.0, B=1.3, W=0.9)
    assert max(simulate(order, unequal).idle) <= (ranks / 2 - 1) * (2 * 2.2 + 1.0 - 3 * 0.9)


def test_tera_pipe_time() -> None:
    """sum t + (p-1) max t: slices of 3, 3 and 2 on three stages, forward only, against 24 in one piece."""
    sliced = make("tera_pipe", 3, 1, slices=3)
    assert simulate(sliced, Costs(B=0.0, W=0.0, scale=(3.0, 3.0, 2.0))).makespan == 14
    assert simulate(make("tera_pipe", 3, 1), Costs(F=8.0, B=0.0, W=0.0)).makespan == 24
    many = make("tera_pipe", 3, 4, slices=3)
    assert simulate(many, Costs(B=0.0, W=0.0, scale=(3.0, 3.0, 2.0))).makespan == 4 * 8 + 2 * 3


def test_slices_shrink_the_bubble() -> None:
    """Equal slices: GPipe's and 1F1B's bubble, divided by their number."""
    whole, sliced = run("gpipe", 4, 8, Costs()), run("tera_pipe", 4, 8, Costs(), slices=4)
    assert sliced.makespan - 24 == pytest.approx((whole.makespan - 24) / 4)
    assert run("seq1f1b", 4, 8, Costs(), slices=4).makespan < run("1f1b", 4, 8, Costs()).makespan


# --- memory -------------------------------------------------------------------------------------------

M_B, M_W = 1.0, 0.5


@pytest.mark.parametrize("ranks, microbatches", [(4, 8), (4, 16), (2, 4), (8, 16), (4, 2)])
def test_peak_memory_of_the_table(ranks: int, microbatches: int) -> None:
    costs = Costs(activations=M_B, stash=M_W)
    p, m, places = ranks, microbatches, range(ranks)

    def memory(name: str, **options: int) -> tuple[float, ...]:
        return run(name, p, m, costs, **options).memory

    assert memory("gpipe") == (m,) * p
    assert memory("1f1b") == tuple(min(m, p - i) for i in places)
    assert run("tera_pipe", p, m, costs, slices=4).live == (4 * m,) * p
    assert run("seq1f1b", p, m, costs, slices=4).live == tuple(min(4 * m, p - i - 1 + 4) for i in places)
    assert all(found <= p * M_B for found in memory("zb_h1"))
    assert all(found <= (2 * p - 1) * M_B for found in memory("zb_h2"))
    assert all(found <= 2 * p for found in run("zb_v", p, m, costs).live)
    if m >= 2 * p:
        assert memory("zb_h1") == tuple((p - i) * M_B + i * M_W for i in places)
        assert memory("zb_h2") == tuple((2 * p - 2 * i - 1) * M_B + 2 * i * M_W for i in places)
        assert run("zb_v", p, m, costs).live == (2 * p,) * p, "halves: p microbatches, on all ranks"
        for chunks in (2, 3):
            held = run("interleaved", p, m, costs, chunks=chunks).memory[0] / chunks
            assert held == pytest.approx((1 + (p - 1) / (p * chunks)) * p)
        assert run("dual_pipe", p, m, costs).live == (p + 1,) * p
        assert max(run("dual_pipe_v", p, m, costs).live) <= 2 * p + 1


# --- the choice ---------------------------------------------------------------------------------------


def test_choice_follows_the_costs() -> None:
    unit = Costs(stash=0.5)
    name, reason = chosen(4, 16, {1: unit, 2: unit.divided(2)})
    assert name == "zb_v" and "zb_v takes 49.5" in reason and "1f1b 57" in reason
    assert "excluded, more memory than 1f1b's 4: interleaved 5.5" in reason
    assert chosen(4, 16, {1: unit})[0] == "zb_h1", "one part per rank is all there is"
    assert chosen(1, 16, {1: unit, 2: unit.divided(2)})[0] == "1f1b", "one rank has no bubble to fill"
    assert chosen(4, 16, {1: Costs(stash=8.0)})[0] == "1f1b", "a stash that large does not fit"


def test_the_simpler_schedule_wins_within_one_percent() -> None:
    name, reason = chosen(2, 200, {1: Costs(), 2: Costs().divided(2)})
    assert name == "1f1b" and "takes 603 per step" in reason and "zb_h1 601" in reason and "within 1 %" in reason
