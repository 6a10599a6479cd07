"""`autopar experts`, and what it counts: against tables, against every choice that tokens can make, against a graph."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.compile.model import compile_model
from autopar.cost.expert_traffic import DispatchCost, dispatch_costs
from autopar.cost.topology import NamedLinks, Topology
from autopar.cost.traffic import step_communication
from autopar.ir.mesh import Mesh
from autopar.models.tiny import HIDDEN, TINY
from autopar.options import Options
from autopar.token_dispatchers import TOKEN_DISPATCHERS, Routing

LINKS = Topology(bandwidth=1e9, latency=0.0)


def costs(routing: Routing, tokens: int = 1, width: int = 1, inside: Topology = LINKS) -> dict[str, DispatchCost]:
    return {c.name: c for c in dispatch_costs(routing, tokens, width, 4, *links(routing, inside))}


def links(routing: Routing, inside: Topology = LINKS) -> tuple[NamedLinks, NamedLinks]:
    """Within a node, and between nodes."""
    return NamedLinks(inside, routing.per_node), NamedLinks(LINKS, routing.ranks // routing.per_node)


@pytest.mark.parametrize(
    ("numbers", "alltoall", "alltoall_dedup", "hierarchical"),
    [  # experts, top_k, ranks, per node; (between nodes, in all), of two levels (between, inside)
        ((8, 2, 2, 2), (0, 1.00), (0, 0.79), (0, 0.79)),
        ((8, 2, 4, 4), (0, 1.50), (0, 1.39), (0, 1.39)),
        ((64, 8, 4, 4), (0, 6.00), (0, 2.74), (0, 2.74)),
        ((64, 8, 8, 8), (0, 7.00), (0, 4.75), (0, 4.75)),
        ((128, 8, 16, 8), (4.00, 7.50), (3.30, 6.18), (1.00, 5.77)),
        ((256, 8, 32, 8), (6.00, 7.75), (5.45, 7.04), (2.71, 6.36)),
        ((256, 8, 64, 8), (7.00, 7.88), (6.72, 7.56), (4.63, 6.72)),
    ],
)
def test_copies_of_tokens(
    numbers: tuple[int, int, int, int],
    alltoall: tuple[float, float],
    alltoall_dedup: tuple[float, float],
    hierarchical: tuple[float, float],
) -> None:
    found = costs(Routing(*numbers))
    for name, expected in (("alltoall", alltoall), ("alltoall_dedup", alltoall_dedup)):
        c = found[name]
        assert (c.copies_between, c.copies_between + c.copies_inside) == pytest.approx(expected, abs=0.0051), name
    levels = found["hierarchical"]
    assert (levels.copies_between, levels.copies_inside) == pytest.approx(hierarchical, abs=0.0051)
    everything = found["allgather"]
    assert everything.copies_inside + everything.copies_between == pytest.approx(numbers[2] - 1)


def choices(r: Routing) -> list[tuple[int, ...]]:
    """All that a token can choose, each as often as it is chosen."""
    size = r.experts // r.groups
    allowed = (
        [e for g in groups for e in range(g * size, (g + 1) * size)]
        for groups in itertools.combinations(range(r.groups), r.limit)
    )
    return [chosen for experts in allowed for chosen in itertools.combinations(experts, r.top_k)]


@pytest.mark.parametrize(
    "routing",
    [
        Routing(6, 2, 3, 1),
        Routing(8, 3, 4, 2, groups=4, limit=2),  # a group per rank
        Routing(8, 3, 8, 2, groups=2, limit=1),  # a group over several nodes
        Routing(12, 2, 4, 2, groups=3, limit=2),  # a group that lies on two nodes
        Routing(12, 4, 6, 3, groups=6, limit=3),
        Routing(4, 4, 4, 2),  # all experts
        Routing(4, 1, 1, 1),
    ],
    ids=str,
)
def test_against_every_choice(routing: Routing) -> None:
    every, r = choices(routing), routing
    own, here = r.experts // r.ranks, r.experts // r.nodes
    sent = {name: [0, 0] for name in ("alltoall", "alltoall_dedup", "hierarchical")}  # inside, between
    for rank, chosen in itertools.product(range(r.ranks), every):
        node = rank // r.per_node
        ranks, nodes = {e // own for e in chosen}, {e // here for e in chosen}
        for to in (e // own for e in chosen):
            sent["alltoall"][to // r.per_node != node] += to != rank
        for to in ranks:
            sent["alltoall_dedup"][to // r.per_node != node] += to != rank
            sent["hierarchical"][0] += to % r.per_node != rank % r.per_node  # from where it came to the node
        sent["hierarchical"][1] += len(nodes - {node})
    found, total = costs(routing), r.ranks * len(every)
    for name, (inside, between) in sent.items():
        c = found[name]
        assert (c.copies_inside, c.copies_between) == pytest.approx((inside / total, between / total)), name
    assert r.most_nodes == max(len({e // here for e in chosen}) for chosen in every)
    most = max(sum(e < own for e in chosen) for chosen in every)
    assert r.worst_rows(5) >= 5 * r.ranks * most
    if own <= r.experts // r.groups or r.groups == 1:
        assert r.worst_rows(5) == 5 * r.ranks * most


@pytest.mark.parametrize("name", TOKEN_DISPATCHERS)
def test_what_a_graph_sends(name: str) -> None:
    """In two layers of a compiled step. Copies are whole ones there."""
    model, batch = TINY["qwen3_moe"].build().double(), TINY["qwen3_moe"].batch(8, 16)
    step = compile_model(
        model, batch, Mesh.of(ep=4), Options(token_dispatcher=name, topology="ep%2=switch"), outputs=()
    )
    traffic = step_communication(step, 0)
    kinds = ("all_gather", "reduce_scatter", "all_to_all_rows")
    found = Counter({axis: t.bytes for (axis, kind), t in traffic.items() if kind == kinds[2]})
    found["ep"] += sum(t.bytes for (axis, kind), t in traffic.items() if axis == "ep" and kind in kinds[:2])
    routing = Routing(4, 2, 4, 2)
    (cost,) = [c for c in dispatch_costs(routing, 32, HIDDEN, 8, *links(routing)) if c.name == name]
    if TOKEN_DISPATCHERS[name].over_nodes:
        assert found["ep%2"] == pytest.approx(2 * cost.bytes_inside, rel=0.02)
        assert found["ep/2"] == pytest.approx(2 * cost.bytes_between, rel=0.02) and found["ep"] == 0
    else:
        assert found["ep"] == pytest.approx(2 * (cost.bytes_inside + cost.bytes_between), rel=0.02)


def test_seconds() -> None:
    """Levels of one exchange run beside each other, those of two exchanges one after the other."""
    slow = Topology(bandwidth=1e6, latency=1.0)
    routing = Routing(8, 2, 4, 2)
    free, found = costs(routing, 1000, 16), costs(routing, 1000, 16, slow)
    assert found["alltoall_dedup"].seconds == pytest.approx(8 + found["alltoall_dedup"].bytes_inside / 1e6)
    two = found["hierarchical"]
    assert two.seconds == pytest.approx(8 + two.bytes_inside / 1e6 + two.bytes_between / 1e9)
    assert free["alltoall"].seconds == pytest.approx(
        max(free["alltoall"].bytes_inside, free["alltoall"].bytes_between) / 1e9
    )
    assert free["alltoall"].bytes_inside == 2 * 1 / 4 * 1000 * 4 * 16 * 4
    assert costs(Routing(4, 2, 1, 1))["alltoall_dedup"].seconds == 0.0


def experts(capsys: pytest.CaptureFixture[str], *options: object) -> str:
    given = ["--ranks", 64, "--per-node", 8, "--experts", 256, "--top-k", 8, "--hidden", 7168, *options]
    assert main(["experts", *map(str, given)]) == 0
    return capsys.readouterr().out


def row(out: str, name: str) -> list[str]:
    line = next(line for line in out.splitlines() if re.match(rf"[│|] {name} ", line))
    return [cell.strip() for cell in re.split("[│|]", line)[1:-1]]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    out = experts(capsys)
    assert "256 experts on 8 nodes of 8 ranks, 8 per token; 4096 tokens x 7168 per rank, bfloat16" in out
    assert row(out, "alltoall_dedup")[1:3] == ["0.84", "6.72"] and row(out, "hierarchical")[1:3] == ["6.72", "4.63"]
    assert row(out, "alltoall")[4] == "1,644" and float(row(out, "hierarchical")[5]) < float(
        row(out, "alltoall_dedup")[5]
    )
    assert (
        "ms by estimate): a copy per token and node" in out
        and "least time: hierarchical" in out
        and "a token reaches 5.29 nodes, at most 8" in out
    )
    assert "32768 if routing is even (469.8 MB), at worst 1048576 (15,032 MB)" in out
    assert 'on a mesh: topology="ep%8=switch:3e11:5e-6,ep/8=switch:' in out and "warning" not in out


def test_limits_of_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    out = experts(capsys, "--groups", 8, "--group-limit", 4)
    assert "8 per token, from 4 of 8 groups" in out and "at most 4\n" in out and "warning" not in out
    assert float(row(out, "hierarchical")[2]) <= 4 * 7 / 8
    out = experts(capsys, "--groups", 4, "--group-limit", 2, "--between", "switch:1e9:0")
    assert "warning: 4 groups of experts do not divide over 8 nodes" in out and "switch:1e9:0 between nodes" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", 48], "experts: 256 experts do not divide over 48 ranks; use one of 1, 2, 4,"),
        (["--per-node", 24], "experts: 64 ranks do not divide into nodes of 24; use a multiple of 24 ranks, or"),
        (["--groups", 7], "experts: 256 experts do not divide into 7 groups; use a divisor of 256"),
        (["--groups", 8, "--group-limit", 9], "experts: a token may use 1 to 8 groups, found a limit of 9"),
        (["--top-k", 257], "experts: top_k must be from 1 to 256, the experts in the groups"),
        (["--groups", 64, "--group-limit", 1], "experts: top_k must be from 1 to 4, the experts in the groups"),
        (["--inside", "star"], "topology: expected one of ring, mesh, switch, found 'star'"),
    ],
)
def test_refusals(options: list[object], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--ranks", 64, "--per-node", 8, "--experts", 256, "--top-k", 8, "--hidden", 7168, *options]
    assert main(["experts", *map(str, given)]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_of_sums_over_data_ranks_and_those_of_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ZeRO cuts what experts do not over both at once: one row, of a group of two axes."""
    TINY["mixtral"].build().config.save_pretrained(tmp_path)
    config = str(tmp_path / "config.json")
    assert main(["plan", "--config", config, "--mesh", "dp=2,ep=2", "--zero", "3", "--seq", "32"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"(dp,ep|ep,dp)", shown.partition("Communication of a rank")[2]), shown
