"""Exchanges of attention over sharded sequences on real ranks: order, bytes, levels of the axis, and lost ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.exchanges import WAYS, Like
from autopar.attention.layouts import ZIGZAG
from autopar.attention.operator import attention_of_piece
from autopar.attention.problem import Mask, Problem
from autopar.ir.graph import outputs
from autopar.ir.placement import Shard, piece, scaled_blocks
from autopar.ir.traffic import Traffic
from autopar.runtime.comm import collectives as comm
from autopar.runtime.comm import functional_collectives
from autopar.runtime.comm.collectives import to_rows
from autopar.runtime.comm.context_parallel_comm import AxisComm
from autopar.runtime.exec.lowering import bind
from autopar.runtime.fault.errors import error_context
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.testing.attention_ranks import Case, attend_and_differentiate, cut, on_the_whole
from tests.runtime.test_bind import graph_of
from tests.support.ranks import close_pools, rank_outcomes, run_ranks
from tests.support.scalar_kernels import scalar_kernels

raw = torch.ops.autopar


def message(rank: int, way: str, number: int) -> list[Tensor]:
    """Three tensors of different dtypes that say where they come from."""
    word = 100 * rank + 10 * WAYS.index(way) + number
    return [torch.full((3, 2), float(word), dtype=torch.float64), torch.tensor([word]), torch.tensor(word % 2 == 1)]


def likes(tensors: list[Tensor]) -> list[Like]:
    return [Like(tuple(x.shape), x.dtype) for x in tensors]


def exchanges(axis: str, **sizes: int) -> dict[tuple[str, str], Traffic]:
    """Two messages each way at once, waited for in another order; the sender's tensors are let go of."""
    ends = AxisComm(Groups(init_mesh("cpu", 20.0, **sizes)), axis, "node")
    me, n = ends.rank, ends.size
    steps = {"up": 1, "down": -1, "home": n // 2}
    pending = {}
    for number in range(2):
        for way, step in steps.items():
            target, source = (me + step) % n, (me - step) % n
            shapes = likes(message(source, way, number))
            sent = message(me, way, number)
            pending[way, number] = ends.exchange(way, "it", (target, sent), (source, shapes)), source
    for (way, number), (exchange, source) in reversed(pending.items()):
        for x, right in zip(exchange.wait(), message(source, way, number), strict=True):
            assert x.dtype == right.dtype and torch.equal(x, right), (way, number)
    # with one end, and with none
    if me == 0:
        assert ends.exchange("up", "it", (n - 1, [torch.ones(2)]), None).wait() == []
    elif me == n - 1:
        (x,) = ends.exchange("up", "it", None, (0, [Like((2,), torch.float32)])).wait()
        assert x.tolist() == [1, 1]
    assert ends.exchange("down", "it", None, None).wait() == []
    gathering = ends.all_gather("it", torch.full((2, 3), float(me)))
    summing = ends.reduce_scatter("it", torch.arange(2.0 * n).view(n, 2) + me)
    (gathered,), (summed,) = gathering.wait(), summing.wait()
    assert gathered.shape == (n, 2, 3) and gathered[:, 0, 0].tolist() == list(range(n))
    assert summed.tolist() == [n * x + n * (n - 1) / 2 for x in (2.0 * me, 2.0 * me + 1)]
    assert ends.open == 0
    return ends.traffic


def expected_traffic(axis: str, n: int, sends_once_more: bool) -> dict[tuple[str, str], Traffic]:
    size = 3 * 2 * 8 + 8 + 1  # of a message
    found = {(axis, f"send {way}"): Traffic(2, 2 * size) for way in WAYS}
    if sends_once_more:
        found[axis, "send up"] += Traffic(1, 2 * 4)
    found[axis, "all_gather"] = Traffic(1, (n - 1) * 2 * 3 * 4)
    found[axis, "reduce_scatter"] = Traffic(1, (n - 1) * 2 * 4)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanges_match_by_order_each_way(ranks: int) -> None:
    for rank, traffic in enumerate(run_ranks(ranks, exchange_along_cp, ranks)):
        assert traffic == expected_traffic("cp", ranks, rank == 0)


def exchange_along_cp(ranks: int) -> Any:
    return exchanges("cp", cp=ranks)


def test_exchanges_along_a_level_and_beside_another_axis() -> None:
    for rank, (outer, beside) in enumerate(run_ranks(4, exchange_along_parts)):
        assert outer == expected_traffic("cp/2", 2, rank < 2)
        assert beside == expected_traffic("cp", 2, rank % 2 == 0)


def exchange_along_parts() -> Any:
    return exchanges("cp/2", cp=4), exchanges("cp", dp=2, cp=2)


# --- collectives of graphs along levels, and zigzag pieces ---------------------------------------------


def moved(backend: str) -> None:
    """Heads for sequence among neighbours, the sequence dealt in zigzag over all; and back."""
    groups = Groups(init_mesh("cpu", 20.0, cp=4))
    me = dist.get_rank()
    whole = torch.rand(2, 4, 16, dtype=torch.float64)  # batch, heads, sequence
    mine = piece(whole, Shard(2, (8, -8)), 4, me).contiguous()

    def build(call: Any, x: Any) -> list[Any]:
        heads = call(raw.all_to_all.default, x, 2, [1, -1], 1, [], "cp%2", 2)
        back = call(raw.all_to_all.default, heads, 1, [], 2, [1, -1], "cp%2", 2)
        half = call(raw.all_gather.default, x, 2, [1, -1], "cp%2", 2)
        full = call(raw.all_gather.default, half, 2, [1, -1], "cp/2", 2)
        alone = call(raw.all_gather.default, x, 2, [1, -1], "cp%1", 1)
        cut = call(raw.shard_slice.default, full, 2, [8, -8], "cp", 4)
        padded = call(raw.all_reduce.default, call(raw.shard_pad.default, x, 2, [1, -1], "cp", 4), "cp", "sum")
        scattered = call(raw.reduce_scatter.default, full, 2, [1, -1], "cp", 4)
        dealt = call(raw.all_to_all.default, x, 2, [1, -1], 2, [], "cp", 4)
        return [heads, back, full, alone, cut, padded, scattered, dealt]

    bound = bind(graph_of([tuple(mine.shape)], build), groups, backend)
    outer = piece(whole, Shard(2, (8, -8)), 2, me // 2)
    right = [
        piece(outer, Shard(1), 2, me % 2), mine, whole, mine, mine, whole, 4 * mine, piece(whole, Shard(2), 4, me)
    ]  # fmt: skip
    for out, expected in zip(bound([mine.clone()]), right, strict=True):
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert bound.traffic["cp%2", "all_to_all"] == Traffic(2, 2 * mine.nbytes // 2)


def test_zigzag_pieces_move_along_levels() -> None:
    run_ranks(4, moved, "eager")


def signed_blocks() -> list[list[int]]:
    return [[], [-1], [1, -1], [1, 2, -1], [8, -8, 8, -8], [-3, 1]]


@pytest.mark.parametrize("blocks", signed_blocks())
def test_functional_layouts_are_those_of_collectives(blocks: list[int]) -> None:
    ranks, whole = 4, torch.rand(2, 32 if len(blocks) != 3 else 16, 3)
    shard = Shard(1, scaled_blocks(blocks, whole.shape[1]))
    rows = to_rows(whole, 1, blocks, ranks)
    assert torch.equal(functional_collectives.from_stack(rows, 1, blocks), whole)
    for me in range(ranks):
        there = SimpleNamespace(groups=SimpleNamespace(index=lambda axis, me=me: me, size=lambda axis: ranks))
        mine = piece(whole, shard, ranks, me)
        assert torch.equal(rows[me], mine)
        assert torch.equal(functional_collectives.shard_slice(there, whole, 1, blocks, "cp", ranks), mine)
        assert torch.equal(comm.shard_slice(there.groups, 1, blocks, "cp")(whole), mine)
        padded = functional_collectives.shard_pad(there, mine, 1, blocks, "cp", ranks)
        assert torch.equal(comm.shard_pad(there.groups, 1, blocks, "cp")(mine), padded)
        assert torch.equal(piece(padded, shard, ranks, me), mine) and padded.count_nonzero() == mine.numel()


# --- algorithms ------------------------------------------------------------------------------------------


def traced(problem: Problem, forward: str, backward: str) -> GraphModule:
    """One rank's attention and its gradients, as they stand in graphs: q, k, v and the gradient of out ->
    out, lse and the gradients of q, k and v."""
    head_ranks = ALGORITHMS[forward].head_ranks(problem)
    how = (forward, backward, problem.query_blocks, problem.key_blocks, "cp", problem.size, head_ranks)
    facts = (None,) * 5 + (problem.mask.causal, 0, 0, 0, problem.width**-0.5, 0.0, 0.0, 0, [], [], [])

    def attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out, lse = attention_of_piece(*leaves, *facts, *how)
            return out.detach(), lse, *torch.autograd.grad(out, leaves, grad)

    p = problem
    rows, columns = p.queries // p.size, p.keys // p.size
    inputs = [(p.heads, rows, p.width), (p.kv_heads, columns, p.width), (p.kv_heads, columns, p.value_width)]
    inputs.append((p.heads, rows, p.value_width))
    return make_fx(attention, tracing_mode="fake")(*(torch.empty(p.batch, *shape, dtype=p.dtype) for shape in inputs))


def attend(problem: Problem, forward: str, backward: str, backend: str) -> tuple[list[float], dict[str, int]]:
    """Largest errors against the whole attention, and bytes sent by way."""
    groups, case = Groups(init_mesh("cpu", 30.0, cp=problem.size)), Case.of(problem)
    graph = traced(problem, forward, backward)
    bound, planned = bind(graph, groups, backend), outputs(graph)
    rows, columns = problem.rows(groups.rank), problem.columns(groups.rank)
    q, k, v, grad = cut(case.q, rows), cut(case.k, columns), cut(case.v, columns), cut(case.grad, rows)
    found, whole = bound([q, k, v, grad]), on_the_whole(case).tensors()
    assert [x.stride() for x in found] == [node.meta["val"].stride() for node in planned]
    errors = [
        float((x - cut(right, spans)).abs().max())
        for spans, x, right in zip((rows, rows, rows, columns, columns), found, whole, strict=True)
    ]
    return errors, {kind.removeprefix("send "): t.bytes for (_, kind), t in bound.comms.traffic.items()}


def attend_with_all(problem: Problem) -> dict[str, tuple[list[float], dict[str, int]]]:
    return {name: attend(problem, name, name, "eager") for name, one in ALGORITHMS.items() if not one.refusal(problem)}


def zigzag(size: int) -> Problem:
    return Problem(
        batch=2, heads=4, kv_heads=2, queries=32, keys=32, width=4, value_width=6, dtype=torch.float64, size=size,
        mask=Mask(causal=True), query_blocks=ZIGZAG, key_blocks=ZIGZAG,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_algorithm_gives_the_whole_attention_and_sends_what_it_says(ranks: int) -> None:
    problem = zigzag(ranks)
    found = run_ranks(ranks, attend_with_all, problem)
    case = Case.of(problem)
    assert ranks == 2 or set(found[0]) == set(ALGORITHMS), "none refuses four ranks"
    for name in found[0]:
        here = attend_and_differentiate(name, name, case)
        ring = problem.size // ALGORITHMS[name].head_ranks(problem)
        for rank, results in enumerate(found):
            errors, sent = results[name]
            assert max(errors) < 1e-12, (name, rank, errors)
            place = rank * ring // ranks  # among the ranks of one share of the heads
            ways = ("up", "down", "home", "all_gather", "reduce_scatter")
            told = {w: here.forward[place].bytes(w) + here.backward[place].bytes(w) for w in ways}
            assert sent == {way: size for way, size in told.items() if size}, (name, rank)


def attend_compiled(*args: Any) -> Any:
    with scalar_kernels():
        return attend(*args, "inductor")


def test_compiled_graphs_run_the_algorithms() -> None:
    for errors, sent in run_ranks(2, attend_compiled, zigzag(2), "token_ring", "bi_ring", timeout=200):
        assert max(errors) < 1e-12 and set(sent) == {"up", "down", "home"}


# --- failures -------------------------------------------------------------------------------------------


def lose(rank: int) -> str:
    ends = AxisComm(Groups(init_mesh("cpu", 3.0, cp=4)), "cp", "context_attention_7, ring")
    with error_context():
        try:
            for step in range(20):
                if ends.rank == rank and step == 3:
                    os._exit(3)
                x = torch.rand(64, 64)
                here = (ends.rank + 1) % 4, [x]
                ends.exchange("up", "keys", here, ((ends.rank - 1) % 4, likes([x]))).wait()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "fine"


def test_a_lost_rank_is_named_with_axis_node_and_what_was_sent() -> None:
    outcomes = rank_outcomes(4, lose, 3, timeout=40, grace=15)
    close_pools()
    for outcome in outcomes[:3]:
        up = (outcome.rank + 1) % 4, (outcome.rank - 1) % 4
        assert outcome.value.startswith(f'CollectiveError: comm: "keys" up to rank {up[0]} from rank {up[1]} over axis')
        assert 'over axis "cp" (node context_attention_7, ring) failed on rank' in outcome.value
    assert "rank 3 did not respond: no sign of life" in outcomes[0].value
