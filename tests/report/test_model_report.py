"""The report's view of the model: what each module costs adds up to the step, layers that are alike are one row."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch.fx import Graph, GraphModule

from autopar.cost.flops import seconds_of
from autopar.cost.graph_times import graph_times
from autopar.cost.hardware import DEFAULT, Links, device_of
from autopar.cost.memory import Memory
from autopar.cost.stage_costs import times_of_graphs
from autopar.cost.step_estimate import Exchanged, ModuleCost, StepEstimate, module_costs, step_estimate
from autopar.cost.topology import Topologies, Topology
from autopar.cost.traffic import graph_runs, step_communication
from autopar.ir.expert_layers import ExpertPlan
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.ir.signature import ParameterSpec
from autopar.ir.traffic import add_ledgers
from autopar.options import Options
from autopar.plan import ParameterPlan, Plan
from autopar.report.dump.dump import Dumper, plan_rows
from autopar.report.html.layer_picture import _Step
from autopar.report.html.model_pages import advice, memory_causes, model_sections
from autopar.report.html.page import ROOM, Level, folded, graph_levels
from autopar.report.model_tree import ModuleRow, cuts_in_words, model_tree
from autopar.steps.graphs import Compiled
from tests.support.cases import Cell, compiled
from tests.support.devices import device

ZERO3 = Cell("llama", Mesh.of(dp=2, tp=2), Options(zero=3, sequence_parallel=True, microbatches=2))
CELLS = [
    ZERO3,
    Cell("llama", Mesh.of(dp=2, tp=2), Options(zero=1)),
    Cell("llama", Mesh.of(cp=2, dp=2), Options(attention="ring")),
    Cell("llama", Mesh.of(pp=2, dp=2), Options(microbatches=4, schedule="zb_h1", virtual_stages=1)),
]


def tree(cell: Cell) -> ModuleRow:
    made = compiled(cell)
    return model_tree(made, times_of_graphs(made.plan))


def row(root: ModuleRow, name: str) -> ModuleRow:
    (found,) = [r for r in root.all() if r.name == name]
    return found


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_modules_exchange_what_the_step_does(cell: Cell) -> None:
    """Buckets are dealt to their modules, nothing is lost and nothing counted twice."""
    made = compiled(cell)
    ranks = range(cell.mesh.size("pp"))
    step = add_ledgers(*(step_communication(made, rank) for rank in ranks))
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for cost in module_costs(made, times_of_graphs(made.plan)).values():
        for (axis, kind, _), x in cost.exchanged.items():
            calls, size = found.get((axis, kind), (0.0, 0.0))
            found[axis, kind] = calls + x.calls, size + x.bytes
    expected = {key: (v.calls, v.bytes) for key, v in step.items() if key[0] != "pp"}
    assert {key: pytest.approx(v, rel=1e-6) for key, v in found.items()} == expected


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_modules_compute_what_the_step_does(cell: Cell) -> None:
    """Without launches, which run on while the device waits for a transfer."""
    made, links = compiled(cell), Links.of(cell.options, cell.mesh)
    chip = dataclasses.replace(DEFAULT, stack=dataclasses.replace(DEFAULT.stack, launch=0.0))
    graphs = {name: found for rank in range(cell.mesh.size("pp")) for name, found in graph_runs(made, rank).items()}
    whole = sum(runs * seconds_of(gm.graph.nodes, chip) for gm, runs in graphs.values())
    costs = module_costs(made, lambda gm: graph_times(gm, chip, links))
    assert sum(c.forward + c.backward for c in costs.values()) == pytest.approx(
        whole, rel=1e-4
    )  # of the prologue each rank runs its own
    named = sum(c.forward + c.backward for path, c in costs.items() if path)
    assert named > 0.6 * whole  # the backward, too, knows the module of nearly all it computes


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_sums_of_gradients_have_their_modules(cell: Cell) -> None:
    """Those that stand in R, too."""
    whole = module_costs(compiled(cell), times_of_graphs(compiled(cell).plan))
    unnamed = sum(x.bytes for (axis, _, _), x in whole[""].exchanged.items() if axis == "dp")
    assert unnamed < 0.02 * sum(x.bytes for cost in whole.values() for x in cost.exchanged.values())


def test_layers_that_are_alike_are_one_row_with_the_sum_of_both() -> None:
    root = tree(ZERO3)
    layers = row(root, "layers.{0,1}")
    assert (layers.kind, layers.count) == ("LlamaDecoderLayer", 2) and layers.paths[1] == "model.layers.1"
    (weight,) = row(root, "q_proj").weights
    assert weight.cuts == ("output features over tp", "in 2 shards over dp, gathered for each use")
    assert row(root, "o_proj").weights[0].cuts[0] == "input features over tp"
    assert row(root, "embed_tokens").weights[0].cuts[0] == "rows of the table (the vocabulary) over tp"
    made = compiled(ZERO3)
    assert root.elements == sum(math.prod(spec.shape) for spec in made.parameters)
    assert root.bytes == sum(spec.nbytes(made.plan.mesh) for spec in made.parameters)
    assert weight.bytes == 2 * weight.spec.nbytes(made.plan.mesh)


def test_sums_belong_to_the_module_that_leaves_them_open() -> None:
    root = tree(Cell("llama", Mesh.of(dp=2, tp=2), Options(zero=1)))
    calls = {name: row(root, name).own.exchanged for name in ("o_proj", "q_proj", "k_proj", "down_proj")}
    assert calls["o_proj"]["tp", "all_reduce", "forward"].calls == 2  # of two layers
    assert calls["down_proj"]["tp", "all_reduce", "forward"].calls == 2
    assert not any(way == "forward" and axis == "tp" for axis, _, way in calls["q_proj"])
    assert all(("dp", "reduce_scatter", "backward") in ways for ways in calls.values())


def test_unlike_layers_are_rows_of_their_own() -> None:
    root = tree(Cell("llama", Mesh.of(pp=2, dp=2), Options(microbatches=4, schedule="zb_h1", virtual_stages=1)))
    assert sum(r.count for r in root.all() if r.kind == "LlamaDecoderLayer") == 2


@pytest.mark.parametrize(
    ("kind", "shape", "cut", "axis", "words"),
    [
        ("Linear", (8, 4), Shard(0), "tp", "output features over tp"),
        ("Conv1D", (4, 8), Shard(1), "tp", "output features over tp"),
        ("Conv2d", (8, 4, 3, 3), Shard(1), "tp", "input channels over tp"),
        ("LayerNorm", (8,), Shard(0), "tp", "elements over tp"),
        ("Experts", (8, 4, 4), Shard(0), "ep", "experts over ep"),
        ("Experts", (8, 4, 4), Shard(0), "dp", "experts over dp"),
        ("Experts", (8, 4), Shard(0), "tp", "experts over tp"),
        ("Experts", (8, 4, 4), Shard(2), "tp", "dim 2 over tp"),
        ("Linear", (8, 4), Shard(0, (4, 2, 2)), "tp", "output features, each of 3 blocks over tp"),
    ],
)
def test_cuts_in_words(kind: str, shape: tuple[int, ...], cut: Shard, axis: str, words: str) -> None:
    spec = ParameterSpec("w", shape, torch.float32, placements={axis: cut})
    experts = {"dispatch": ExpertPlan(axis, "allgather")} if "experts" in words else {}
    plan = Plan(Mesh.of(**{axis: 2}), "", Options(), {"w": {axis: ParameterPlan(cut, cut)}}, {}, experts=experts)
    assert cuts_in_words(spec, plan, kind) == [words]


# --- times ---------------------------------------------------------------------------------------------------


def overlapping(products: int) -> GraphModule:
    """A sum over tp, products beside it, and what waits for both."""
    graph = Graph()
    x = graph.placeholder("x")
    value = x.meta["val"] = torch.empty(100, 100, device="meta")
    total = graph.call_function(torch.ops.autopar.all_reduce.default, (x, "tp", "sum"))
    y = x
    for _ in range(products):
        y = graph.call_function(torch.ops.aten.mm.default, (y, x))
    graph.output((graph.call_function(torch.ops.aten.mm.default, (total, y)),))
    for node in graph.nodes:
        node.meta["val"] = value
    return GraphModule({}, graph)


@pytest.mark.parametrize("products", [0, 1, 3, 5])
def test_a_transfer_is_exposed_as_far_as_nothing_is_computed_beside_it(products: int) -> None:
    slow = device("slow", 2 * 128 * 128 * 100, 1e12)  # a product of 100^3 takes a second
    links = Links(Mesh.of(tp=2), named=Topologies({"tp": Topology(bandwidth=1e4, latency=0.0)}))  # 40,000 bytes take 4
    found = graph_times(overlapping(products), slow, links)
    (exposed,) = found.exposed.values() or (0.0,)
    assert exposed == pytest.approx(max(4.0 - products, 0.0))
    assert found.seconds == pytest.approx(max(4, products) + 1) and sum(found.moving.values()) == pytest.approx(4)


def test_a_step_takes_as_long_as_its_graphs_and_counts_the_flops_of_the_model() -> None:
    """Of one rank without transfers: what its nodes compute; twice the parameters per token and direction, and more."""
    made = compiled(Cell("llama", Mesh.of(tp=1), Options()))
    found = step_estimate(made)
    assert found.exposed == 0 and found.seconds == pytest.approx(found.computing + found.optimizer)
    device, elements = device_of(made.plan.options), sum(math.prod(p.shape) for p in made.parameters)
    assert found.optimizer == pytest.approx(elements * device.stack.optimizer / device.memory)
    products = sum(math.prod(p.shape) for p in made.parameters if len(p.shape) == 2 and "embed" not in p.name)
    tokens = math.prod(next(n.meta["val"].shape for n in made.local.graph.nodes if n.name == "input_ids"))
    assert 6 * products * tokens < found.flops < 9 * products * tokens
    assert found.utilization == pytest.approx(found.flops / (found.seconds * 19.5e12))  # float64 of an A100


def test_cut_models_have_the_flops_of_the_whole() -> None:
    whole = step_estimate(compiled(Cell("llama", Mesh.of(tp=1), Options()))).flops
    for cell in CELLS:
        assert step_estimate(compiled(cell)).flops == pytest.approx(whole, rel=0.05), str(cell)


def test_shards_of_zero_step_their_own_elements() -> None:
    whole, shards = (step_estimate(compiled(Cell("llama", Mesh.of(dp=4), Options(zero=n)))).optimizer for n in (0, 1))
    assert shards == pytest.approx(whole / 4, rel=0.05)


def test_the_device_is_the_users() -> None:
    def seconds(made: Compiled) -> float:
        return step_estimate(made).seconds

    fast = Cell("llama", Mesh.of(dp=2, tp=2), Options(zero=1, target_hardware="h100"))
    assert compiled(fast).plan.options.target_hardware == "H100"
    assert seconds(compiled(fast)) < seconds(compiled(Cell("llama", Mesh.of(dp=2, tp=2), Options(zero=1))))
    with pytest.raises(ValueError, match=r"target_hardware: expected 'V100', 'A100',.* or 'CPU', found 'TPU'"):
        Options(target_hardware="tpu")


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_report_begins_with_the_model(tmp_path: Path) -> None:
    dumper = Dumper(tmp_path)
    dumper.record("forward", compiled(ZERO3).pipeline.parts[0].forward.graph, ZERO3.mesh, step=True)
    dumper.add_compiled(compiled(ZERO3))
    page = (tmp_path / "report.html").read_text()
    places = [page.index(f'id="{name}"') for name in ("summary", "model", "one-layer", "memory", "plan", "graphs")]
    assert places == sorted(places)
    for text in ("layers.{0,1}", "output features over tp", "in 2 shards over dp", "optimizer states", "MFU"):
        assert text in page, text


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_mesh_has_its_pages_and_memory_adds_up(cell: Cell) -> None:
    from autopar.cost.memory import memory

    held = memory(compiled(cell))
    causes = memory_causes(held)
    assert sum(size for _, size in causes) == held.peak and all(size >= 0 for _, size in causes)
    titles = [section.title for section in model_sections(compiled(cell))[0] if section.title != "What to try"]
    assert titles[0] == "Model" and titles[-1] == "Memory"


LAYERS = "\n".join(
    f"linear_{i}: f32[2] = linear(x, w)  # all_reduce over tp, 8 B; model.layers.{i}.mlp" for i in range(4)
)


def test_of_repeated_layers_the_first_is_shown() -> None:
    text = f"x: f32[2] = input\n{LAYERS}\nreturn (linear_3,)"
    assert folded(text, 10_000).splitlines() == [
        "x: f32[2] = input",
        LAYERS.splitlines()[0],
        "... 3 lines of layers like these",
        "return (linear_3,)",
    ]
    assert folded(LAYERS, 100).splitlines() == [LAYERS.splitlines()[0], "... 1 more lines"]


def test_a_diff_keeps_no_heads_without_lines() -> None:
    lines = LAYERS.splitlines()
    diff = "\n".join(["@@ -1 +1 @@", f"+{lines[0]}", "@@ -9 +9 @@", f"+{lines[1]}", "@@ -20 +20 @@", "+y"])
    assert folded(diff, 10_000).splitlines() == [
        "@@ -1 +1 @@",
        f"+{lines[0]}",
        "@@ -9 +9 @@",
        "... 1 lines of layers like these",
        "@@ -20 +20 @@",
        "+y",
    ]


def test_a_page_has_room_for_so_much_and_names_the_files() -> None:
    text = "\n".join(f"add_{i}: f32[2] = add(x, y)" for i in range(2000))
    levels = [Level(f"pass{i}", text, f"@@ @@\n+{text}", file=f"{i:03d}-pass{i}.txt") for i in range(200)]
    shown = graph_levels(levels)
    assert len(shown) < 2 * ROOM and all(f"href='{level.file}'" in shown for level in levels)
    idle = graph_levels([Level("split", "x", same=True), Level("fuse", "x", same=True)])
    assert "2 passes change nothing: split, fuse" in idle and "level" not in idle


def test_the_layer_picture_prints_no_words_over_each_other() -> None:
    """A long name leaves no room for the class beside the time of its row."""
    row = ModuleRow("post_attention_layernorm", ("layers.0.post_attention_layernorm",), "LlamaRMSNorm")
    long, short = (_Step(row, name, (), (), 0.0) for name in (row.name, "norm"))
    assert long.title == (row.name, "") and long.words[0] == "LlamaRMSNorm"
    assert short.title == ("norm", " LlamaRMSNorm") and short.words == []
    assert len(_Step(row, "a" * 90, (), (), 0.0).title[0]) == 30


def test_decisions_of_layers_that_are_alike_are_one_row() -> None:
    plan = compiled(ZERO3).plan
    rows = plan_rows(plan)
    names = [what for what, *_ in rows]
    assert len(names) < len(plan.parameters) and any("{0," in n for n in names)
    assert any(why for what, _, why in rows if "{0," in what)


def test_what_to_try_follows_from_the_numbers() -> None:
    plan = compiled(ZERO3).plan
    cost = ModuleCost(exchanged={("tp", "all_reduce", "forward"): Exchanged(1, 1, 3.0, 3.0)})
    step = StepEstimate("A100", "", 10.0, 4.0, 3.0, 3.0, 1.0, 0.1)
    memory = Memory(10, 0, 0, 0, 0, 0, saved=90, forward_peak=90, backward_peak=90)
    found = [words for words, _ in advice(plan, cost, step, memory)]
    assert "computation waits 3 s for transfers over tp, 30% of the step" in found
    assert "90 B of 100 B are activations kept for the backward" in found
    fewer = advice(plan, ModuleCost(), step, dataclasses.replace(memory, saved=0))
    assert len(fewer) == len(found) - 2
