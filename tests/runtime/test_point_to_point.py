"""Sends and receives along pp: order, bytes, acknowledgements, and what is said when a rank is gone."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.ir.traffic import Traffic
from autopar.runtime.comm.p2p import Channels, side_by_side
from autopar.runtime.exec.executor import Executor
from autopar.runtime.exec.instructions import Instruction
from autopar.runtime.fault.errors import CollectiveError, error_context
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.schedule.order import Action, Order
from autopar.schedule.order_checks import acknowledged, counterpart
from tests.runtime import hand_made
from tests.runtime.hand_made import Case
from tests.support.ranks import Outcome, close_pools, rank_outcomes, run_ranks

TIMEOUT = 4.0  # seconds until a transfer without its peer fails


def ping_pong() -> tuple[list[float], Traffic, list[list[int]]]:
    """Both directions at once, several transfers on the way, of tensors that are not contiguous."""
    groups = Groups(init_mesh("cpu", 20.0, pp=2, tp=2))
    me, peer = groups.coordinate["pp"], 1 - groups.coordinate["pp"]
    channels = Channels(groups)
    channels.connect({(0, 1), (1, 0)})
    sends = [Action(me, "SF", i, peer=peer) for i in range(4)]
    pending = [channels.post(counterpart(s), peer, [torch.empty(2, 3), torch.empty(1)]) for s in sends]
    for i, send in enumerate(sends):
        x = torch.full((3, 2), 10.0 * groups.rank + i)
        channels.send(send, peer, [x.t(), torch.tensor([float(groups.rank)])])
    found = [channels.wait(p) for p in pending]
    channels.arrived(sends[:2])
    channels.flush()
    assert all(float(one[1]) == groups.ranks("pp")[peer] for one in found)
    ranks = [dist.get_process_group_ranks(groups.link(*link)[0]) for link in ((0, 1), (1, 0))]
    return [float(one[0].mean()) for one in found], channels.traffic["pp", "send"], ranks


def test_transfers_match_by_order_within_the_same_tp_coordinate() -> None:
    for rank, (found, traffic, ranks) in enumerate(run_ranks(4, ping_pong)):
        other = (rank + 2) % 4
        assert found == [10 * other + i for i in range(4)]
        assert traffic == Traffic(8, 4 * (6 * 4 + 4))
        assert ranks == [sorted((rank, other))] * 2


def test_links_are_connected_side_by_side() -> None:
    """Each rank of a chain takes its four links in turn, and none waits for what is further away."""
    chain = [link for i in range(9) for link in ((i, i + 1), (i + 1, i))]
    found = side_by_side(chain)
    assert sorted(found) == sorted(chain)
    ends = dict.fromkeys(range(10), 0)  # when a rank is free again, if a connection takes 1
    for link in found:
        ends |= dict.fromkeys(link, 1 + max(ends[rank] for rank in link))
    assert max(ends.values()) == 4


def subsets() -> tuple[list[str], list[float]]:
    groups = Groups(init_mesh("cpu", 20.0, pp=4))
    names = [groups.subset("pp", chosen) for chosen in ((3, 0), (1, 2), (0, 1, 2, 3), (0, 3))]
    out = []
    for name in dict.fromkeys(names):
        if name == "pp" or str(groups.rank) in name:
            x = torch.tensor(float(groups.rank))
            dist.all_reduce(x, group=groups.group(name))
            assert groups.ranks(name) == dist.get_process_group_ranks(groups.group(name))
            assert groups.size(name) == len(groups.ranks(name))
            out.append(x.item())
    return names, out


def test_some_coordinates_of_an_axis_have_a_group() -> None:
    found = run_ranks(4, subsets)
    assert all(names == ["pp[0+3]", "pp[1+2]", "pp", "pp[0+3]"] for names, _ in found)
    assert [sums for _, sums in found] == [[3, 6]] * 4


@pytest.mark.parametrize("schedule, parts", [("1f1b", 4), ("interleaved", 8), ("zb_v", 8), ("dual_pipe", 4)])
def test_a_message_acknowledges_what_its_sender_has_received(schedule: str, parts: int) -> None:
    """Of every receive: the sends it acknowledges were taken by actions ahead of that message on the other rank.
    How many nobody acknowledges does not grow with the microbatches, so their tensors do not pile up."""
    left = []
    for microbatches in (16, 32):
        order = hand_made.order_of(Case(parts, microbatches), schedule, 4)
        rows = [[str(action).removesuffix("&") for action in actions] for actions in order.ranks]
        left.append([unacknowledged(order, rows, rank) for rank in range(4)])
    assert left[0] == left[1]


def unacknowledged(order: Order, rows: list[list[str]], rank: int) -> int:
    found = acknowledged(order, rank)
    told = [send for sends in found.values() for send in sends]
    sends = [a for a in order.ranks[rank] if a.kind in ("SF", "SB")]
    assert len(set(told)) == len(told) and set(told) <= set(sends)
    for receive, before in found.items():
        other = rows[order.rank_of[receive.peer]]
        ahead = other[: other.index(str(counterpart(receive)))]
        for send in before:
            kinds = ("F",) if send.kind == "SF" else ("B", "BW")
            assert any(f"{send.peer}{kind}{send.microbatch}" in ahead for kind in kinds), (receive, send)
    return len(sends) - len(told)


# --- failures -----------------------------------------------------------------------------------------


def step_that_fails(how: str) -> tuple[str, float]:
    """Rank 2 stops in the middle of its step."""
    groups = Groups(init_mesh("cpu", TIMEOUT, pp=4))
    case = Case(4, 6)
    order = hand_made.order_of(case, "1f1b", 4)
    executor = Executor(hand_made.compiled_of(case, order), groups)
    values = hand_made.mine(case, order, groups.rank)
    executor.run_step(values)
    if groups.rank == 2:
        middle = next(e for e in executor.program.entries if str(e.action) == "2BW1")
        middle.instructions.insert(0, Instruction(STOPS[how], []))
    start = time.monotonic()
    try:
        with error_context():
            executor.run_step(values)
    except (CollectiveError, ArithmeticError) as error:
        message = f"{type(error).__name__}: {error}"
        took = time.monotonic() - start
        time.sleep(6 - took if took < 6 else 0)  # the others may still ask who is alive
        return message, took
    return "no error", 0.0


def die(_: list[Any]) -> list[Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def fail(_: list[Any]) -> list[Any]:
    raise ArithmeticError("a bad number")


STOPS = {"die": die, "fail": fail}


def outcomes(how: str) -> list[Outcome]:
    try:
        return rank_outcomes(4, step_that_fails, how, timeout=40, grace=20)
    finally:
        close_pools()  # failed transfers poison the next ones


def test_a_rank_that_dies_in_the_middle_of_a_step_is_named_by_all_others() -> None:
    found = outcomes("die")
    assert "-9" in (found[2].lost or "")
    for rank in (0, 1, 3):
        message, took = found[rank].value
        assert f"failed on rank {rank}" in message and "rank 2 did not respond: no sign of life" in message
        assert took < 2 * TIMEOUT + 3
    for rank, action in ((1, "1RB"), (3, "3RF")):
        message = found[rank].value[0]
        assert f"comm: {action}" in message and "(pipeline, waits for rank 2)" in message, message


def test_a_rank_that_fails_in_the_middle_of_a_step_is_named_with_its_error() -> None:
    found = outcomes("fail")
    assert "ArithmeticError: a bad number" in found[2].value[0]
    for rank in (0, 1, 3):
        assert "rank 2 failed: ArithmeticError: a bad number" in found[rank].value[0], found[rank]
