"""Pipelines on GPUs: no schedule stops, however communicators are made and whatever stages edges skip."""

from __future__ import annotations

import re

import pytest

import autopar.runtime.schedules  # noqa: F401  (fills the registry)
from autopar.compile.stages import proven
from autopar.schedule.lowering import lower
from autopar.schedule.order import Order, P2PEdge, ScheduleError
from autopar.schedule.order_checks import Link, check_streams, links
from autopar.schedule.request import SCHEDULES, Costs, Request
from autopar.schedule.simulate import simulate

SIZES = [(p, m) for p in (2, 3, 4, 8) for m in (p, 2 * p, 4 * p)]


def edges_of(parts: int, skips: str) -> list[P2PEdge]:
    """neighbours. decoder: an encoder's half, then a decoder's: its embedding comes from the first part, and every part
    of it takes the encoder's result from where it is made. all: every part takes something from every earlier one."""
    chain, middle = [P2PEdge("x", i, i + 1) for i in range(parts - 1)], parts // 2
    if skips == "neighbours":
        return chain
    if skips == "decoder":
        skipping = [P2PEdge("embedding", 0, middle)] * (middle > 1)
        return chain + skipping + [P2PEdge("encoded", middle - 1, part) for part in range(middle + 1, parts)]
    return chain + [P2PEdge("y", i, j) for j in range(parts) for i in range(j - 1)]


def one_way(link: Link) -> str:
    """All ranks in one group for what goes up, in another one for what goes down."""
    return "up" if link[0] < link[1] else "down"


def made(name: str, ranks: int, microbatches: int) -> Order | None:
    entry = SCHEDULES[name]
    if name.startswith("dual_pipe") and (microbatches < 2 * ranks or (entry.copies > 1 and ranks % 2)):
        return None
    return entry.make(Request(ranks, microbatches, entry.virtual_stages, 2 if entry.sliced else 1, Costs()))


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_stops(name: str) -> None:
    """With a group for every link. In groups of all ranks, every schedule stops somewhere."""
    stopped = 0
    for ranks, microbatches in SIZES:
        order = made(name, ranks, microbatches)
        for skips in ("neighbours", "decoder", "all") if order is not None else ():
            lowered = lower(order, edges_of(order.parts, skips), gathers={0}, reductions={order.parts - 1})
            check_streams(lowered)
            if skips == "all" and ranks == 4:
                stopped += stops(lowered)
    assert stopped


def stops(order: Order) -> bool:
    try:
        check_streams(order, one_way)
    except ScheduleError:
        return True
    return False


def test_what_stops_is_refused_with_every_place() -> None:
    order = made("1f1b", 3, 3)
    assert order is not None
    lowered = lower(order, edges_of(3, "all"))
    simulate(lowered)  # if transfers kept nobody waiting
    with pytest.raises(
        ScheduleError, match=re.escape("wait for each other: 1SB1>0 waits for 2SB2>1 waits for 2SB1>0 waits for 1SB1>0")
    ) as found:
        check_streams(lowered, one_way)
    assert "one communicator per process group" in str(found.value)
    for place in ("[0RB1<1]", "[1RB2<2]", "[2SB1>0]"):
        assert place in str(found.value)
    check_streams(lower(order, edges_of(3, "neighbours")), one_way)


def test_communicators_of_pairs_stop_where_both_directions_share_a_group() -> None:
    """A forward and a backward that cross wait for each other, in a group of any ranks."""
    order = made("1f1b", 3, 3)
    assert order is not None
    lowered = lower(order, edges_of(3, "neighbours"))
    for group, how in ((everything, "per pair of ranks"), (sorted, "per process group")):
        with pytest.raises(ScheduleError, match=f"with one communicator {how}, transfers wait for each other: "):
            check_streams(lowered, lambda link, group=group: str(group(link)))  # type: ignore[misc]


def everything(_: Link) -> str:
    return "all ranks, both ways"


def test_a_compiled_order_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `parallelize` runs has passed both simulations."""
    order = made("1f1b", 3, 3)
    assert order is not None
    asked: list[Order] = []
    monkeypatch.setattr("autopar.compile.stages.check_streams", asked.append)
    edges = edges_of(3, "all")
    assert proven(order, edges) is order and asked == [lower(order, edges)]


def test_how_many_groups() -> None:
    """Two per neighbour and rank; a edge that skips stages adds two to its ends."""

    def most(skips: str) -> tuple[int, int]:
        order = made("1f1b", 8, 8)
        assert order is not None
        found = links(lower(order, edges_of(8, skips)))
        return len(found), max(sum(rank in link for link in found) for rank in range(8))

    assert most("neighbours") == (14, 4)
    assert most("decoder") == (22, 10)
