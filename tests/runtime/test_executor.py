"""The executor of pipelines on real ranks: loss and gradients of one process, whatever the schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ir.signature import InputSpec, OutputSpec
from autopar.ir.traffic import Traffic
from autopar.runtime.exec.executor import Executor
from autopar.runtime.exec.lowering import Lowered
from autopar.runtime.exec.value_slots import ValueSlots
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.schedule.request import SCHEDULES, Request
from autopar.schedule.simulate import simulate
from tests.runtime import hand_made
from tests.runtime.hand_made import WIDTH, Case
from tests.support.peaks import measure
from tests.support.ranks import run_ranks

EXACT = 1e-12


def train(case: Case, schedule: str, ranks: int, bucket_bytes: int = 2**20) -> dict[str, Any]:
    """Two steps on one rank: what came out, and what was sent and alive."""
    groups = Groups(init_mesh("cpu", 20.0, pp=ranks))
    order = hand_made.order_of(case, schedule, ranks)
    executor = Executor(hand_made.compiled_of(case, order, bucket_bytes), groups)
    executor.record, peaks = True, measure(executor)
    values = hand_made.mine(case, order, groups.rank)
    first = executor.run_step(values)
    result = executor.run_step(values)
    assert all(torch.equal(g, result.gradients[n]) for n, g in first.gradients.items())
    ran = [str(action) for action, start, end in executor.timeline if end >= start]
    return {
        "losses": [float(x) for x in result.losses],
        "outputs": result.outputs,
        "gradients": result.gradients,
        "traffic": dict(executor.traffic),
        "live": peaks.live,
        "saved": peaks.saved,
        "ran": ran,
    }


def check(case: Case, schedule: str, ranks: int, **facts: Any) -> list[dict[str, Any]]:
    """Every rank against autograd in one process, and against what the schedule claims."""
    loss, gradients = hand_made.expected(case)
    order = hand_made.order_of(case, schedule, ranks)
    found = run_ranks(ranks, train, case, schedule, ranks, *facts.values())
    seen = set()
    for rank, one in enumerate(found):
        assert abs(one["losses"][0] - loss) < EXACT and float(one["outputs"][0]) == one["losses"][0]
        held = {n for n in hand_made.mine(case, order, rank) if n in gradients}
        assert set(one["gradients"]) == held
        for name, gradient in one["gradients"].items():
            assert (gradient - gradients[name]).abs().max() < EXACT, (rank, name)
        seen |= held
        assert one["ran"] == [str(a) for a in order.ranks[rank]]
    assert seen == set(gradients)
    assert [one["live"] for one in found] == list(simulate(order).live)
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_and_gradients_are_those_of_one_process(schedule: str, ranks: int) -> None:
    case = Case(ranks, 5)
    found = check(case, schedule, ranks)
    nbytes = case.rows * WIDTH * 8
    for rank, one in enumerate(found):
        neighbours = (rank > 0) + (rank < ranks - 1)
        sent = one["traffic"]["pp", "send"]
        assert (sent.calls, sent.bytes) == (2 * 5 * neighbours, 2 * 5 * neighbours * nbytes)  # two steps


@pytest.mark.parametrize("schedule, parts, ranks, microbatches", [
    ("interleaved", 4, 2, 4), ("zb_v", 4, 2, 5), ("dual_pipe_v", 4, 2, 4),
    ("dual_pipe", 2, 2, 4), ("dual_pipe", 4, 4, 8),
])  # fmt: skip
def test_several_stages_per_rank(schedule: str, parts: int, ranks: int, microbatches: int) -> None:
    """Stages of one rank hand over directly; both copies of a part add their gradients up."""
    check(Case(parts, microbatches), schedule, ranks, bucket_bytes=WIDTH * WIDTH * 8)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("way, expected", [("chain", [2, 2, 4, 2]), ("relay", [1, 3, 4, 2]), ("star", [3, 2, 3, 2])])
def test_a_value_with_several_users(schedule: str, way: str, expected: list[int]) -> None:
    """h_0 goes to part 1, and to parts 2 and 3, which add it: gradients of all ways add up. With a relay, part 1 gives
    part 0 its own gradient and that of the others in one."""
    found = check(Case(4, 3, skips=(2, 3), way=way), schedule, 4)
    assert [one["traffic"]["pp", "send"].calls // (2 * 3) for one in found] == expected


@pytest.mark.parametrize("schedule, ranks, parts", [("1f1b", 4, 4), ("zb_v", 2, 4), ("dual_pipe", 4, 4)])
def test_tied_weights(schedule: str, ranks: int, parts: int) -> None:
    """First and last part share their weight: on ranks 0 and 3, on one rank, or on four with both copies."""
    check(Case(parts, 8, tied=(0, parts - 1)), schedule, ranks)


def train_warmed_up(case: Case, schedule: str) -> dict[str, Any]:
    """A step as on a GPU; what was started on links until the warm-up was over, and how often each graph ran."""
    groups = Groups(init_mesh("cpu", 20.0, pp=2))
    order = hand_made.order_of(case, schedule, 2)
    executor = Executor(hand_made.compiled_of(case, order), groups)
    executor._needs_warm_up = True
    begun: list[str] = []
    ran = dict.fromkeys((id(b) for entry in executor.program.entries for b in entry.graphs), 0)
    with pytest.MonkeyPatch.context() as patched:
        link, run = groups.link, Lowered.__call__
        patched.setattr(groups, "link", lambda *ends: (begun.append(str(ends)), link(*ends))[1])

        def counted(bound: Lowered, inputs: list[Any]) -> tuple[Any, ...]:
            if not begun:
                ran[id(bound)] += 1
            return run(bound, inputs)

        patched.setattr(Lowered, "__call__", counted)
        result = executor.run_step(hand_made.mine(case, order, groups.rank))
    return {
        "losses": [float(x) for x in result.losses],
        "gradients": result.gradients,
        "traffic": dict(executor.traffic),
        "warm_up": list(ran.values()),
    }


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dual_pipe"])
def test_every_kernel_is_loaded_before_a_stage_waits_for_another(schedule: str) -> None:
    """No transfer is begun before all graphs have run; the step, and what it counts, are those without a warm-up."""
    case = Case(2, 4)
    loss, gradients = hand_made.expected(case)
    plain = run_ranks(2, train, case, schedule, 2)
    for one, other in zip(run_ranks(2, train_warmed_up, case, schedule), plain, strict=True):
        assert one["warm_up"] and min(one["warm_up"]) > 0
        assert abs(one["losses"][0] - loss) < EXACT
        for name, gradient in one["gradients"].items():
            assert (gradient - gradients[name]).abs().max() < EXACT, name
        assert {key: (2 * x.calls, 2 * x.bytes) for key, x in one["traffic"].items()} == {
            key: (x.calls, x.bytes) for key, x in other["traffic"].items()
        }


def test_memory_follows_the_schedule() -> None:
    """Bytes of what F keeps: one value per unit alive; with B and W apart also what B keeps."""
    unit = 3 * WIDTH * 8
    for schedule, expected in (("gpipe", [6, 6]), ("1f1b", [2, 1])):
        found = check(Case(2, 6), schedule, 2)
        assert [one["saved"] / unit for one in found] == expected


# --- parts that are not like the others ---------------------------------------------------------------


def cut_gradient(compiled: Any) -> None:
    """Part 1 makes no gradient of what it receives."""
    for name in ("backward", "backward_input"):
        step = getattr(compiled.pipeline.parts[1], name)
        step.outputs = [None if result == "grad:h0" else result for result in step.outputs]


def freeze(compiled: Any) -> None:
    """Part 0 has no gradients."""
    part = compiled.pipeline.parts[0]
    part.backward = part.backward_input = part.backward_weight = part.reduce = None
    cut_gradient(compiled)
    compiled.pipeline.edges = [dataclasses.replace(edge, gradient=False) for edge in compiled.pipeline.edges]


CHANGES = {"cut": cut_gradient, "freeze": freeze}


def train_changed(case: Case, schedule: str, change: str) -> tuple[dict[str, Tensor], float, int]:
    groups = Groups(init_mesh("cpu", 20.0, pp=2))
    compiled = hand_made.compiled_of(case, SCHEDULES[schedule].make(Request(2, case.microbatches)))
    CHANGES[change](compiled)
    executor = Executor(compiled, groups)
    result = executor.run_step(hand_made.mine(case, executor.order, groups.rank))
    sent = executor.traffic.get(("pp", "send"))
    return result.gradients, float(result.losses[0]), sent.calls if sent else 0


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("change", ["cut", "freeze"])
def test_a_gradient_that_does_not_come_back(schedule: str, change: str) -> None:
    """Nothing is sent for it, and it counts as zero; so does the gradient of a shared weight that one rank lacks."""
    case = Case(2, 4, tied=(0, 1))
    loss, gradients = hand_made.expected(case, detached=True)
    first, second = run_ranks(2, train_changed, case, schedule, change)
    assert abs(first[1] - loss) < EXACT and second[1] == first[1]
    assert (first[2], second[2]) == (4, 0)
    for found in (first[0], second[0]):
        assert (found["w_tied"] - gradients["w_tied"]).abs().max() < EXACT
    assert set(first[0]) == ({"w_tied"} if change == "freeze" else {"w_tied", "b0"})
    assert change == "freeze" or not first[0]["b0"].any()
    assert (second[0]["b1"] - gradients["b1"]).abs().max() < EXACT


def train_with_buffer() -> tuple[list[int], Traffic]:
    groups = Groups(init_mesh("cpu", 20.0, pp=2))
    case = Case(2, 4)
    compiled = hand_made.compiled_of(case, SCHEDULES["1f1b"].make(Request(2, 4)))
    part = compiled.pipeline.parts[0]
    old = part.forward.graph
    graph = hand_made.graph(
        lambda w, b, x, steps, i: (*old.forward(w, b, x), steps + i), part.forward.inputs + ["steps", "i"], []
    )
    part.forward.graph = graph.graph
    for node in graph.graph.graph.nodes:
        node.meta["val"] = torch.zeros(2, dtype=torch.int64)
    part.forward.inputs += ["steps", "i"]
    part.forward.outputs += ["output:1"]
    part.mutations["output:1"] = "steps"
    compiled.signature.outputs.append(OutputSpec("mutation", "steps"))
    compiled.signature.inputs += [
        InputSpec("steps", "buffer", "steps"),
        InputSpec("i", "microbatch", "i"),
    ]
    executor = Executor(compiled, groups)
    values = {**hand_made.mine(case, executor.order, groups.rank), "steps": torch.tensor([7, 8])}
    result = executor.run_step(values)
    assert values["steps"].tolist() == [7, 8]
    return result.outputs[1].tolist(), executor.traffic["pp", "broadcast"]


def test_new_buffers_come_from_the_last_microbatch_to_all_ranks() -> None:
    first, second = run_ranks(2, train_with_buffer)
    assert first[0] == second[0] == [10, 11]
    assert (first[1], second[1]) == (Traffic(1, 16), Traffic(1, 0))


def test_a_rank_runs_what_it_needs_of_the_prologue() -> None:
    """Rank 0 has no targets to prepare; rank 1 doubles them and leaves the rest out."""
    assert run_ranks(2, prologue_graphs) == [[], [["doubled"], ["total_0"]]]


def prologue_graphs() -> list[Any]:
    groups = Groups(init_mesh("cpu", 20.0, pp=2))
    case = Case(2, 2)
    compiled = hand_made.compiled_of(case, SCHEDULES["gpipe"].make(Request(2, 2)))
    executor = Executor(compiled, groups)
    values = ValueSlots(compiled.pipeline, executor.order, groups.rank, executor.inputs, compiled.prologue)
    found = [graph for graph in (values.once, values.each, values.totals) if graph is not None]
    assert all(set(graph.inputs) == {"target"} for graph in found)
    return [graph.outputs for graph in found]
