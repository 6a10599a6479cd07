"""What the attention algorithms send, rank by rank and way by way, equals formulas; and how the work is shared out.

Symbols, in bytes of bfloat16 unless said otherwise: q = o of one rank's queries, kv of its keys and values together,
lse = 4 bytes for each query and head. Sums (dq, dk and dv) travel in float32, twice as wide.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.attend import KernelCall
from autopar.attention.layouts import CONTIGUOUS, ZIGZAG, Blocks
from autopar.attention.problem import Mask, Problem, Span, inner_problem
from autopar.passes.attention.circulate import Circulation, Journey, Trip, journeys, runs, shorter, volume
from autopar.testing.attention_ranks import AttentionFound, Case, attend_and_differentiate
from autopar.testing.thread_comm import ThreadComm

FULL, CAUSAL = Mask(), Mask(causal=True)
SIZES = [2, 3, 4, 8]
ZIGZAG_FORMS = ["zigzag_ring", "token_ring", "hybrid"]


def problem(size: int, mask: Mask, layout: Blocks, **changes: Any) -> Problem:
    """8 tokens on each rank."""
    fields: dict[str, Any] = dict(batch=1, heads=4, kv_heads=2, queries=8 * size, keys=8 * size, width=4, value_width=4)
    fields |= dict(dtype=torch.bfloat16, size=size, mask=mask, query_blocks=layout, key_blocks=layout)
    return Problem(**(fields | changes))


def measured(name: str, p: Problem) -> AttentionFound:
    return attend_and_differentiate(name, name, Case.of(p))


def ways(comm: ThreadComm) -> dict[tuple[str, str], int]:
    """Bytes by way and by what is sent."""
    found: Counter[tuple[str, str]] = Counter()
    for sent in comm.sent:
        found[sent.way, sent.what] += sent.bytes
    return dict(found)


def total(comms: list[ThreadComm], *what: str) -> int:
    """Bytes of some kinds over all ranks."""
    return sum(sent.bytes for comm in comms for sent in comm.sent if sent.what in what)


def units(p: Problem) -> tuple[int, int, int]:
    """q, kv and lse of one rank."""
    rows, columns = p.batch * p.queries // p.size, p.batch * p.keys // p.size
    return 2 * rows * p.heads * p.width, 2 * columns * p.kv_heads * (p.width + p.value_width), 4 * rows * p.heads


# --- full attention: the formula of each algorithm --------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_ring(size: int) -> None:
    """(N - 1) kv; and back again as much for k, v and N - 1 hops for dk, dv: the owner's part does not travel, so the
    last of N - 2 neighbours' hops is followed by one message home."""
    p = problem(size, FULL, CONTIGUOUS)
    _, kv, _ = units(p)
    for comm in measured("ring", p).forward:
        assert ways(comm) == {("up", "k, v"): (size - 1) * kv}
    for comm in measured("ring", p).backward:
        expected = {("up", "k, v"): (size - 1) * kv, ("up", "dk, dv"): (size - 2) * 2 * kv, ("home", "dk, dv"): 2 * kv}
        assert ways(comm) == {key: count for key, count in expected.items() if count}
        assert comm.messages("up", "home") == 2 * (size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_bi_ring(size: int) -> None:
    """Half of a ring's bytes each way."""
    p = problem(size, FULL, CONTIGUOUS)
    _, kv, _ = units(p)
    found = measured("bi_ring", p)
    for comm in found.forward:
        assert ways(comm) == {(way, "k, v"): (size - 1) * kv // 2 for way in ("up", "down")}
    for comm in found.backward:
        expected = {(way, "k, v"): (size - 1) * kv // 2 for way in ("up", "down")}
        expected |= {(way, "dk, dv"): (size - 2) * kv for way in ("up", "down")} | {("home", "dk, dv"): 2 * kv}
        assert ways(comm) == {key: count for key, count in expected.items() if count}


@pytest.mark.parametrize("size", SIZES)
def test_token_ring(size: int) -> None:
    """(N - 1) q one way and (N - 1) (o + lse) home; backward (N - 1) (2q + 2 lse) one way, (N - 1) 2q home."""
    p = problem(size, FULL, CONTIGUOUS)
    q, _, lse = units(p)
    found = measured("token_ring", p)
    for comm in found.forward:
        assert ways(comm) == {("up", "q"): (size - 1) * q, ("home", "out, lse"): (size - 1) * (q + lse)}
        homes = [(sent.target - comm.rank) % size for sent in comm.sent if sent.way == "home"]
        assert homes == [(-hop) % size for hop in range(1, size)], "results go straight home, as far as q has come"
    for comm in found.backward:
        assert ways(comm) == {("up", "q, dout"): (size - 1) * (2 * q + 2 * lse), ("home", "dq"): (size - 1) * 2 * q}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("size", SIZES)
def test_all_gather(size: int, kv_heads: int) -> None:
    """(N - 1) kv whatever the mask; backward again, and (N - 1) 2kv for the sums that are scattered."""
    for mask, layout in ((FULL, CONTIGUOUS), (CAUSAL, ZIGZAG)):
        p = problem(size, mask, layout, kv_heads=kv_heads)
        _, kv, _ = units(p)
        found = measured("all_gather", p)
        for forward, backward in zip(found.forward, found.backward):
            assert ways(forward) == {("all_gather", "k, v"): (size - 1) * kv}
            assert ways(backward) == ways(forward) | {("reduce_scatter", "dk, dv"): (size - 1) * 2 * kv}
            assert forward.most_received <= max(1, size / kv_heads) * kv, "a rank's share at a time, or one head"


@pytest.mark.parametrize("size", [4, 8])
def test_hybrid_is_a_ring_over_groups(size: int) -> None:
    """Between the exchanges of heads: (R - 1) kv of the R groups, with the heads of one rank in it."""
    p = problem(size, FULL, CONTIGUOUS)
    inner = inner_problem(p, ALGORITHMS["hybrid"].head_ranks(p))
    _, kv, _ = units(inner)
    assert inner.size == size // 2 and inner.kv_heads == 1
    for comm in measured("hybrid", p).forward:
        assert ways(comm) == {("up", "k, v"): (inner.size - 1) * kv}


@pytest.mark.parametrize("size", [2, 4])
def test_ulysses_sends_nothing_once_heads_are_exchanged(size: int) -> None:
    found = measured("ulysses", problem(size, CAUSAL, ZIGZAG))
    assert not any(comm.sent for comm in found.forward + found.backward)


# --- what nobody needs does not travel ---------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_zigzag_ring_sends_three_quarters(size: int) -> None:
    p = problem(size, CAUSAL, ZIGZAG)
    _, kv, _ = units(p)
    found, full = measured("zigzag_ring", p), size * (size - 1) * kv
    assert total(found.forward, "k, v") == total(found.backward, "k, v") == 0.75 * full
    assert total(found.backward, "dk, dv") == 0.75 * 2 * full


@pytest.mark.parametrize("size", SIZES)
def test_token_ring_sends_three_quarters_in_zigzag(size: int) -> None:
    """Queries and results of both passes; it turns down by itself."""
    p = problem(size, CAUSAL, ZIGZAG)
    q, _, lse = units(p)
    found, hops = measured("token_ring", p), 0.75 * size * (size - 1)
    assert total(found.forward, "q") == hops * q
    assert total(found.forward, "out, lse") == hops * (q + lse)
    assert total(found.backward, "q, dout") == hops * (2 * q + 2 * lse)
    assert total(found.backward, "dq") == hops * 2 * q
    ways_used = {sent.way for comm in found.forward + found.backward for sent in comm.sent}
    assert ways_used == {"home", "down" if size > 2 else "up"}, "of two ranks both directions are one"


@pytest.mark.parametrize("size", SIZES)
def test_contiguous_causal_keys_end_at_the_last_rank(size: int) -> None:
    """Nothing after the wrap: keys of rank i make N - 1 - i hops up, half of a full ring; queries i hops down."""
    p = problem(size, CAUSAL, CONTIGUOUS)
    q, kv, _ = units(p)
    for comm in measured("ring", p).forward:
        assert comm.bytes("up") == kv * (comm.rank + 1 if comm.rank < size - 1 else 0)
    for comm in measured("token_ring", p).forward:
        assert comm.bytes("down" if size > 2 else "up") == q * (size - comm.rank if comm.rank else 0)


@pytest.mark.parametrize("window", [2, 8, 9, 10, 17, 18, 64])
def test_windows_shorten_the_way(window: int) -> None:
    """A window of w reaches w - 1 tokens back: ceil((w - 1) / s) ranks of s tokens."""
    size, per_rank = 8, 8
    p = problem(size, Mask(causal=True, window=window), CONTIGUOUS)
    _, kv, _ = units(p)
    hops = min(size - 1, -(-(window - 1) // per_rank))
    for comm in measured("ring", p).forward:
        sent = 0 if comm.rank == size - 1 else min(hops, comm.rank + 1)
        assert (comm.bytes("up"), comm.messages("up")) == (sent * kv, sent)


def test_what_a_journey_says() -> None:
    """Zigzag chunks 3 and 4 of rank 3 among four, one token each, in both directions."""
    p = problem(4, CAUSAL, ZIGZAG, queries=8, keys=8)
    early, late = Span(3, 4), Span(4, 5)
    down = journeys(p, Circulation("columns", -1))[3]
    assert down == Journey((Trip(early, (1, 2, 3)), Trip(late, (1, 2, 3))))
    assert down.travelling(1) == down.used(3) == down.ended(3) == (early, late)
    assert down.summed(1) == () and down.summed(2) == down.summed(3) == (early, late)
    rank_1 = journeys(p, Circulation("columns", -1))[1]
    assert rank_1 == Journey((Trip(Span(1, 2), (1, 2, 3)), Trip(Span(6, 7), (1,))))
    assert rank_1.travelling(2) == (Span(1, 2),) and rank_1.ended(1) == (Span(6, 7),)
    rows = journeys(p, Circulation("rows", -1))[1]
    assert rows.trips == (Trip(Span(6, 7), (1, 2, 3)), Trip(Span(1, 2), (1,))), "what goes far stands first"
    assert journeys(p, Circulation("columns", 1))[0].trips == (Trip(Span(0, 1), (1, 2, 3)),), "nobody needs chunk 7"


def test_directions() -> None:
    """Up where it makes no difference, else that in which less travels."""
    assert shorter(problem(4, FULL, ZIGZAG), "rows").direction == 1
    assert shorter(problem(4, CAUSAL, ZIGZAG), "rows").direction == -1
    assert shorter(problem(4, CAUSAL, CONTIGUOUS), "columns").direction == 1
    p = problem(4, CAUSAL, ZIGZAG)
    assert volume(p, Circulation("columns", -1)) == 0.75 * volume(problem(4, FULL, ZIGZAG), Circulation("columns", -1))


def test_halves_of_odd_spans_make_a_whole() -> None:
    span, halves = Span(5, 12), [Circulation("columns", 1, part, 2) for part in (0, 1)]
    assert [half.cut(span) for half in halves] == [Span(5, 8), Span(8, 12)]


def test_runs_join_neighbours() -> None:
    home = (Span(8, 12), Span(0, 4))
    assert runs(home, (Span(8, 12), Span(0, 2))) == [(0, 6)]
    assert runs(home, (Span(0, 4), Span(8, 10))) == [(4, 4), (0, 2)]
    assert runs(home, ()) == []


# --- work and memory -----------------------------------------------------------------------------------------


def pairs_by_step(comm: ThreadComm) -> list[int]:
    """(query, key) pairs between one wait and the next, where there are any."""
    steps = [0]
    for event in comm.events:
        if isinstance(event, KernelCall):
            steps[-1] += event.pairs
        elif event == "wait" and steps[-1]:
            steps.append(0)
    return [pairs for pairs in steps if pairs]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", ZIGZAG_FORMS)
def test_zigzag_makes_all_steps_equal(name: str, size: int) -> None:
    """c = S / 2N: two triangles and a square at home (both chunks in ascending order, so one causal mask is right),
    then 2 c^2 at each step on each rank, forward and backward."""
    p = problem(size, CAUSAL, ZIGZAG)
    if ALGORITHMS[name].refusal(p):
        return
    ranks = inner_problem(p, ALGORITHMS[name].head_ranks(p)).size
    c = p.queries // ranks // 2
    found = measured(name, p)
    for comm in found.forward + found.backward:
        assert pairs_by_step(comm) == [c * (c + 1) + c * c] + [2 * c * c] * (ranks - 1)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_contiguous_causal_is_uneven(size: int) -> None:
    """The last rank works at all N steps, the first at one: (N + 1) / 2N of the ranks' time is used."""
    p = problem(size, CAUSAL, CONTIGUOUS)
    steps = [len(pairs_by_step(comm)) for comm in measured("ring", p).forward]
    assert steps == list(range(1, size + 1))
    assert sum(steps) / (size * max(steps)) == (size + 1) / (2 * size)


@pytest.mark.parametrize("layout", [CONTIGUOUS, ZIGZAG])
@pytest.mark.parametrize("name", ["ring", "bi_ring", "zigzag_ring", "token_ring"])
def test_no_rank_holds_all_keys(name: str, layout: Blocks) -> None:
    """No message and no block is larger than what one rank owns, and at most one of each circulation is on its way."""
    size = 8
    p = problem(size, FULL, layout)
    q, kv, lse = units(p)
    found = measured(name, p)
    for comm in found.forward + found.backward:
        assert comm.most_received <= max(2 * kv, 2 * q + 2 * lse)
        works = [event for event in comm.events if isinstance(event, KernelCall)]
        assert max(work.columns for work in works) <= p.keys // size
        assert max(work.rows for work in works) <= p.queries // size
        assert most_on_the_way(comm) <= (6 if name == "bi_ring" else 3), "two packets and one home"


def most_on_the_way(comm: ThreadComm) -> int:
    """Exchanges started and not yet waited for."""
    now = most = 0
    for event in comm.events:
        now += {"start": 1, "wait": -1}.get(str(event), 0)
        most = max(most, now)
    return most


def test_gradients_of_key_heads_are_summed_before_they_travel() -> None:
    """Pitfall: dk and dv of every query head sent round. With one key head for four they are a quarter."""
    bytes_of = {
        kv_heads: total(measured("ring", problem(4, FULL, CONTIGUOUS, kv_heads=kv_heads)).backward, "dk, dv")
        for kv_heads in (1, 4)
    }
    assert bytes_of[4] == 4 * bytes_of[1]


@pytest.mark.parametrize("name", ["ring", "zigzag_ring", "token_ring"])
def test_one_message_for_each_hop(name: str) -> None:
    """Pitfall: k and v in messages of their own, whose order differs between ranks. token_ring's results and its
    backward have two dtypes, and these go together in one exchange."""
    for comm in measured(name, problem(4, FULL, CONTIGUOUS)).forward:
        expected = 2 * 3 if name == "token_ring" else 3
        assert len(comm.sent) == comm.events.count("start") == expected
