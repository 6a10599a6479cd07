"""What is said of a pipeline before it runs is what happens: communication and memory against real ranks; dumps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from autopar.cost.memory import memories, memory
from autopar.cost.stage_costs import step_timeline
from autopar.cost.traffic import graph_runs, step_communication
from autopar.ir.graph import modules_of
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.planner.pipeline.step_order import owners
from autopar.report.chrome_trace import events_of, measured_events
from autopar.report.dump.dump import STEP_GRAPHS, Dumper, dump_pipeline, measured_costs
from autopar.rewrite.compilation import Compilation
from autopar.runtime.exec.executor import per_rank
from autopar.runtime.exec.value_slots import Routes
from autopar.schedule.lowering import lower
from autopar.schedule.order import Order
from autopar.schedule.request import SCHEDULES, Costs, Request
from autopar.schedule.simulate import simulate
from autopar.steps.graphs import Compiled
from autopar.steps.of_rank import lowered_order
from tests.support.cases import Cell, compiled, ran, with_schedule
from tests.support.order_texts import parse_row

LLAMA = Cell("llama", Mesh.of(pp=2), Options(microbatches=4, schedule="1f1b", virtual_stages=1))
TIED = Cell("gpt2", Mesh.of(pp=2, dp=2), Options(microbatches=2, schedule="1f1b", zero=1))


def under(cell: Cell, schedule: str) -> Compiled:
    """A compiled cell with another schedule."""
    made = with_schedule(compiled(cell), schedule)
    specs = tuple(dataclasses.replace(p, ranks=owners(made.plan)[p.name]) for p in made.parameters)
    return dataclasses.replace(made, parameters=specs)


@pytest.mark.parametrize(
    ("cell", "schedules"), [(LLAMA, ["gpipe", "1f1b", "zb_h1", "dual_pipe"]), (TIED, ["1f1b"])], ids=["llama", "gpt2"]
)
def test_ranks_send_and_keep_what_was_said(cell: Cell, schedules: list[str]) -> None:
    """Bytes and calls on the wire are equal. Kept values are, too, but for what was received: the executor does not
    count that, and the two peaks may fall on different actions."""
    for (schedule, _), found in ran(cell, schedules).items():
        made = under(cell, schedule)
        said = memories(made)
        for rank, of_rank in enumerate(found):
            pp = cell.mesh.coordinate(rank)["pp"]
            sent = {key: (v.calls, v.bytes) for key, v in of_rank.traffic.items()}
            assert sent == {key: (v.calls, v.bytes) for key, v in step_communication(made, pp).items()}, schedule
            assert of_rank.saved <= said[pp].saved <= of_rank.saved + said[pp].received, (schedule, rank)
            assert said[pp].received <= 0.1 * said[pp].saved
            kept = step_timeline(made).memory[pp]
            assert 0.9 * of_rank.saved <= kept <= 1.1 * of_rank.saved, (schedule, rank)


def test_memory_of_ranks() -> None:
    made = compiled(LLAMA)
    every = memories(made)
    assert memory(made) == max(every, key=lambda m: m.peak)
    whole = sum(p.nbytes(LLAMA.mesh) for p in made.parameters)
    assert sum(m.parameters for m in every) == whole == sum(m.gradients for m in every)  # nothing is tied
    gpipe, one = memories(under(LLAMA, "gpipe")), memories(under(LLAMA, "1f1b"))
    assert gpipe[0].saved == 2 * one[0].saved and gpipe[1].saved == 4 * one[1].saved  # 4 microbatches, or 2 and 1
    for m in (*gpipe, *one):
        assert m.accumulated == m.gradients  # no axis cuts them
        assert m.forward_peak > m.saved and m.backward_peak > m.accumulated
    zero = memories(compiled(TIED))
    halves = [sum(p.nbytes(TIED.mesh) for p in compiled(TIED).parameters if rank in p.ranks) for rank in (0, 1)]
    assert [m.parameters for m in zero] == halves
    assert all(m.gathered > m.parameters and m.accumulated > m.gradients for m in zero)  # unsharded on dp


def test_graphs_run_as_often_as_the_order_says() -> None:
    times = [{name: n for name, (_, n) in graph_runs(under(LLAMA, "zb_h1"), rank).items()} for rank in (0, 1)]
    for part, found in enumerate(times):
        names = {f"part{part}.{kind}": 4 for kind in ("forward", "backward_input", "backward_weight")}
        assert {name: n for name, n in found.items() if name.startswith("part")} == names
    assert "prologue" not in times[0] and times[1]["prologue"] == 4  # the count of labels: where the loss is
    tied = {name: n for name, (_, n) in graph_runs(compiled(TIED), 0).items()}
    assert (tied["part0.gather"], tied["part0.backward"], tied["part0.reduce"]) == (1, 2, 1)
    assert step_communication(compiled(TIED)) in [step_communication(compiled(TIED), rank) for rank in (0, 1)]


def test_the_lowered_order_is_the_executors() -> None:
    for cell in (LLAMA, TIED):
        pipeline = compiled(cell).pipeline
        parts = [(i, p) for i, p in enumerate(pipeline.parts)]
        whole = lower(
            pipeline.order, pipeline.edges, {i for i, p in parts if p.gather}, {i for i, p in parts if p.reduce}
        )
        assert lowered_order(pipeline) == Routes(pipeline).drop_empty(whole)


# --- dumps ---------------------------------------------------------------------------------------------------


def test_the_simulation_takes_medians_of_what_was_measured() -> None:
    order = SCHEDULES["zb_h1"].make(Request(3, 5))
    costs = Costs(F=(2.0, 3.0, 2.0), B=(2.0, 2.5, 1.0), W=(1.0, 1.0, 1.5), comm=0.25, activations=(1.0, 1.0, 1.0))
    truth = simulate(order, costs)
    events = [(rank, a, s, e) for rank, a, s, e in events_of(truth)]
    slow = max(events, key=lambda e: e[3])
    late = [(*slow[:3], slow[3] + 9.0) if event is slow else event for event in events]  # one outlier
    found = measured_costs(order, late, Costs(activations=(1.0, 1.0, 1.0)))
    assert (found.F, found.B, found.W) == (costs.F, costs.B, costs.W)
    assert found.comm == pytest.approx(0.25)
    assert simulate(order, found).makespan == pytest.approx(truth.makespan)
    fused = SCHEDULES["1f1b"].make(Request(2, 3))
    whole = measured_costs(fused, events_of(simulate(fused, Costs(1.0, 1.0, 0.5))), Costs())
    assert (whole.B, whole.W) == ((1.5, 1.5), (0.0, 0.0))
    joined = Order("one part", (parse_row("0F0 0BW0 0F1 0BWR1"),), ((0,),), (0,), (0, 0))
    alone = measured_costs(joined, events_of(simulate(joined, Costs(1.0, 1.0, 0.5, R=2.0))), Costs())
    assert (alone.B, alone.R) == ((1.5,), (2.0,))


def test_a_pipeline_is_dumped_with_its_trace(tmp_path: Path) -> None:
    made = compiled(LLAMA)
    timeline = step_timeline(made)
    recorded = [
        [(a, 100 + 2 * s, 100 + 2 * e) for rank, a, s, e in events_of(timeline) if rank == wanted] for wanted in (0, 1)
    ]
    ranks = [({"pp": pp, "dp": dp}, recorded[pp]) for pp in (1, 0) for dp in (1, 0)]
    assert per_rank(ranks) == recorded
    dumper = Dumper(tmp_path)
    dumper.add_compiled(made, recorded)
    rows = [parse_row(line) for line in (tmp_path / "order.txt").read_text().splitlines()]
    assert tuple(rows) == lowered_order(made.pipeline).ranks
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {e["args"]["name"]: e["pid"] for e in trace if e["name"] == "process_name"}
    spans = {
        name: [e["ts"] + e["dur"] for e in trace if e["ph"] == "X" and e["pid"] == pid] for name, pid in named.items()
    }
    assert max(spans["measured"]) == pytest.approx(2e6 * timeline.makespan, rel=1e-3, abs=0.01)
    page = (tmp_path / "report.html").read_text()
    for text in ("<dt>measured</dt>", "median times", "model.embed_tokens, model.layers.0", "a step, pp 1"):
        assert text in page, text
    alone = dump_pipeline(tmp_path, made)[0].body
    assert "estimated for" in alone and "<dt>measured</dt>" not in alone
    assert measured_events(recorded)[0][0] == 0


def test_levels_of_parts_are_step_graphs(tmp_path: Path) -> None:
    assert all(
        map(STEP_GRAPHS.fullmatch, ("forward", "part0.forward", "part12.backward_weight", "part1.gather", "once"))
    )
    assert not any(map(STEP_GRAPHS.fullmatch, ("part0.part", "part0.simplify", "forward.differentiate")))
    gm = compiled(LLAMA).local
    dumper, ctx = Dumper(tmp_path), Compilation(LLAMA.mesh)
    with ctx.within("part0."):
        dumper("part0.simplify", gm, ctx)
        dumper("part0.schedule_collectives", gm, ctx)
        dumper("part0.forward", gm, ctx)
    with ctx.within("part1."):
        dumper("part1.simplify", gm, ctx)
    assert [level.same for level in dumper.levels] == [
        False,
        True,
        False,
        False,
    ]  # what is compared with the one before
    assert not list(tmp_path.glob("*.diff"))


def test_layers_of_a_part() -> None:
    names = ["wte.weight", *(f"h.{i}.attn.{w}" for i in (0, 1, 2, 4) for w in "qk"), "scale"]
    assert modules_of(names) == "wte, h.{0..2,4}, scale"
    assert modules_of([]) == ""
