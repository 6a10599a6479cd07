"""Dumps: the text of a graph at each level, bytes on the wire, the files, and the report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from autopar.cost import traffic
from autopar.ir.conversions import convert
from autopar.ir.mesh import Mesh
from autopar.ir.placement import PARTIAL, Placement, Shard
from autopar.ir.signature import InputSpec, OutputSpec, ParameterSpec, Signature
from autopar.ir.traffic import Traffic, add_ledgers, collective_bytes
from autopar.options import Options
from autopar.plan import ParameterPlan, Plan
from autopar.report.dump.dump import Dumper, dumper_for
from autopar.report.graph_text import diff, format_graph, format_type
from autopar.report.html.page import Level, Page, Section, render
from autopar.report.tables import human_bytes
from autopar.rewrite.compilation import Compilation

aten, ops = torch.ops.aten, torch.ops.autopar
MESH = Mesh.of(dp=2, tp=4)


def meta(shape: list[int], dtype: torch.dtype = torch.float32, **placements: Placement) -> dict[str, object]:
    return {"val": torch.empty(shape, dtype=dtype, device="meta"), "placements": placements}


def add(graph: Graph, target: object, args: tuple[object, ...], facts: dict[str, object], path: str = "") -> Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta = {**facts, "nn_module_stack": {path: (path, "Linear")}} if path else facts
    return node


def typed_graph() -> GraphModule:
    """A row-parallel linear and the sum it needs, on global shapes."""
    graph = Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta, w.meta = meta([4, 16, 32], dp=Shard(0), tp=Shard(2)), meta([8, 32], tp=Shard(1))
    y = add(graph, aten.linear.default, (x, w), meta([4, 16, 8], dp=Shard(0), tp=PARTIAL), "mlp.down")
    z = add(graph, convert, (y, "tp", "P", "I"), meta([4, 16, 8], dp=Shard(0)), "mlp.down")
    n = add(graph, convert, (z, "tp", "I", "R"), meta([4, 16, 8], dp=Shard(0)))
    graph.output((n,))
    gm = GraphModule({}, graph)
    inputs = (InputSpec("x", "input", "x"), InputSpec("w", "parameter", "mlp.down.weight", ("head.weight",)))
    gm.meta["signature"] = Signature(inputs, (OutputSpec("output", "loss"),))
    return gm


def step_graph() -> GraphModule:
    """One of each raw collective on a [2, 8] float32 of 64 bytes, over tp."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta = meta([2, 8])
    made = [
        add(graph, ops.all_reduce.default, (x, "tp", "sum"), meta([2, 8])),
        add(graph, ops.all_gather.default, (x, 0, [], "tp", 4), meta([8, 8])),
        add(graph, ops.reduce_scatter.default, (x, 1, [], "tp", 4), meta([2, 2])),
        add(graph, ops.all_to_all.default, (x, 0, [], 1, [], "tp", 4), meta([8, 2])),
        add(graph, ops.shard_slice.default, (x, 1, [], "tp", 4), meta([2, 2])),
    ]
    graph.output(tuple(made))
    return GraphModule({}, graph)


def squeezed(text: str) -> list[str]:
    return [re.sub(r"  +", "  ", line) for line in text.splitlines()]


def test_typed_graph_reads_like_python() -> None:
    assert squeezed(format_graph(typed_graph(), MESH)) == [
        "x: f32[4,16,32] dp:S(0) tp:S(2)  = input  # x",
        "w: f32[8,32] tp:S(1)  = parameter  # mlp.down.weight, also head.weight",
        "linear_default: f32[4,16,8] dp:S(0) tp:P  = linear(x, w)  # mlp.down",
        # 4*16*8 float32 are 2 KiB, half of it on each dp rank; a ring of 4 sends 2 * 3/4 of that
        "convert: f32[4,16,8] dp:S(0)  = convert(linear_default, tp, P -> I)  # all_reduce over tp, 1.5 KiB; mlp.down",
        "convert_1: f32[4,16,8] dp:S(0)  = convert(convert, tp, I -> R)  # none",
        "return (convert_1,)  # loss",
    ]


def test_step_graph_shows_the_bytes_of_each_collective() -> None:
    text = squeezed(format_graph(step_graph(), MESH))
    assert (
        text[2] == "all_gather_default: f32[8,8]  = autopar.all_gather(x, 0, [], 'tp', 4)  # all_gather over tp, 192 B"
    )
    assert "#" not in text[5]  # a slice sends nothing


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("all_reduce", 96), ("all_gather", 48), ("reduce_scatter", 48), ("all_to_all", 12), ("slice", 0), ("none", 0)],
)
def test_ring_formulas(kind: str, expected: int) -> None:
    assert collective_bytes(kind, 64, 4) == expected
    assert collective_bytes(kind, 64, 1) == 0


def test_communication_counts_per_axis_and_kind() -> None:
    assert traffic.communication(step_graph(), MESH) == {
        ("tp", "all_reduce"): Traffic(1, 96),
        ("tp", "all_gather"): Traffic(1, 192),
        ("tp", "reduce_scatter"): Traffic(1, 48),
        ("tp", "all_to_all"): Traffic(1, 48),
    }
    assert traffic.communication(step_graph(), Mesh.of(dp=2)) == {}
    typed = traffic.communication(typed_graph(), MESH)
    assert add_ledgers(typed, typed) == {("tp", "all_reduce"): Traffic(2, 3072)}


def test_types_of_values() -> None:
    pair = (torch.empty(2, dtype=torch.bfloat16), torch.empty((), dtype=torch.int64))
    assert format_type(pair) == "(bf16[2], i64[])"
    assert (format_type(None), format_type(3)) == ("?", "int")


def test_diff_and_sizes() -> None:
    assert diff("a\nb\n", "a\nb\n") == ""
    assert diff("a\nb\n", "a\nc\n").splitlines()[3:] == [" a", "-b", "+c"]
    assert [human_bytes(n) for n in (512, 8192, 3 * 2**29, 2**40)] == ["512 B", "8.0 KiB", "1.5 GiB", "1.0 TiB"]


def small_plan() -> Plan:
    down = {"tp": ParameterPlan(Shard(1), Shard(1), "contracts what mlp.up cuts")}
    return Plan(MESH, "0", Options(), {"mlp.down.weight": down}, {"x": {"dp": Shard(0)}}, (), (("norm", "left whole"),))


def test_dumper_writes_every_level_and_the_report(tmp_path: Path) -> None:
    (tmp_path / "07-stale.txt").write_text("from a longer run")
    ctx = Compilation(MESH, small_plan(), timings={"propagate": 0.25, "checks": 0.5})
    dumper = Dumper(tmp_path, title="tiny <model>")
    before = typed_graph()
    before.graph.erase_node(list(before.graph.nodes)[-1])
    dumper.record("capture", before, MESH)
    dumper("propagate", typed_graph(), ctx)
    dumper.record("stage 0 F", step_graph(), MESH, step=True)
    dumper.finish(ctx, parameters=[ParameterSpec("w", (8, 32), torch.float32, placements={"tp": Shard(1)})])

    names = {p.name for p in tmp_path.iterdir()}
    assert names == {
        *("000-capture.txt", "001-propagate.txt", "001-propagate.diff", "002-stage-0-F.txt"),
        *("timings.txt", "plan.txt", "plan.json", "communication.txt", "report.html"),
    }
    assert (tmp_path / "001-propagate.diff").read_text().splitlines()[-1].startswith("+return (convert_1,)")
    assert Plan.from_json((tmp_path / "plan.json").read_text()) == small_plan()
    assert "500.0 ms  checks" in (tmp_path / "timings.txt").read_text()
    lines = (tmp_path / "communication.txt").read_text().splitlines()
    assert lines[1].split() == ["stage", "0", "F", "tp", "all_reduce", "1", "96", "B"]
    page = (tmp_path / "report.html").read_text()
    for text in ("tiny &lt;model&gt;", "contracts what mlp.up cuts", "256 B", "384 B in 4 calls"):
        assert text in page


def test_only_rank_zero_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    dumper = Dumper(tmp_path / "dump")
    dumper.record("capture", typed_graph(), MESH)
    dumper.finish(Compilation(MESH))
    assert not (tmp_path / "dump").exists()


def test_environment_asks_for_a_dumper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_DUMP", raising=False)
    assert dumper_for(None) is None
    monkeypatch.setenv("AUTOPAR_DUMP", str(tmp_path / "d"))
    dumper = dumper_for(None)
    assert dumper and dumper.folder == tmp_path / "d"
    experts = dumper_for(None, "experts")
    assert experts and experts.folder == tmp_path / "d" / "experts"


def test_report_is_self_contained_and_escaped() -> None:
    level = Level("normalize", "x: f32[2] = <a>  # p & q", "--- before\n+++ after\n@@ -1 +1 @@\n-a<\n+b>", 0.001, 1)
    page = render(Page(levels=[level], sections=[Section("Timeline", "<svg></svg>")]))
    assert not re.search(r"(src|href)=[\"']?(https?:)?//|@import|url\(", page)
    assert "<b>x</b>: f32[2] = &lt;a&gt;<i>  # p &amp; q</i>" in page
    assert "<del>-a&lt;</del>\n<ins>+b&gt;</ins>" in page and "--- before" not in page
    assert page.index("Timeline") < page.index("No graph communicates") < page.index("normalize")
    assert "{{" not in page  # every field of the template is filled


def test_empty_report_renders() -> None:
    assert "<!doctype html>" in render(Page())
