"""What algorithms do, as their own code says, and how long that takes: hand-made programs and real ones."""

from __future__ import annotations

import pytest
import torch

from autopar.attention.problem import Problem
from autopar.attention.program import CollectiveEvent, ComputeEvent, Event, ExchangeEvent, Trace, WaitEvent
from autopar.cost.attention_timeline import CALL, TILE, compute_seconds, efficiency, play
from autopar.cost.topology import Topology
from tests.support.devices import device

# One second is 10 units of products (kernel overheads vanish), a link moves 1 byte per second.
DEVICE = device("test", 10e18, 1.0)
HUGE = 1 << 40


def problem(size: int, queries: int = 64, **more: object) -> Problem:
    facts = {"batch": 1, "heads": 8, "kv_heads": 8, "queries": queries, "keys": queries, "width": 4, "value_width": 4}
    return Problem(**{**facts, "dtype": torch.bfloat16, "size": size, **more})  # type: ignore[arg-type]


def work(seconds: float) -> ComputeEvent:
    return ComputeEvent(HUGE, HUGE, 1, round(seconds * 10e18))


def seconds(topology: Topology, *programs: list[Event], size: int = 0) -> float:
    made = [Trace(rank, tuple(events)) for rank, events in enumerate(programs)]
    return play(problem(size or len(made)), False, made, topology, DEVICE).seconds


def ring(rank: int, size: int, count: int, each: int, compute: float, back: int = 0) -> list[Event]:
    """``count`` times: send up what came (and ``back`` bytes down), compute, wait."""
    up, down = (rank + 1) % size, (rank - 1) % size
    events: list[Event] = []
    for step in range(count):
        events.append(ExchangeEvent(2 * step, "up", "k,v", up, each, down, each))
        if back:
            events.append(ExchangeEvent(2 * step + 1, "down", "k,v", down, back, up, back))
        events += [work(compute), WaitEvent(2 * step), *([WaitEvent(2 * step + 1)] if back else [])]
    return [*events, work(compute)]


WIRES = [Topology("ring", 1.0, 0.0), Topology("mesh", 1.0, 0.0), Topology("switch", 1.0, 0.0)]


@pytest.mark.parametrize("wires", WIRES, ids=str)
@pytest.mark.parametrize(("compute", "total"), [(2.0, 4 * 2.0), (5.0, 4 * 5.0), (0.5, 3 * 2.0 + 0.5)])
def test_exchanges_hide_behind_computation(wires: Topology, compute: float, total: float) -> None:
    """Three exchanges of 2 seconds, four steps."""
    programs = [ring(rank, 4, 3, 2, compute) for rank in range(4)]
    assert seconds(wires, *programs) == pytest.approx(total, rel=1e-4)
    assert seconds(wires, programs[0], size=4) == pytest.approx(total, rel=1e-4)  # one rank stands for all


@pytest.mark.parametrize(("wires", "total"), list(zip(WIRES, (2.0, 2.0, 4.0))), ids=str)
def test_both_directions_share_only_a_port(wires: Topology, total: float) -> None:
    programs = [ring(rank, 4, 1, 2, 0.0, back=2) for rank in range(4)]
    assert seconds(wires, *programs) == pytest.approx(total, abs=1e-3)
    assert seconds(wires, programs[0], size=4) == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize(("wires", "total"), list(zip(WIRES, (3 * 6.0, 6.0, 6.0))), ids=str)
def test_a_message_over_a_distance_occupies_all_links_of_a_ring(wires: Topology, total: float) -> None:
    """Everybody sends 6 bytes to rank + 3 of 8: each link carries three messages."""
    programs: list[list[Event]] = [
        [ExchangeEvent(0, "home", "out", (rank + 3) % 8, 6, (rank - 3) % 8, 6), WaitEvent(0)] for rank in range(8)
    ]
    assert seconds(wires, *programs) == pytest.approx(total)
    assert seconds(wires, programs[0], size=8) == pytest.approx(total)


def test_latency_counts_per_hop_on_a_ring() -> None:
    programs: list[list[Event]] = [
        [ExchangeEvent(0, "home", "out", (rank + 2) % 5, 0, (rank - 2) % 5, 0), WaitEvent(0)] for rank in range(5)
    ]
    assert seconds(Topology("ring", 1.0, 0.25), *programs) == pytest.approx(0.5)
    assert seconds(Topology("switch", 1.0, 0.25), *programs) == pytest.approx(0.25)


def test_a_link_is_shared_equally() -> None:
    """On a ring of 4, 0 -> 2 (4 bytes) and 1 -> 2 (2 bytes) share a link: half speed until the short one is there."""
    ring4 = Topology("ring", 1.0, 0.0)
    programs: list[list[Event]] = [
        [ExchangeEvent(0, "up", "x", 2, 4, -1, 0), WaitEvent(0)],
        [ExchangeEvent(0, "home", "y", 2, 2, -1, 0), WaitEvent(0), work(1.0)],
        [
            ExchangeEvent(0, "up", "x", -1, 0, 0, 4),
            ExchangeEvent(1, "home", "y", -1, 0, 1, 2),
            WaitEvent(0),
            WaitEvent(1),
        ],
        [],
    ]
    assert seconds(ring4, *programs) == pytest.approx(6.0)
    played = play(problem(4), False, [Trace(r, tuple(p)) for r, p in enumerate(programs)], ring4, DEVICE)
    ends = {(span.rank, span.what): span.end for span in played.spans}
    assert ends[1, "home"] == pytest.approx(4.0) and ends[0, "up"] == pytest.approx(6.0)


def test_a_way_carries_one_exchange_at_a_time_and_ways_run_side_by_side() -> None:
    mesh = Topology("mesh", 1.0, 0.0)

    def program(rank: int, ways: tuple[str, str]) -> list[Event]:
        peers = [(rank + 1) % 3, (rank + 2) % 3]
        return [
            *(ExchangeEvent(i, way, "x", peers[i], 3, peers[1 - i], 3) for i, way in enumerate(ways)),
            WaitEvent(1),
            WaitEvent(0),
        ]

    assert seconds(mesh, *(program(rank, ("home", "home")) for rank in range(3))) == pytest.approx(6.0)
    assert seconds(mesh, *(program(rank, ("up", "home")) for rank in range(3))) == pytest.approx(3.0)


def test_a_message_waits_for_its_receiver() -> None:
    switch = Topology("switch", 1.0, 0.0)
    late: list[Event] = [work(5.0), ExchangeEvent(0, "up", "x", -1, 0, 0, 2), WaitEvent(0)]
    assert seconds(switch, [ExchangeEvent(0, "up", "x", 1, 2, -1, 0), WaitEvent(0)], late) == pytest.approx(
        7.0, rel=1e-4
    )


@pytest.mark.parametrize(
    ("kind", "wires", "total"),
    [
        ("all_gather", "ring", 3 * 2.0),
        ("all_gather", "switch", 3 * 2.0),
        ("all_gather", "mesh", 2.0),
        ("reduce_scatter", "switch", 3 * 2.0),
        ("all_to_all", "switch", 3 * 2.0),
        ("all_to_all", "mesh", 2.0),
        ("all_to_all", "ring", 3 * 2.0),  # up over each link: one message of 1 hop, two of 2 hops
    ],
)
def test_collectives(kind: str, wires: str, total: float) -> None:
    """Blocks of 2 bytes among 4 ranks."""
    programs: list[list[Event]] = [[CollectiveEvent(0, kind, "x", 2, (0, 1, 2, 3)), WaitEvent(0)] for _ in range(4)]
    assert seconds(Topology(wires, 1.0, 0.0), *programs) == pytest.approx(total)
    assert seconds(Topology(wires, 1.0, 0.0), programs[0], size=4) == pytest.approx(total)


def test_ranks_that_wait_for_one_another_are_named() -> None:
    """Each sends first, over one way, and receives only afterwards."""
    programs: list[list[Event]] = [
        [
            ExchangeEvent(0, "home", "x", 1 - rank, 1, -1, 0),
            WaitEvent(0),
            ExchangeEvent(1, "home", "x", -1, 0, 1 - rank, 1),
            WaitEvent(1),
        ]
        for rank in range(2)
    ]
    with pytest.raises(RuntimeError, match=r"deadlock: rank 0 for Exchange.*; rank 1 for"):
        seconds(Topology(), *programs)


def test_kernels_are_slow_on_small_blocks() -> None:
    assert efficiency(TILE, HUGE) == pytest.approx(0.5) and efficiency(TILE, TILE) == pytest.approx(0.25)
    assert efficiency(HUGE, HUGE) == pytest.approx(1.0)
    assert compute_seconds(ComputeEvent(1, 1, 0, 0), DEVICE, torch.bfloat16, False) == CALL
    slow = device("slow", 1e6, 1.0, float32=500.0, launch=1.0)
    assert compute_seconds(ComputeEvent(HUGE, HUGE, 1, 1000), slow, torch.float32, False) == pytest.approx(3.0)
