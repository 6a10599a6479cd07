"""Which algorithm is best where: bytes as in the formulas of the papers, break-even points, and measured profiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import autopar.passes.attention  # noqa: F401  (fills the table of algorithms)
from autopar.attention.algorithm import AttentionAlgorithm
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.layouts import LAYOUTS
from autopar.attention.problem import Mask, Problem
from autopar.attention.program import WHOLE, ComputeEvent, Trace, trace
from autopar.cost.attention_costs import estimate, pass_timeline
from autopar.cost.attention_timeline import play
from autopar.cost.hardware import DEFAULT, Device
from autopar.cost.topology import Topology
from autopar.planner.attention_choice import AttentionChoice, check_layout, choose_algorithms, choose_layout, dealt
from tests.support.devices import device

FAST = device("fast", 1e30, 1.0)  # only exchanges take time
RING, MESH, SWITCH = (Topology(kind, 25e9, 0.0) for kind in ("ring", "mesh", "switch"))
CAUSAL = Mask(causal=True)


def problem(size: int, heads: int = 32, kv_heads: int = 0, tokens: int = 512, **more: Any) -> Problem:
    """Self-attention of ``tokens`` per rank."""
    facts: dict[str, Any] = {"batch": 1, "heads": heads, "kv_heads": kv_heads or heads, "queries": tokens * size}
    facts |= {"keys": tokens * size, "width": 128, "value_width": 128, "dtype": torch.bfloat16, "size": size}
    return Problem(**(facts | more))


def sent(name: str, p: Problem, backward: bool) -> dict[str, float]:
    """Bytes per way of rank 1 in units of a rank's queries; in full attention all ranks send as much."""
    q = p.batch * p.heads * p.queries // p.size * p.width * p.dtype.itemsize
    return {way: size / q for way, size in trace(ALGORITHMS[name], p, backward, 1).sent.items()}


# --- bytes ------------------------------------------------------------------------------------------------

CASES = [(4, 32, 32), (8, 32, 32), (8, 32, 8), (8, 64, 8), (8, 32, 1), (16, 32, 8)]


@pytest.mark.parametrize(("n", "heads", "kv_heads"), CASES)
def test_bytes_of_a_pass(n: int, heads: int, kv_heads: int) -> None:
    """Full attention; k and v are 2 q / r. dk and dv are float32 and make N - 1 hops: the last one goes home."""
    p, r, far = problem(n, heads, kv_heads), heads // kv_heads, n - 1
    lse = 2 / 128  # float32, one per row
    expected: dict[str, tuple[dict[str, float], dict[str, float]]] = {
        "ring": ({"up": far * 2 / r}, {"up": (far * 2 + (far - 1) * 4) / r, "home": 4 / r}),
        "bi_ring": (
            {"up": far / r, "down": far / r},
            {"up": (far + (far - 1) * 2) / r, "down": (far + (far - 1) * 2) / r, "home": 4 / r},
        ),
        "token_ring": (
            {"up": far * 1.0, "home": far * (1 + lse)},
            {"up": far * (2 + 2 * lse), "home": far * 2.0},
        ),
        "all_gather": ({"all_gather": far * 2 / r}, {"all_gather": far * 2 / r, "reduce_scatter": far * 4 / r}),
    }
    times = max(1, n // kv_heads)  # key heads are repeated until every rank has one
    port = far / n * 2 * (1 + times / r)
    expected["ulysses"] = ({"all_to_all": port}, {"all_to_all": port})
    for name, passes in expected.items():
        for backward, wanted in enumerate(passes):
            assert sent(name, p, bool(backward)) == pytest.approx(wanted), name


def traces(algorithm: AttentionAlgorithm, problem: Problem, backward: bool) -> list[Trace]:
    return [trace(algorithm, problem, backward, rank) for rank in range(problem.size)]


def computes(found: Trace) -> list[ComputeEvent]:
    return [event for event in found.events if isinstance(event, ComputeEvent)]


@pytest.mark.parametrize("n", [4, 8])
def test_late_keys_and_early_queries_leave_a_zigzag_ring_early(n: int) -> None:
    p = dealt(problem(n, mask=CAUSAL), "zigzag")
    for name, way in (("zigzag_ring", "down"), ("token_ring", "down")):
        half = sum(found.sent[way] for found in traces(ALGORITHMS[name], p, False))
        whole = sum(found.sent["up"] for found in traces(ALGORITHMS["ring"], problem(n), False))
        assert half / whole == pytest.approx(0.75 * (1 if name == "zigzag_ring" else 0.5))


@pytest.mark.parametrize("name", list(ALGORITHMS))
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("mask", [Mask(), CAUSAL, Mask(causal=True, window=700)], ids=str)
def test_all_allowed_pairs_are_computed_once(name: str, layout: str, mask: Mask) -> None:
    p = dealt(problem(4, 8, 4, mask=mask), layout)
    wanted = (
        pass_timeline(ALGORITHMS[name], p, "backward", SWITCH).ideal
        * 4
        * DEFAULT.peak(p.dtype)
        * DEFAULT.attention_share(True)
    )
    computed = sum(work.flops for found in traces(ALGORITHMS[name], p, True) for work in computes(found))
    assert computed == pytest.approx(wanted)


# --- times ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 8])
def test_zigzag_shares_a_causal_triangle_out_evenly(n: int) -> None:
    """In units of the blocks of a contiguous ring, the last rank computes N of them and the mean one (N + 1) / 2."""
    contiguous, zigzag = (dealt(problem(n, mask=CAUSAL), layout) for layout in LAYOUTS)
    calls = [len(computes(found)) for found in traces(ALGORITHMS["ring"], contiguous, False)]
    assert max(calls) / (sum(calls) / n) == pytest.approx(2 * n / (n + 1))
    chunk = zigzag.queries // n // 2
    for found in traces(ALGORITHMS["zigzag_ring"], zigzag, False):
        assert found.pairs == (chunk * (2 * chunk + 1), *[2 * chunk * chunk] * (n - 1))
    long = [dataclasses.replace(p, queries=2**20, keys=2**20) for p in (contiguous, zigzag)]
    slow, fast = (
        estimate(ALGORITHMS[name], p, "forward", Topology("mesh", 1e15, 0.0)).seconds
        for name, p in zip(("ring", "zigzag_ring"), long)
    )
    assert slow / fast == pytest.approx(2 - 1 / n, rel=0.01)  # the triangle on the diagonal costs half a block


A10 = device("A10", 90e12, 0.6e12)


def test_the_profile_of_token_ring() -> None:
    """Four A10, 24000 tokens, 32 heads, float16, causal, zigzag (Wang et al., 2024): the ring sends k and v in 7.6 ms,
    always all of them, beside steps of 3.5 ms, and takes 27.5 ms; queries take 3.5 ms one way while results go the
    other way, which takes 16.2 ms. Bandwidths are those of the profile, too: it has 12.9 and 14 GB/s."""
    p = dealt(problem(4, tokens=6000, dtype=torch.float16, mask=CAUSAL), "zigzag")
    step = pass_timeline(ALGORITHMS["zigzag_ring"], p, "forward", MESH, A10).busy[0] / 4
    assert step == pytest.approx(3.5e-3, rel=0.05)
    full = dataclasses.replace(p, mask=Mask())
    assert sent("ring", full, False) == {"up": 6.0}
    ring = play(p, False, [half(each) for each in traces(ALGORITHMS["ring"], full, False)], mesh(98.3e6 / 7.6e-3), A10)
    token_ring = pass_timeline(ALGORITHMS["token_ring"], p, "forward", mesh(49.2e6 / 3.5e-3), A10)
    assert ring.seconds == pytest.approx(3 * 7.6e-3 + step, rel=0.01)
    assert ring.seconds == pytest.approx(27.5e-3, rel=0.06)
    assert token_ring.seconds == pytest.approx(16.2e-3, rel=0.12)
    assert 1.45 < ring.seconds / token_ring.seconds < 1.8


def mesh(bandwidth: float) -> Topology:
    return Topology("mesh", bandwidth, 10e-6)


def half(found: Trace) -> Trace:
    """As much sent, half as much computed: a causal ring that is not told of the mask."""
    return Trace(
        found.rank,
        tuple(dataclasses.replace(e, flops=e.flops // 2) if isinstance(e, ComputeEvent) else e for e in found.events),
    )


def test_many_ranks_are_told_from_some() -> None:
    """All 12 ranks, simulated, take about as long as the estimate says, which looks at four of them."""
    assert WHOLE < 12
    for mask, layout in ((Mask(), "contiguous"), (CAUSAL, "zigzag")):
        p = dealt(problem(12, tokens=1024, mask=mask), layout)
        for name in ("bi_ring", "hybrid"):
            some = estimate(ALGORITHMS[name], p, "forward", RING)
            every = pass_timeline(ALGORITHMS[name], p, "forward", RING)
            assert some.seconds == pytest.approx(every.seconds, rel=0.25), (name, mask)


# --- choices ----------------------------------------------------------------------------------------------


def chosen(p: Problem, topology: Topology, attention: str = "auto", on: Device = FAST) -> tuple[str, str]:
    found = choose_algorithms(p, attention, topology, on)
    return found.forward, found.backward


def seconds(name: str, p: Problem, topology: Topology, direction: str = "forward") -> float:
    return estimate(ALGORITHMS[name], p, direction, topology, FAST).seconds


def test_both_ways_of_a_ring_help_keys_and_values() -> None:
    p = problem(8, tokens=4096)
    for direction in ("forward", "backward"):
        ring, both = (seconds(name, p, RING, direction) for name in ("ring", "bi_ring"))
        assert both < 0.56 * ring
        assert seconds("bi_ring", p, SWITCH, direction) == pytest.approx(
            seconds("ring", p, SWITCH, direction), rel=0.01
        )


@pytest.mark.parametrize(
    ("kv_heads", "forward", "backward"), [(32, False, True), (16, False, False), (8, False, False)]
)
def test_where_each_rank_reaches_each_other_queries_win_the_backward_only(
    kv_heads: int, forward: bool, backward: bool
) -> None:
    """Against both ways of a ring: never forward if r >= 1, backward if r < 1.5."""
    p = problem(8, 32, kv_heads, tokens=4096)
    assert (seconds("token_ring", p, MESH) < seconds("bi_ring", p, MESH)) is forward
    assert (seconds("token_ring", p, MESH, "backward") < seconds("bi_ring", p, MESH, "backward")) is backward
    pairs = {
        name: choose_algorithms(p, name, MESH, FAST).seconds for name in ("bi_ring", "token_ring", "bi_ring+token_ring")
    }
    assert (min(pairs, key=pairs.__getitem__) == "bi_ring+token_ring") is backward


def test_results_that_go_straight_home_block_a_real_ring() -> None:
    """Over d links each: N^2 / 4 messages instead of N - 1 on every link."""
    p = problem(8, tokens=4096)
    assert seconds("token_ring", p, RING, "backward") > 1.5 * seconds("bi_ring", p, RING, "backward")
    assert chosen(problem(5, 31, tokens=4096), RING) == ("bi_ring", "bi_ring")


def test_passes_are_chosen_one_by_one() -> None:
    """Through ports, with 1.25 queries per key: 1.6 q of keys and values against 2 q of queries and results, but 4.8 q
    with their float32 gradients against 4 q. 31 heads cannot be exchanged."""
    forward, backward = chosen(problem(4, 31, queries=4 * 5120, keys=4 * 4096), SWITCH)
    assert forward != "token_ring" and backward == "token_ring"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "forward", "training"), [(32, 32, 2 / 8, 0.2), (32, 8, 5 / 8, 0.4), (64, 8, 9 / 8, 0.7)]
)
def test_heads_for_sequence_through_a_switch(heads: int, kv_heads: int, forward: float, training: float) -> None:
    """Port bytes against those of a ring: (r + rho) / N forward, and better with the backward."""
    p = problem(8, heads, kv_heads, tokens=4096)
    assert seconds("ulysses", p, SWITCH) / seconds("ring", p, SWITCH) == pytest.approx(forward, rel=0.01)
    both = [choose_algorithms(p, name, SWITCH, FAST).seconds for name in ("ulysses", "ring")]
    assert both[0] / both[1] < training


def test_choices_through_a_switch() -> None:
    assert chosen(problem(8, 32, 8, tokens=4096), SWITCH) == ("ulysses", "ulysses")
    one_key_head = problem(8, 32, 1, tokens=4096)
    assert set(chosen(one_key_head, SWITCH)) <= {"all_gather", "bi_ring", "ring"}
    assert chosen(one_key_head, RING) == ("bi_ring", "bi_ring")


@pytest.mark.parametrize("wires", [RING, MESH, SWITCH], ids=str)
def test_few_queries_go_to_a_long_memory(wires: Topology) -> None:
    p = problem(4, queries=4 * 1024, keys=4 * 65536)
    assert chosen(p, wires) == ("token_ring", "token_ring")


@pytest.mark.parametrize(("kv_heads", "tokens"), [(4, 15000), (32, 120000)])
def test_when_a_ring_is_hidden(kv_heads: int, tokens: int) -> None:
    """If s >= e F / (2 r BW): with 0.6 PFLOP/s and 5 GB/s, 15000 tokens per rank for r = 8, 120000 for r = 1."""
    chip, wires = device("H100", 0.6e15, 3e12), Topology("ring", 5e9, 0.0)
    short, long = (
        estimate(ALGORITHMS["ring"], problem(4, 32, kv_heads, tokens=n), "forward", wires, chip)
        for n in (round(0.9 * tokens), round(1.1 * tokens))
    )
    assert long.exposed < 0.001 * long.seconds and short.exposed > 0.05 * short.seconds


def test_a_choice_says_why() -> None:
    found = choose_algorithms(problem(4, mask=CAUSAL), "auto", SWITCH)
    assert isinstance(found, AttentionChoice)
    assert "ms by estimate, of which" in found.reason and "would take" in found.reason
    assert [row[:2] for row in found.candidates[:2]] == [("all_gather", "forward"), ("all_gather", "backward")]
    refused = choose_algorithms(problem(4, 31, tokens=64), "auto", SWITCH)
    assert any("31 query heads do not divide" in cost for name, _, cost in refused.candidates if name == "ulysses")
    asked = choose_algorithms(problem(4), "bi_ring+token_ring", SWITCH)
    assert (asked.forward, asked.backward, asked.reason) == ("bi_ring", "token_ring", "asked for")
    assert [row[0] for row in asked.candidates] == ["bi_ring", "token_ring"]


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("rign", "attention: unknown name 'rign'; known are .*did you mean 'ring'"),
        ("ring+", "unknown name ''"),
        ("ulysses", "31 query heads do not divide over 4 ranks"),
        ("hybrid+ring", "hybrid exchanges heads for sequence .* found hybrid.ring; use hybrid for both passes"),
    ],
)
def test_names_that_cannot_be_chosen(attention: str, message: str) -> None:
    heads = 32 if "+" in attention else 31
    with pytest.raises(ValueError, match=message):
        choose_algorithms(problem(4, heads), attention, SWITCH)


# --- layouts ----------------------------------------------------------------------------------------------


def test_layouts() -> None:
    causal, full = problem(4, 31, tokens=4096, mask=CAUSAL), problem(4)
    layout, why = choose_layout([causal], "auto", "auto", RING)
    assert layout == "zigzag" and "zigzag takes" in why and "contiguous takes" in why
    why = "no query waits for earlier tokens"
    assert choose_layout([full, full], "auto", "auto", RING) == ("contiguous", why)
    assert choose_layout([causal], "auto", "contiguous", RING) == ("contiguous", "asked for")


def test_layouts_that_do_not_divide() -> None:
    causal, odd = problem(4, tokens=512, mask=CAUSAL), problem(4, tokens=513, mask=CAUSAL)
    layout, why = choose_layout([causal, odd], "ring", "auto", RING)
    assert layout == "contiguous" and "2052 tokens does not divide into 8 chunks for 4 ranks; pad to 2056, or" in why
    with pytest.raises(
        ValueError, match=r"cp_load_balance=zigzag: a sequence of 2052 tokens .* or cp_load_balance=contiguous"
    ):
        choose_layout([odd], "auto", "zigzag", RING)
    with pytest.raises(ValueError, match=r"cp_load_balance=contiguous: a sequence of 2051 tokens .* pad to 2052$"):
        check_layout(dataclasses.replace(odd, queries=2051), "contiguous")


def test_a_short_window_is_best_left_in_place() -> None:
    """Keys of a rank are used by the next one only. The sum over layers counts."""
    window, whole = (problem(4, 32, 4, tokens=4096, mask=Mask(causal=True, window=size)) for size in (512, 0))
    assert choose_layout([window], "ring", "auto", RING)[0] == "contiguous"
    assert choose_layout([window, whole], "ring", "auto", RING)[0] == "zigzag"
