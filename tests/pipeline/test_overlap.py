"""Exchanges of tokens beside what another microbatch computes: cells whose graphs take turns."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.cost.graph_times import Segment, seconds_by_turns
from autopar.cost.memory import memories
from autopar.cost.stage_costs import step_timeline
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.runtime.comm import collectives
from autopar.runtime.exec.executor import Executor
from autopar.runtime.exec.instructions import BoundAction, Instruction
from autopar.runtime.exec.overlap_f_b import OverlappedActions, with_overlaps
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.schedule.order import Order
from autopar.schedule.request import SCHEDULES, Request
from autopar.schedule.simulate import simulate
from autopar.steps.graphs import Compiled
from tests.experts.test_experts import in_full
from tests.support.cases import Cell, called, check, compile_cell, compiled, inherited, on_ranks, values_of
from tests.support.order_texts import parse_action
from tests.support.ranks import close_pools, rank_outcomes

MESH = Mesh.of(pp=2, ep=2)
PAIRED = Options(schedule="dual_pipe_v", microbatches=4, token_dispatcher="alltoall_dedup")
BOTH = Cell("deep mixtral", MESH, PAIRED)
MORE = [
    Cell("deepseek_v3", MESH, PAIRED),
    Cell("mixtral", MESH, replace(PAIRED, token_dispatcher="allgather")),
    Cell("qwen3_moe", MESH, replace(PAIRED, token_dispatcher="alltoall", activation_checkpoint="full")),
    Cell("gpt_oss", MESH, replace(PAIRED, schedule="dual_pipe")),
    Cell("qwen3_moe", Mesh.of(pp=2, dp=2), replace(PAIRED, expert_axis="dp", zero=1)),
    Cell("mixtral", Mesh.of(pp=2, ep=2, tp=2), replace(PAIRED, sequence_parallel=True)),
]
TIMEOUT = 10.0


def unpaired(made: Compiled) -> Compiled:
    """The same actions one after the other."""
    return replace(made, pipeline=replace(made.pipeline, order=one_after_another(made.pipeline.order)))


def one_after_another(order: Order) -> Order:
    rows = tuple(tuple(replace(action, paired=False) for action in row) for row in order.ranks)
    return replace(order, ranks=rows)


@contextmanager
def noted() -> Iterator[list[str]]:
    """Within: which exchanges have started."""
    found: list[str] = []
    before = collectives.started
    collectives.started = lambda name, one: found.append(f"{one.axis} {name(one)}")  # type: ignore[assignment]
    try:
        yield found
    finally:
        collectives.started = before


def both_ways(cell: Cell) -> tuple[list[str], list[list[str]], int]:
    """Bits of losses and gradients of the step and of that without pairs; exchanges in their order; cells."""
    groups, bits, order, cells = Groups(init_mesh("cpu", 30.0, **cell.mesh.sizes)), [], [], 0
    for made in (inherited(cell), unpaired(inherited(cell))):
        executor = Executor(made, groups)
        cells += sum(isinstance(one, OverlappedActions) for runs in executor._runs for one in runs)
        with noted() as found:
            result = executor.run_step(values_of(made, cell.name, groups))
        values = [*result.losses, *(result.gradients[name] for name in sorted(result.gradients))]
        bits.append(hashlib.sha256(b"".join(x.numpy().tobytes() for x in values)).hexdigest())
        order.append([one for one in found if not one.startswith("pp")])
    return bits, order, cells


@pytest.mark.parametrize("cell", [BOTH, *in_full(MORE)], ids=str)
def test_bits_are_those_of_one_after_the_other(cell: Cell) -> None:
    """And ranks that exchange with each other do so in one order."""
    found = on_ranks(cell, both_ways)
    for bits, (turns, plain), cells in found:
        assert bits[0] == bits[1] and sorted(turns) == sorted(plain)
        assert cells or turns == plain
    assert any(cells for _, _, cells in found) and (
        cell != BOTH or all(turns != plain for _, (turns, plain), _ in found)
    )
    ranks = [cell.mesh.coordinate(i)["pp"] for i in range(cell.mesh.world_size)]
    for stage in set(ranks):
        orders = [order for at, (_, order, _) in zip(ranks, found, strict=True) if at == stage]
        assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize("cell", [BOTH, *in_full(MORE)], ids=str)
def test_equals_one_process(cell: Cell) -> None:
    check(called(cell))


DELAY = 0.02


class Late:
    """An exchange over a slow link, while other code computes."""

    waited = 0.0

    def __init__(self, work: Any) -> None:
        self._work, self._there = work, time.perf_counter() + DELAY

    def wait(self) -> Any:
        left = self._there - time.perf_counter()
        if left > 0:
            Late.waited += left
            time.sleep(left)
        return self._work.wait()


def exposed(cell: Cell) -> list[float]:
    """Seconds for which a rank waited for a slow link, in a step and in one without pairs; and the exchanges of one."""
    groups, found, count = Groups(init_mesh("cpu", 60.0, **cell.mesh.sizes)), [], itertools.count()
    exchange = dist.all_to_all_single

    def late(*args: Any, **kwargs: Any) -> Late:
        next(count)
        return Late(exchange(*args, **kwargs))

    for made in (inherited(cell), unpaired(inherited(cell))):
        executor = Executor(made, groups)
        dist.all_to_all_single = late
        try:
            Late.waited = 0.0
            executor.run_step(values_of(made, cell.name, groups))
        finally:
            dist.all_to_all_single = exchange
        found.append(Late.waited)
    return [*found, next(count) / 2]


def test_less_of_a_slow_link_is_waited_for() -> None:
    """Exchanges of the other half, and what it computes, are beside those of the first."""
    for turns, plain, count in on_ranks(BOTH, exposed):
        assert plain > 0.4 * count * DELAY  # some of them are on their way together
        assert turns < 0.95 * plain, (turns, plain)


def dies(cell: Cell, victim: int, turn: int) -> str:
    """In a step a rank dies at its ``turn``-th exchange within a cell, where the other half waits for one of its own.
    What the others say."""
    groups, made = Groups(init_mesh("cpu", TIMEOUT, **cell.mesh.sizes)), inherited(cell)
    executor, turns = Executor(made, groups), itertools.count(1)
    values = values_of(made, cell.name, groups)
    executor.run_step(values)
    run, exchange = OverlappedActions.run, dist.all_to_all_single

    def watched(*args: Any, **kwargs: Any) -> Any:
        if next(turns) == turn:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(*args, **kwargs)

    def within(*args: Any) -> float:
        dist.all_to_all_single = watched
        try:
            return run(*args)
        finally:
            dist.all_to_all_single = exchange

    if dist.get_rank() == victim:
        OverlappedActions.run = within  # type: ignore[method-assign]
    try:
        executor.run_step(values)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("turn", [3, pytest.param(6, marks=pytest.mark.full)])
def test_a_rank_that_dies_in_a_cell_is_named(turn: int) -> None:
    close_pools()
    compiled(BOTH)  # here, and inherited
    outcomes = rank_outcomes(4, dies, BOTH, 1, turn, timeout=60, grace=TIMEOUT + 5)
    close_pools()
    assert "exit code -9" in (outcomes[1].lost or "")
    for rank in (0, 2, 3):
        assert "rank 1" in outcomes[rank].value, outcomes[rank].value


def test_seconds_of_turns() -> None:
    """F: 1, exchange of 3, 1. BW: 2, exchange of 1, 2. One link."""
    first = (Segment(1.0, ((0, 3.0),)), Segment(0.0, waits=(0,)), Segment(1.0))
    second = (Segment(2.0, ((0, 1.0),)), Segment(0.0, waits=(0,)), Segment(2.0))
    assert seconds_by_turns(first) == 5.0 and seconds_by_turns(second) == 5.0
    # F to 1, its exchange to 4; BW to 3, its exchange from 4 to 5; F waits to 4 and ends at 5; BW ends at 7
    assert seconds_by_turns(first, second) == 7.0
    assert seconds_by_turns((Segment(1.0),), (Segment(2.0),)) == 3.0
    early = (Segment(1.0, ((0, 3.0),)), Segment(2.0, waits=(0,)), Segment(1.0))  # computes beside its own exchange
    assert seconds_by_turns(early) == 5.0


def test_a_simulated_step_hides_exchanges() -> None:
    """With links that are named: what a cell hides, many steps of DualPipeV gain. And never is a cell slower."""
    links = "ep=switch:1e7:0,pp=switch:1e15:0"  # the model is small: on faster links the host's launches take longer
    made = compile_cell(replace(BOTH, options=replace(PAIRED, topology=links)))
    costs = step_timeline(made).costs
    assert isinstance(costs.FB, tuple)
    for k, row in enumerate(costs.FB):
        for j, took in enumerate(row):
            assert 0 < took < costs.F[k] + costs.B[j] + costs.W[j]  # type: ignore[index]
    order = SCHEDULES["dual_pipe_v"].make(Request(2, 32, 2))
    paired, plain = (simulate(one, costs).makespan for one in (order, one_after_another(order)))
    assert paired < 0.96 * plain


def test_both_halves_are_in_memory() -> None:
    made = compile_cell(BOTH)
    peaks = [[m.peak for m in memories(one)] for one in (made, unpaired(made))]
    assert all(a >= b for a, b in zip(*peaks, strict=True)) and peaks[0] != peaks[1]


def entry(text: str, reads: list[int], writes: list[int], made: Any = None) -> BoundAction:
    """An action of one instruction, whose graph pauses if it is ``made`` of one that does."""
    return BoundAction(
        parse_action(text), instructions=[Instruction(lambda x: x, reads, writes)], graphs=[made] if made else []
    )


def test_what_takes_from_each_other_does_not_take_turns() -> None:
    (bound,) = [type("PausedStep", (), {"paused": print})()]
    for back, turns in (([3], True), ([1], False), ([0], True)):  # of nobody; of the first half; what both are given
        found = with_overlaps([entry("0F1&", [0], [1], bound), entry("0BW0", back, [2])])
        assert [isinstance(one, OverlappedActions) for one in found] == ([True] if turns else [False, False])
    assert len(with_overlaps([entry("0F1&", [0], [1]), entry("0BW0", [3], [2])])) == 2  # nobody pauses


def test_what_both_read_stays_until_the_end() -> None:
    first, second = BoundAction(parse_action("0F1&")), BoundAction(parse_action("0BW0"))
    first.instructions = [Instruction(lambda x: x, [0], [1]), Instruction(lambda x: x, [0], [2], dead=[0])]
    second.instructions = [Instruction(lambda x: x, [0], [3], dead=[0])]
    cell, slots = OverlappedActions([first], second), [torch.ones(1), None, None, None]
    for one in (*first.instructions, *second.instructions):
        one.stores = [(0, one.writes[0])]
    cell.run(slots)
    assert slots[0] is None and all(isinstance(x, Tensor) for x in slots[1:])
