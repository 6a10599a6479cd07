"""How ranks are wired: text, errors, routes."""

from __future__ import annotations

import json

import pytest

from autopar.cost.topology import BANDWIDTH, LATENCY, Topologies, Topology


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ring:50e9:5e-6", Topology("ring", 50e9, 5e-6)),
        ("switch", Topology("switch", BANDWIDTH, LATENCY)),
        (" mesh:12.9e9 ", Topology("mesh", 12.9e9, LATENCY)),
        ("ring:123456789.125:0", Topology("ring", 123456789.125, 0.0)),
    ],
)
def test_text(text: str, found: Topology) -> None:
    assert Topology.parse(text) == found
    assert Topology.parse(str(found)) == found


def test_what_the_text_leaves_out_comes_from_the_device() -> None:
    assert Topology.parse("ring", 1e9, 1e-3) == Topology("ring", 1e9, 1e-3)
    assert Topology.parse("ring:2e9", 1e9, 1e-3) == Topology("ring", 2e9, 1e-3)


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
        ("ring:fast", "expected numbers behind the kind, found 'ring:fast'"),
        ("ring:0", "bandwidth needs bytes per second above 0, found 0"),
        ("ring:inf", "bandwidth needs bytes per second above 0, found inf"),
        ("ring:1e9:-1", "latency needs 0 or more seconds, found -1"),
        ("ring:1:2:3", "expected kind:bandwidth:latency, found 'ring:1:2:3'"),
        ("=ring", "expected AXIS=TOPOLOGY, found '=ring'"),
        ("cp=ring,cp=mesh", "cp given twice"),
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
    assert switch.delay(switch.route(3, 1, 5)) == mesh.delay(mesh.route(3, 1, 5)) == LATENCY
