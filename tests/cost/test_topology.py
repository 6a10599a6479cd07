"""How ranks are wired: text, errors, routes, times; and that every estimate reads it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from autopar.compile.model import compile_model
from autopar.cost.stage_costs import step_timeline
from autopar.cost.topology import Topologies, Topology
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.plan import PipelinePlan
from autopar.planner import make_plan
from autopar.planner.plan_fits import check_used
from autopar.report.summary import summarize
from autopar.steps.graphs import Compiled
from tests.support.slices import normalized


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ring:50e9:5e-6", Topology("ring", 50e9, 5e-6)),
        ("switch", Topology()),
        (" mesh:12.9e9 ", Topology("mesh", 12.9e9)),
        ("ring:123456789.125:0", Topology("ring", 123456789.125, 0.0)),
    ],
)
def test_text(text: str, found: Topology) -> None:
    assert Topology.parse(text) == found
    assert Topology.parse(str(found)) == found


def test_what_the_text_leaves_out_comes_from_the_device() -> None:
    device = Topology("switch", 1e9, 1e-3)
    assert Topology.parse("ring", device) == Topology("ring", 1e9, 1e-3)
    assert Topology.parse("ring:2e9", device) == Topology("ring", 2e9, 1e-3)
    wired = Topologies.parse("cp=ring", device)
    assert wired.of("tp") == device and wired.given("tp") is None and wired.of("cp%2") == Topology("ring", 1e9, 1e-3)


def test_axes() -> None:
    text = "cp=ring:50e9:5e-6,tp=switch:450e9"
    wired = Topologies.parse(text)
    assert wired.of("cp") == Topology("ring", 50e9, 5e-6) and wired.of("tp") == Topology("switch", 450e9)
    assert wired.of("dp") == Topology()
    assert Topologies.parse(json.loads(json.dumps(str(wired)))) == wired
    everywhere = Topologies.parse("ring:1e9,tp=switch")
    assert everywhere.of("cp").kind == "ring" and everywhere.of("tp").kind == "switch"
    assert Topologies.parse(str(everywhere)) == everywhere
    assert Topologies.parse("") == Topologies() and str(Topologies()) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("star", "expected one of ring, mesh, switch, found 'star'; such as ring:50e9:5e-6"),
        ("ring:fast", "expected numbers after the kind, found 'ring:fast'"),
        ("ring:0", "bandwidth needs bytes per second above 0, found 0"),
        ("ring:inf", "bandwidth needs bytes per second above 0, found inf"),
        ("ring:1e9:-1", "latency needs 0 or more seconds, found -1"),
        ("ring:1:2:3", "expected kind:bandwidth:latency, found 'ring:1:2:3'"),
        ("=ring", "expected AXIS=TOPOLOGY, found '=ring'"),
        ("cp=ring,cp=mesh", "'cp' given twice"),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="topology: ") as error:
        Topologies.parse(text)
    assert message in str(error.value)


def test_a_message_on_a_ring_crosses_every_link_on_its_way() -> None:
    ring = Topology("ring", latency=1e-6)
    assert ring.route(0, 1, 8) == (("up", 0),)
    assert ring.route(0, 7, 8) == (("down", 0),)
    assert ring.route(7, 1, 8) == (("up", 7), ("up", 0))
    assert ring.route(1, 6, 8) == (("down", 1), ("down", 0), ("down", 7))
    assert ring.delay(ring.route(1, 6, 8)) == pytest.approx(3e-6)
    assert ring.route(0, 4, 8)[0] == ("up", 0) and ring.route(0, 4, 8, "down")[0] == ("down", 0)


def test_two_ranks_have_one_link() -> None:
    ring = Topology("ring")
    assert ring.route(0, 1, 2, "up") == ring.route(0, 1, 2, "down")


def test_a_mesh_goes_straight_and_a_switch_through_two_ports() -> None:
    mesh, switch = Topology("mesh"), Topology("switch")
    routes = {mesh.route(i, j, 5) for i in range(5) for j in range(5) if i != j}
    assert len(routes) == 20 and all(len(route) == 1 for route in routes)
    assert switch.route(3, 1, 5) == (("out", 3), ("in", 1))
    assert switch.delay(switch.route(3, 1, 5)) == mesh.delay(mesh.route(3, 1, 5)) == Topology().latency


def test_seconds_of_collectives() -> None:
    """Each rank sends 12 bytes among 4: round a ring, straight over a mesh, through one port of a switch."""
    ring, mesh, switch = (Topology(kind, 1.0, 1.0) for kind in ("ring", "mesh", "switch"))
    assert switch.seconds("all_gather", 12, 4) == switch.seconds("all_to_all", 12, 4) == 1 + 12
    assert mesh.seconds("all_gather", 12, 4) == mesh.seconds("all_to_all", 12, 4) == 1 + 4
    assert ring.seconds("all_gather", 12, 4) == 3 + 12
    assert ring.seconds("all_to_all", 12, 4) == 2 + 4 * 3  # up: to the next, and to the opposite over two links
    assert [t.seconds("send", 12, 4, calls=2) for t in (ring, mesh, switch)] == [2 + 12] * 3


@pytest.fixture(scope="module")
def pipeline() -> Compiled:
    model, batch = TINY["llama"].build(), TINY["llama"].batch(4, 16)
    options = Options(schedule="1f1b", microbatches=2)
    return compile_model(model, batch, Mesh.of(pp=2, tp=2), options, outputs=())


def wired(compiled: Compiled, text: str) -> Compiled:
    """The same, as if its options had named these links."""
    options = dataclasses.replace(compiled.plan.options, topology=text)
    return dataclasses.replace(compiled, plan=dataclasses.replace(compiled.plan, options=options))


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_a_slow_link_slows_what_goes_over_it(pipeline: Compiled, axis: str) -> None:
    """Of every axis: the step that is simulated and the transfers of a report, by the links' ratio."""
    slow = wired(pipeline, f"{axis}=switch:25e3")
    assert step_timeline(slow).makespan > 2 * step_timeline(pipeline).makespan
    times = [{(r["axis"], r["kind"]): r["seconds"] for r in summarize(c)["communication"]} for c in (pipeline, slow)]
    for (over, kind), before in times[0].items():
        ratio = times[1][over, kind] / before
        assert ratio > 2 if over == axis else ratio == 1, (over, kind)


def test_links_of_a_pipeline_choose_its_schedule_and_slices() -> None:
    """Over a slow pp link two parts per rank send too much; slices share out what is sent, each costs a latency."""
    gm, mesh = normalized(TINY["llama"].build(), TINY["llama"].batch(8, 64)), Mesh.of(pp=2)

    def planned(**how: Any) -> PipelinePlan:
        plan = make_plan(gm, mesh, Options(microbatches=4, **how)).pipeline
        assert plan is not None
        return plan

    assert planned().schedule != planned(topology="pp=switch:1e6").schedule == "1f1b"
    sliced = [
        planned(schedule="seq1f1b", topology=text).token_slices for text in ("pp=switch:1e4:0", "pp=switch:1e4:1e3")
    ]
    assert len(sliced[0]) > len(sliced[1]) == 1


def test_links_of_an_axis_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="topology: names links of the axis 'xp', found the mesh dp=2; leave"):
        check_used(Options(topology="xp=ring"), Mesh.of(dp=2))
