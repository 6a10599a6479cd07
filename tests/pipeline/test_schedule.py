"""Actions and orders as text, checks of orders, simulation and lowering, on small orders written by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.schedule.lowering import lower
from autopar.schedule.order import COMPUTE, TRANSFERS, Action, Order, P2PEdge, ScheduleError, row_text
from autopar.schedule.order_checks import channels, counterpart, validate
from autopar.schedule.request import Costs
from autopar.schedule.simulate import Dependencies, simulate
from tests.support.drawn_timeline import drawn
from tests.support.order_texts import parse_action, parse_row

TWO_RANKS = ("0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F1 1BW1")


def order_of(
    rows: Sequence[str], rank_of: tuple[int, ...] = (), chains: tuple[tuple[int, ...], ...] = (), slices: int = 1
) -> Order:
    """An order from text: one chain over all stages, stage i on rank i, unless told otherwise."""
    ranks = tuple(parse_row(row) for row in rows)
    rank_of = rank_of or tuple(range(len(rows)))
    microbatches = 1 + max(action.microbatch for row in ranks for action in row)
    return Order("test", ranks, chains or (tuple(range(len(rank_of))),), rank_of, (0,) * microbatches, slices)


def rows_of(order: Order) -> list[str]:
    return order.text().splitlines()


# --- text ---------------------------------------------------------------------------------------------

numbers = st.integers(0, 300)
actions = st.one_of(
    st.builds(Action, numbers, st.sampled_from(COMPUTE), numbers, numbers, paired=st.booleans()),
    st.builds(Action, numbers, st.sampled_from(TRANSFERS), numbers, numbers, numbers),
    st.builds(Action, numbers, st.sampled_from(("G", "R"))),
)


@given(st.lists(actions, max_size=6))
def test_rows_can_be_read_back(row: list[Action]) -> None:
    assert parse_row(row_text(row)) == tuple(row)
    assert all(parse_action(str(action)) == action for action in row)


def test_text_forms() -> None:
    text = "2F0 2B0 2W0 2BW0 2F0.1 2SF0>3 3RF0<2 3SB0>2 2RB0<3 2G 2R 0F3&1BW2"
    assert row_text(parse_row(text)) == text
    cell = parse_row("0F3&1BW2.1")
    assert cell == (Action(0, "F", 3, paired=True), Action(1, "BW", 2, 1))


@pytest.mark.parametrize(
    "text", ["", "F0", "2X0", "2F", "2SF0<3", "3RF0>2", "2SF0", "2F0>3", "2G0", "2G&", "2F0.", "-1F0"]
)
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"found {text!r}")):
        parse_action(text)


def test_grid() -> None:
    order = order_of(TWO_RANKS)
    assert order.show({0: 2}).splitlines() == [
        "rank 0   0F0    0F1   [0BW0]  0BW1",
        "rank 1   1F0    1BW0   1F1    1BW1",
    ]
    assert order.show({0: 0, 1: 2}, around=1).splitlines() == [
        "rank 0  [0F0]   0F1    ...",
        "rank 1   ...    1BW0  [1F1]   1BW1",
    ]


# --- what is no order ---------------------------------------------------------------------------------

BAD = {
    "occurs twice": ("0F0 0F1 0BW0 0BW0", "1F0 1BW0 1F1 1BW1"),
    "needs F and BW, or F, B and W; found F": ("0F0 0F1 0BW0", "1F0 1BW0 1F1 1BW1"),
    "found F, B": ("0F0 0F1 0B0 0BW1", "1F0 1BW0 1F1 1BW1"),
    "1BW0 comes before its F": ("0F0 0F1 0BW0 0BW1", "1BW0 1F0 1F1 1BW1"),
    "0W0 comes before its B": ("0F0 0F1 0W0 0B0 0BW1", "1F0 1BW0 1F1 1BW1"),
    "its rank is 1": ("0F0 0F1 0BW0 0BW1 1F0", "1BW0 1F1 1BW1"),
    "names stage 2": ("0F0 0F1 0BW0 0BW1 2F0", "1F0 1BW0 1F1 1BW1"),
    "beyond the": ("0F0 0F1 0BW0 0BW1 0F0.1", "1F0 1BW0 1F1 1BW1"),
    "needs a compute action after it": ("0F0 0F1 0BW0 0BW1&", "1F0 1BW0 1F1 1BW1"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_orders_are_shown_with_the_step(message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)) as caught:
        validate(order_of(BAD[message]))
    grid = str(caught.value).splitlines()[-2:]
    assert [line[:6] for line in grid] == ["rank 0", "rank 1"] and "[" in "".join(grid)


def test_chains_are_checked() -> None:
    order = order_of(TWO_RANKS)
    validate(order)
    for wrong in (((0,), (0, 1)), ((0,),), ((0, 1), ())):
        with pytest.raises(ScheduleError):
            validate(replace(order, chains=wrong))
    with pytest.raises(ScheduleError, match="another chain"):
        validate(replace(order, chains=((0,), (1,))))


def test_deadlock_shows_where_every_rank_stands() -> None:
    order = order_of(["0F0 0BW0 0F1 0BW1", "1F0 1F1 1BW0 1BW1"])
    with pytest.raises(ScheduleError) as caught:
        simulate(order)
    assert str(caught.value).splitlines() == [
        "schedule: test: deadlock: rank 0 at 0BW0 waits for 1BW0; rank 1 at 1F1 waits for 0F1",
        "rank 0   0F0   [0BW0]  0F1    0BW1",
        "rank 1   1F0   [1F1]   1BW0   1BW1",
    ]


def test_deadlock_of_slices_and_missing_actions() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 at 0BW0 waits for 0BW0\.1"):
        simulate(order_of(["0F0 0F0.1 0BW0 0BW0.1"], slices=2))
    with pytest.raises(ScheduleError, match="waits for 0F1, which no rank runs"):
        simulate(order_of(["0F0 0BW0", "1F0 1BW0 1F1 1BW1"]))


def runs(order: Order) -> bool:
    """Whether every rank gets to the end: the rules once more, written down as plainly as can be."""
    at, done, last = [0] * len(order.ranks), set[tuple[str, int, int]](), order.parts - 1
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(order.ranks):
            if at[rank] == len(row):
                continue
            a = row[at[rank]]
            needs = {"F": [("F", a.stage - 1)] if a.stage else [], "W": [("B", a.stage)]}
            needs["B"] = [("F", a.stage), *([("B", a.stage + 1)] if a.stage < last else [])]
            if all((kind, stage, a.microbatch) in done for kind, stage in needs[a.kind]):
                done.add((a.kind, a.stage, a.microbatch))
                at[rank], moved = at[rank] + 1, True
    return at == [len(row) for row in order.ranks]


@given(st.lists(st.permutations(["F0", "B0", "W0", "F1", "B1", "W1"]), min_size=1, max_size=3))
def test_deadlocks_are_found_and_nothing_else(rows: list[list[str]]) -> None:
    order = order_of([" ".join(f"{rank}{word}" for word in row) for rank, row in enumerate(rows)])
    if runs(order):
        validate(order)
        assert simulate(order).makespan >= 6
    else:
        with pytest.raises(ScheduleError, match="deadlock"):
            simulate(order)


# --- simulation ---------------------------------------------------------------------------------------


def test_times_by_hand() -> None:
    """Latency between ranks only; a time per part."""
    timeline = simulate(order_of(TWO_RANKS), Costs(F=(1.0, 2.0), B=(1.0, 3.0), W=0.5, comm=0.25))
    assert timeline.start == ((0.0, 1.0, 7.0, 12.5), (1.25, 3.25, 6.75, 8.75))
    assert timeline.end == ((1.0, 2.0, 8.5, 14.0), (3.25, 6.75, 8.75, 12.25))
    assert timeline.makespan == 14.0 and timeline.cost == 14.0
    assert timeline.busy == (5.0, 11.0) and timeline.idle == (9.0, 3.0)
    assert timeline.bubble == pytest.approx(1 - 8 / 14)


def test_slices_wait_for_each_other_and_share_time() -> None:
    order = order_of(["0F0 0F0.1 0BW0.1 0BW0"], slices=2)
    assert simulate(order).end == ((0.5, 1.0, 2.0, 3.0),)
    assert simulate(order, Costs(scale=(0.75, 0.5))).end == ((0.75, 1.25, 2.25, 3.75),)
    assert simulate(order, Costs(activations=4.0)).memory == (4.0,)
    assert simulate(order_of(["0F0 0F0.1 0BW0.1 0BW0"], slices=2), Costs(tokens=(0.75, 0.5))).memory == (1.25,)


def test_memory_and_live_units() -> None:
    order = order_of(["0F0 0F1 0B0 0F2 0B1 0B2 0W0 0W1 0W2"])
    timeline = simulate(order, Costs(activations=1.0, stash=0.5))
    assert timeline.live == (2,) and timeline.memory == (2.5,)
    assert simulate(order, Costs(activations=1.0, stash=2.0)).memory == (6.0,), "a stash may be larger"
    cell = order_of(["0F0 0BW0&0F1 0BW1"])
    assert simulate(cell).memory == (2.0,), "both halves of a cell are there at once"


def test_fused_and_unfused_cells() -> None:
    order = order_of(["0F0 0F1&0BW0 0BW1", "1F0 1BW0 1F1 1BW1"])
    fused = simulate(order, Costs(FB=2.5))
    assert fused.start[0] == (0.0, 4.0, 4.0, 9.5) and fused.busy[0] == 5.5
    assert fused.end[0] == (1.0, 6.5, 6.5, 11.5)
    unfused = simulate(order, fused=False)
    assert unfused.start[0] == (0.0, 1.0, 4.0, 7.0)


def test_gathers_and_reductions_take_the_time_of_the_costs() -> None:
    order = lower(order_of(TWO_RANKS), [P2PEdge("x", 0, 1)], gathers={0}, reductions={0, 1})
    assert rows_of(order)[0].startswith("0G 0F0") and rows_of(order)[0].endswith("0BW1 0R")
    free, costly = simulate(order), simulate(order, Costs(G=1.0, R=(0.5, 0.25)))
    assert costly.makespan == free.makespan + 1.5 and costly.busy[1] == free.busy[1] + 0.25


def test_costs_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match=r"F needs one value per part \(2\), found 3"):
        simulate(order_of(TWO_RANKS), Costs(F=(1.0, 1.0, 1.0)))
    with pytest.raises(ValueError, match=r"scale needs one value per token slice \(1\), found 2"):
        simulate(order_of(TWO_RANKS), Costs(scale=(0.5, 0.5)))


def test_timeline_as_text() -> None:
    assert drawn(simulate(order_of(TWO_RANKS), Costs(1, 1, 0))).splitlines() == [
        "rank 0  0F0  0F1  --   0BW0 --   0BW1",
        "rank 1  --   1F0  1BW0 1F1  1BW1 --",
    ]


# --- lowering -----------------------------------------------------------------------------------------


def test_lowering_of_two_ranks() -> None:
    """The example in the docstring."""
    order = lower(order_of(TWO_RANKS), [P2PEdge("x", 0, 1), P2PEdge("y", 0, 1, gradient=False)])
    assert rows_of(order) == [
        "0F0 0SF0>1 0RB0<1 0F1 0SF1>1 0RB1<1 0BW0 0BW1",
        "1RF0<0 1F0 1RF1<0 1BW0 1SB0>0 1F1 1BW1 1SB1>0",
    ]
    validate(order)


def test_without_gradient_nothing_comes_back() -> None:
    order = lower(order_of(TWO_RANKS), [P2PEdge("x", 0, 1, gradient=False)])
    assert not {"SB", "RB"} & {action.kind for row in order.ranks for action in row}


def test_skips_go_straight_and_one_rank_needs_no_transfer() -> None:
    """Parts 0 and 3 are on rank 0: the skip 0 -> 3 stays there; 0 -> 2 passes rank 1's part 1 by."""
    order = order_of(["0F0 3F0 3BW0 0BW0", "1F0 2F0 2BW0 1BW0"], rank_of=(0, 1, 1, 0))
    edges = [P2PEdge("x", 0, 1), P2PEdge("x", 0, 2), P2PEdge("z", 0, 3), P2PEdge("y", 2, 3), P2PEdge("w", 1, 2)]
    assert rows_of(lower(order, edges)) == [
        "3RF0<2 0F0 0SF0>1 0SF0>2 3F0 0RB0<2 0RB0<1 3BW0 3SB0>2 0BW0",
        "1RF0<0 2RF0<0 1F0 2RB0<3 2F0 2SF0>3 2BW0 2SB0>0 1BW0 1SB0>0",
    ]
    assert simulate(lower(order, edges)).makespan == simulate(order).makespan


def test_receives_follow_the_sends_of_their_channel() -> None:
    """Rank 1 uses what rank 0 sends in another order: the earlier send is received first."""
    rows = ["0F0 2F1 0F1 2F0 2BW0 2BW1 0BW0 0BW1", "1F1 1F0 3F0 3F1 3BW0 3BW1 1BW0 1BW1"]
    order = order_of(rows, rank_of=(0, 1, 0, 1))
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(order)
    rows = ["0F0 0F1 2F1 2F0 2BW0 2BW1 0BW0 0BW1", "1F1 1F0 3F0 3F1 3BW0 3BW1 1BW0 1BW1"]
    order = lower(order_of(rows, rank_of=(0, 1, 0, 1)), [P2PEdge("x", i, i + 1) for i in range(3)])
    assert rows_of(order)[1].startswith("1RF0<0 1RF1<0 1F1")
    simulate(order)


def test_transfers_that_do_not_match_are_errors() -> None:
    rows = rows_of(lower(order_of(TWO_RANKS), [P2PEdge("x", 0, 1)]))
    missing = order_of([rows[0], rows[1].replace("1SB1>0", "")])
    with pytest.raises(ScheduleError, match="0RB1<1 has no other end"):
        simulate(missing)
    swapped = order_of([rows[0], rows[1].replace("1RF0<0", "?").replace("1RF1<0", "1RF0<0").replace("?", "1RF1<0")])
    with pytest.raises(ScheduleError, match="from rank 0 to rank 1, 0SF0>1 meets 1RF1<0"):
        validate(swapped)
    late = order_of([rows[0], rows[1].replace("1RF0<0 1F0", "1F0 1RF0<0")])
    with pytest.raises(ScheduleError, match="rank 1 at 1F0 waits for 1RF0<0"):
        simulate(late)
    with pytest.raises(ScheduleError, match="stays on rank 0"):
        validate(order_of(["0F0 0SF0>1 1RF0<0 1F0 1BW0 0BW0"], rank_of=(0, 0)))


def test_a_send_inside_a_cell_leaves_when_its_half_is_done() -> None:
    order = lower(order_of(["0F0 0F1&0BW0 0BW1", "1F0 1BW0 1F1 1BW1"]), [P2PEdge("x", 0, 1)])
    assert "0F1&0SF1>1 0BW0" in rows_of(order)[0]
    for fused in (True, False):
        timeline = simulate(order, Costs(comm=0.5), fused=fused)
        sent = order.ranks[0].index(parse_action("0SF1>1"))
        used = order.ranks[1].index(parse_action("1F1"))
        assert timeline.start[1][used] >= timeline.start[0][sent] + 0.5


def test_lowering_needs_a_complete_order() -> None:
    with pytest.raises(ScheduleError, match="needs F and BW"):
        lower(order_of(["0F0 0BW0", "1F0"]), [P2PEdge("x", 0, 1)])


def test_channels_and_counterparts() -> None:
    order = lower(order_of(TWO_RANKS), [P2PEdge("x", 0, 1)])
    assert {channel: len(sends) for channel, (sends, _) in channels(order).items()} == {(0, 1): 2, (1, 0): 2}
    assert all(counterpart(counterpart(a)) == a for row in order.ranks for a in row if a.kind in TRANSFERS)


def test_dependencies_of_a_slice() -> None:
    needs = Dependencies(order_of(["0F0 0F0.1 0BW0.1 0BW0", "1F0 1F0.1 1BW0.1 1BW0"], slices=2))
    assert set(needs(Action(1, "F", 0, 1))) == {("F", 0, 0, 1, -1), ("F", 1, 0, 0, -1)}
    assert set(needs(Action(0, "BW", 0, 0))) == {("F", 0, 0, 0, -1), ("B", 1, 0, 0, -1), ("B", 0, 0, 1, -1)}
    assert needs(Action(0, "W", 0, 1)) == [("B", 0, 0, 1, -1)]
