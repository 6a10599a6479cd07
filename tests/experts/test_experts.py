"""Experts over an axis: each rank has some of a layer's experts, and the numbers are those of one process."""

from __future__ import annotations

import copy
import json
import operator
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from autopar.api import parallelize
from autopar.capture.front_end import capture
from autopar.compile.model import compile_graph, compile_model
from autopar.cost.traffic import step_communication
from autopar.ir.mesh import Mesh
from autopar.ir.placement import REPLICATE, Shard, conversion, parse_placement
from autopar.options import Options
from autopar.passes.autodiff.routed_sizes import routed_sizes
from autopar.plan import Plan
from autopar.report.graph_text import format_graph
from autopar.runtime.mesh.process_groups import dp_rank_and_size, init_mesh
from autopar.testing.harness import MeshRun
from autopar.testing.reference import eager
from autopar.token_dispatchers import TOKEN_DISPATCHERS
from tests.support.capture_cache import captured_once
from tests.support.cases import Cell, called, check, compile_cell, simulated
from tests.support.ranks import run_ranks
from tests.support.subjects import SEED, subject, tiny

ALLGATHER = Options(token_dispatcher="allgather")
ALLTOALL_DEDUP = Options(token_dispatcher="alltoall_dedup")
ALLTOALL = Options(token_dispatcher="alltoall")
NODES = "ep%2=switch:450e9,ep/2=switch:50e9"  # two ranks each
HIERARCHICAL = Options(token_dispatcher="hierarchical", topology=NODES)
CELLS = [
    Cell("one-layer mixtral", Mesh.of(dp=2, ep=2), Options(zero=3, microbatches=2, token_dispatcher="alltoall_dedup")),
    Cell(
        "one-layer qwen3_moe",
        Mesh.of(ep=2, tp=2),
        Options(sequence_parallel=True, activation_checkpoint="full", token_dispatcher="alltoall_dedup"),
    ),
    Cell("gpt_oss", Mesh.of(ep=4), ALLGATHER),  # biases, and sizes of rows in its backward
    Cell("deepseek_v3", Mesh.of(cp=2, ep=2), ALLGATHER),  # shared experts; tokens cut twice
    Cell("one-layer qwen3_moe", Mesh.of(ep=2, tp=2), Options(sequence_parallel=True, token_dispatcher="allgather")),
    Cell("gpt_oss", Mesh.of(ep=4), replace(HIERARCHICAL, activation_checkpoint="full")),
    Cell("deepseek_v3", Mesh.of(dp=2, ep=2), replace(ALLTOALL, zero=3, microbatches=2, activation_checkpoint="full")),
    Cell("gpt_oss", Mesh.of(cp=2, ep=2), ALLTOALL),
]
MORE = [
    *(replace(c, name=c.name.removeprefix("one-layer ")) for c in CELLS if "one-layer" in c.name),
    Cell("gpt_oss", Mesh.of(ep=4), ALLTOALL_DEDUP),
    Cell("deepseek_v3", Mesh.of(cp=2, ep=2), ALLTOALL_DEDUP),
    Cell("qwen3_moe", Mesh.of(dp=2, ep=2), Options(activation_checkpoint="full", token_dispatcher="allgather")),
    Cell("mixtral", Mesh.of(ep=4, tp=2), replace(HIERARCHICAL, sequence_parallel=True, zero=0)),
    *(Cell(name, Mesh.of(ep=2), ALLGATHER) for name in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")),
    *(Cell(name, Mesh.of(ep=4), ALLGATHER) for name in ("mixtral", "qwen3_moe", "deepseek_v3")),
    *(
        Cell("mixtral", Mesh.of(dp=2, ep=2), Options(zero=zero, microbatches=m, token_dispatcher="allgather"))
        for zero in range(4)
        for m in (1, 2)
    ),
    *(Cell(name, Mesh.of(ep=2, tp=2), ALLGATHER) for name in ("mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe")),
    *(Cell(name, Mesh.of(cp=2, ep=2), ALLGATHER) for name in ("mixtral", "gpt_oss", "qwen3_moe")),
    Cell("mixtral", Mesh.of(dp=2, cp=2, ep=2), Options(zero=3, token_dispatcher="allgather")),
    Cell("qwen3_moe", Mesh.of(dp_replicate=2, ep=2), Options(zero=1, token_dispatcher="allgather")),
    Cell("gpt_oss", Mesh.of(ep=2), Options(loss_chunks=3, microbatches=2, token_dispatcher="allgather")),
    *(Cell(name, Mesh.of(ep=2), ALLTOALL_DEDUP) for name in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")),
    *(Cell(name, Mesh.of(ep=4), ALLTOALL_DEDUP) for name in ("mixtral", "qwen3_moe", "deepseek_v3")),
    *(Cell("mixtral", Mesh.of(dp=2, ep=2), Options(zero=zero, token_dispatcher="alltoall_dedup")) for zero in range(4)),
    *(Cell(name, Mesh.of(ep=2, tp=2), ALLTOALL_DEDUP) for name in ("mixtral", "gpt_oss", "deepseek_v3")),
    *(Cell(name, Mesh.of(cp=2, ep=2), ALLTOALL_DEDUP) for name in ("mixtral", "gpt_oss", "qwen3_moe")),
    Cell("mixtral", Mesh.of(dp=2, cp=2, ep=2), Options(zero=3, token_dispatcher="alltoall_dedup")),
    Cell("gpt_oss", Mesh.of(ep=2), Options(loss_chunks=3, microbatches=2, token_dispatcher="alltoall_dedup")),
    Cell("qwen3_moe", Mesh.of(ep=4), Options(activation_checkpoint="offload", token_dispatcher="alltoall_dedup")),
    *(Cell(name, Mesh.of(ep=4), HIERARCHICAL) for name in ("mixtral", "qwen3_moe", "deepseek_v3")),
    *(Cell("mixtral", Mesh.of(dp=2, ep=4), replace(HIERARCHICAL, zero=zero)) for zero in range(4)),
    Cell("qwen3_moe", Mesh.of(cp=2, ep=4), HIERARCHICAL),
    Cell("qwen3_moe", Mesh.of(ep=4), replace(HIERARCHICAL, activation_checkpoint="offload")),
    *(Cell(name, Mesh.of(ep=2), ALLTOALL) for name in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")),
    *(Cell("mixtral", Mesh.of(dp=2, ep=2), replace(ALLTOALL, zero=zero)) for zero in range(4)),
    *(Cell(name, Mesh.of(ep=2, tp=2), ALLTOALL) for name in ("mixtral", "gpt_oss", "deepseek_v3")),
    Cell("qwen3_moe", Mesh.of(ep=4), replace(ALLTOALL, activation_checkpoint="offload")),
]
RANKS = [
    Cell("one-layer qwen3_moe", Mesh.of(ep=2), ALLTOALL_DEDUP),
    Cell("mixtral", Mesh.of(pp=2, ep=2), Options(schedule="zb_h1", microbatches=2, token_dispatcher="allgather")),
    Cell("one-layer qwen3_moe", Mesh.of(ep=4), HIERARCHICAL),
]
MORE_RANKS = [
    Cell("qwen3_moe", Mesh.of(ep=2), ALLGATHER),
    Cell("mixtral", Mesh.of(pp=2, ep=2), Options(schedule="zb_h1", microbatches=2, token_dispatcher="alltoall_dedup")),
    Cell(
        "deepseek_v3",
        Mesh.of(pp=2, ep=2),
        Options(schedule="dual_pipe_v", microbatches=4, token_dispatcher="alltoall_dedup"),
    ),
    Cell("gpt_oss", Mesh.of(pp=2, ep=2), Options(schedule="1f1b", microbatches=4, token_dispatcher="alltoall_dedup")),
    Cell(
        "mixtral", Mesh.of(pp=2, ep=2), Options(schedule="tera_pipe", microbatches=2, token_dispatcher="alltoall_dedup")
    ),
    Cell(
        "deepseek_v3",
        Mesh.of(pp=2, ep=2),
        Options(schedule="dual_pipe_v", microbatches=4, token_dispatcher="allgather"),
    ),
    Cell("gpt_oss", Mesh.of(pp=2, ep=2), Options(schedule="1f1b", microbatches=4, token_dispatcher="allgather")),
    Cell("mixtral", Mesh.of(dp=2, ep=2), Options(zero=3, microbatches=2, token_dispatcher="allgather")),
    Cell("qwen3_moe", Mesh.of(ep=2, tp=2), Options(sequence_parallel=True, token_dispatcher="allgather")),
    Cell("qwen3_moe", Mesh.of(cp=2, ep=2), ALLGATHER),
    Cell("mixtral", Mesh.of(pp=2, ep=2), Options(schedule="zb_h1", microbatches=2, token_dispatcher="alltoall")),
    Cell(
        "deepseek_v3", Mesh.of(pp=2, ep=2), Options(schedule="dual_pipe_v", microbatches=4, token_dispatcher="alltoall")
    ),
    Cell("deepseek_v3", Mesh.of(dp=2, ep=4), replace(HIERARCHICAL, zero=3)),
    Cell("mixtral", Mesh.of(pp=2, ep=4), replace(HIERARCHICAL, schedule="zb_h1", microbatches=2)),
]


def in_full(cells: list[Cell]) -> list[Any]:
    """Cells for ``-m full``."""
    return [pytest.param(cell, marks=pytest.mark.full) for cell in cells]


@pytest.mark.parametrize("cell", [*CELLS, *in_full(MORE)], ids=str)
def test_equals_one_process(cell: Cell) -> None:
    check(simulated(cell))


def test_each_dispatch_meets_two_models_and_each_axis_meets_two_ways() -> None:
    met = {(c.name.removeprefix("one-layer "), c.options.token_dispatcher) for c in (*CELLS, *RANKS)}
    assert {c.name for c in MORE} == {name for name, _ in met}
    for dispatch in TOKEN_DISPATCHERS:
        assert len([name for name, way in met if way == dispatch]) > 1, dispatch
    for axis in ("dp", "cp", "tp"):
        assert len({c.options.token_dispatcher for c in CELLS if axis in c.mesh.sizes}) > 1, axis


@pytest.mark.parametrize("cell", [*RANKS, *in_full(MORE_RANKS)], ids=str)
def test_on_ranks(cell: Cell) -> None:
    check(called(cell))


class Layer(nn.Module):
    """Tokens whose experts the batch says."""

    def __init__(self, experts: int, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(experts, 6, width, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(experts, 6, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(experts, width, 6, dtype=torch.float64))
        self.gate = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: Tensor, expert: Tensor, weights: Tensor) -> Tensor:
        ops = torch.ops.autopar
        rows, order, offsets = ops.moe_dispatch(self.gate(x), expert, self.up.shape[0])
        hidden = ops.grouped_bias(ops.grouped_mm(rows, self.up, offsets, False), self.bias, offsets).relu()
        out = ops.moe_combine(ops.grouped_mm(hidden, self.down, offsets, False), order, weights)
        loss: Tensor = (x + out).square().mean()
        return loss


def routed(tokens: int, experts: int, top: int, choice: str) -> dict[str, Tensor]:
    """A batch with some choice of experts."""
    torch.manual_seed(1)
    chosen = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)])
    if choice == "one":  # all the same, of the last rank
        chosen = (experts - 1 - torch.arange(top)).expand(tokens, top).contiguous()
    if choice == "lower half":
        chosen = torch.stack([torch.randperm(experts // 2)[:top] for _ in range(tokens)])
    rows = torch.randn(tokens, 4, dtype=torch.float64)
    return {"x": rows, "expert": chosen, "weights": torch.rand(tokens, top, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("ranks", "tokens", "experts", "top", "choice"),
    [
        (2, 6, 4, 2, "any"),
        (3, 6, 6, 3, "any"),
        (4, 8, 8, 8, "any"),  # every expert for every token
        (8, 8, 8, 2, "any"),  # one token, and one expert, on each rank
        (2, 2, 4, 1, "any"),
        (4, 12, 8, 2, "one"),  # three ranks without a row
        (4, 12, 8, 2, "lower half"),
    ],
)
def test_whoever_gets_the_tokens(ranks: int, tokens: int, experts: int, top: int, choice: str) -> None:
    """The graph is made for as many rows on each rank; what comes is something else."""
    model, batch, mesh = Layer(experts), routed(tokens, experts, top, choice), Mesh.of(ep=ranks)
    graph, expected = (
        capture(model, routed(tokens, experts, top, "any"), lift_to_float64=True),
        eager(model, batch, SEED),
    )
    nodes = [n for n in range(2, ranks) if ranks % n == 0]
    ways = []
    for name, row in TOKEN_DISPATCHERS.items():
        wires = [f"ep%{n}=switch" for n in nodes] if row.over_nodes else [""]
        ways += [Options(token_dispatcher=name, topology=topology) for topology in wires]
    for options in ways:
        made = compile_graph(copy.deepcopy(graph), mesh, options, outputs=())
        check(MeshRun(made, model, batch, mesh, SEED).errors(expected))


AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


LESS = [pytest.param(mesh, marks=pytest.mark.full) for mesh in (Mesh.of(ep=2), Mesh.of(ep=2, tp=2))]


@pytest.mark.parametrize("mesh", [*LESS, Mesh.of(dp=2, ep=2)], ids=str)
def test_an_auxiliary_loss_is_that_of_the_whole_batch(mesh: Mesh) -> None:
    """A product of two means of all rows and layers. It is an output beside the loss that it is part of, and counts
    once."""
    model, batch = tiny("qwen3_moe", **AUXILIARY)
    made = compile_graph(captured_once(model, batch, lift_to_float64=True), mesh, outputs=())
    assert len(made.losses) == 1
    expected = eager(model, batch, SEED)  # registers hooks of transformers: a model to be captured anew
    plain, _ = tiny("qwen3_moe")
    assert abs(expected.loss - eager(plain, batch, SEED).loss) > 0.1
    check(MeshRun(made, model, batch, mesh, SEED).errors(expected))


@pytest.mark.parametrize("asked", ["by its config", "by the batch"])
def test_what_transformers_records_of_layers_is_no_change_of_the_model(asked: str) -> None:
    """Its first forward that is asked for router logits registers hooks: no state that the forward writes."""
    model, batch = tiny("qwen3_moe", layers=1, **(AUXILIARY if asked == "by its config" else {}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(model, batch if asked == "by its config" else {**batch, "output_router_logits": True})


def test_the_graph() -> None:
    made = compile_cell(Cell("mixtral", Mesh.of(ep=2), ALLGATHER))
    text = format_graph(made.local)
    weight = next(p for name, p in made.plan.parameters.items() if "experts.down_proj" in name)["ep"]
    assert (weight.stored, weight.used) == (Shard(0), Shard(0))
    assert text.count("dispatch_tokens(") == 2
    assert "ep:S(0;routed)" in text and "moe_combine" in text and "ep:P" in text


def test_the_plan_says_so() -> None:
    plan = compile_cell(Cell("mixtral", Mesh.of(ep=2), ALLGATHER)).plan
    assert "experts of moe_dispatch " in str(plan) and "ep: allgather" in str(plan)
    rows = subject("mixtral").batch["input_ids"].numel()  # of two ranks, and of two experts each
    note = (
        f"a rank's experts get {rows} rows if routing is even, which estimates of memory and time assume, and at most"
    )
    assert "experts of moe_dispatch and 1 more" in str(plan) and f"{note} {2 * rows} (" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan


def test_bytes() -> None:
    """Everybody gets all tokens: x and weights there, gradients back, results and their gradients; expert numbers."""
    model, batch, ranks = Layer(8), routed(16, 8, 2, "any"), 4
    made = compile_model(model, batch, Mesh.of(ep=ranks), ALLGATHER, lift_to_float64=True, outputs=())
    sent = step_communication(made, 0)
    own, outside = 16 // ranks, ranks - 1
    hidden, pairs = own * 4 * 8 * outside, own * 2 * 8 * outside
    assert sent["ep", "all_gather"].bytes == 2 * hidden + 2 * pairs  # rows, gradients of results; numbers, weights
    assert sent["ep", "reduce_scatter"].bytes == 2 * hidden  # results, gradients of rows; the batch's weights have none


def test_routed_rows_are_nobody_elses() -> None:
    rows = Shard(0, routed=True)
    assert str(rows) == "S(0;routed)" and parse_placement(str(rows)) == rows
    for other in (Shard(0), REPLICATE):
        with pytest.raises(ValueError, match="no conversion"):
            conversion(rows, other)
        with pytest.raises(ValueError, match="no conversion"):
            conversion(other, rows)
    assert conversion(rows, rows) == "none"


def counted(batch: dict[str, Tensor]) -> None:
    """Routing that changes from step to step, and back, with AdamW: one graph for all, idle experts included."""
    torch.manual_seed(0)
    model = Layer(8)
    mesh = init_mesh("cpu", 60.0, ep=2)
    parallel = parallelize(copy.deepcopy(model), mesh, example_batch=batch)
    part, parts = dp_rank_and_size(mesh)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (model, parallel)]
    for choice in ("any", "one", "lower half", "one", "any"):
        whole = routed(8, 8, 2, choice)
        model(**whole).backward()
        parallel.train_step(**{name: x.chunk(parts)[part] for name, x in whole.items()})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole_state = parallel.full_state_dict()
    for name, x in model.state_dict().items():
        torch.testing.assert_close(whole_state[name], x, rtol=1e-10, atol=1e-12, msg=name)


def test_routing_changes_between_steps() -> None:
    run_ranks(2, counted, routed(8, 8, 2, "any"))


def compiled_code(batch: dict[str, Tensor]) -> str:
    """The refusal."""
    parallel = parallelize(Layer(8), init_mesh("cpu", 60.0, ep=2), example_batch=batch, backend="inductor")
    part, parts = dp_rank_and_size(parallel.mesh)
    try:
        parallel.train_step(**{name: x.chunk(parts)[part] for name, x in batch.items()})
    except ValueError as error:
        return str(error)
    return ""


def test_backends_for_fixed_sizes_are_refused() -> None:
    for found in run_ranks(2, compiled_code, routed(8, 8, 2, "any")):
        assert "backend: 'inductor' needs static shapes" in found and "backend='eager'" in found


class Counted(Layer):
    """Adds something of as many rows as a rank would get."""

    def forward(self, x: Tensor, expert: Tensor, weights: Tensor) -> Tensor:
        rows, order, offsets = torch.ops.autopar.moe_dispatch(x, expert, self.up.shape[0])
        made = rows + torch.arange(rows.shape[0], dtype=x.dtype).unsqueeze(-1)
        hidden = torch.ops.autopar.grouped_mm(made, self.up, offsets, False)
        out = torch.ops.autopar.moe_combine(hidden[:, :4], order, weights)
        loss: Tensor = out.square().mean()
        return loss


def test_bad_input() -> None:
    batch: dict[str, Any] = routed(12, 6, 2, "any")
    with pytest.raises(
        ValueError, match="experts: 6 experts do not divide over axis 'ep' of size 12; use one of 2, 3, 6"
    ):
        compile_model(Layer(6), batch, Mesh.of(ep=12))
    with pytest.raises(ValueError, match=r"placements: .* needs unsqueeze as S\(0;routed\) on 'ep', it is I"):
        compile_model(Counted(6), batch, Mesh.of(ep=2), lift_to_float64=True)
    with pytest.raises(ValueError, match="experts: nothing to shard on axis 'ep' of size 2: the model has no experts"):
        compile_model(nn.Linear(4, 4), {"input": torch.randn(4, 4)}, Mesh.of(ep=2))
    with pytest.raises(ValueError, match="does not divide into 4 pieces"):
        compile_model(Layer(8), routed(6, 8, 2, "any"), Mesh.of(ep=4))


PLANS = {
    "an axis that the mesh lacks": ({"axis": "dp"}, "sharded on 'dp', which must be 'ep' and an axis of the mesh"),
    "a dispatcher that nobody wrote": ({"token_dispatcher": "post"}, "unknown token dispatcher .post."),
    "a layer without": (None, "no entry for the experts of moe_dispatch"),
}


@pytest.mark.parametrize("what", PLANS)
def test_plans_that_nobody_could_follow_are_refused(what: str) -> None:
    change, error = PLANS[what]
    batch: dict[str, Any] = routed(12, 6, 2, "any")
    made = compile_model(Layer(6), batch, Mesh.of(ep=2)).plan
    data = json.loads(made.to_json())
    data["experts"] = {name: {**chosen, **change} for name, chosen in data["experts"].items()} if change else {}
    with pytest.raises(ValueError, match=f"plan: .*{error}"):
        compile_model(Layer(6), batch, Mesh.of(ep=2), plan=Plan.from_json(json.dumps(data)))
    compile_model(Layer(6), batch, Mesh.of(ep=2), plan=Plan.from_json(made.to_json()))


def test_sizes_of_rows_are_asked_of_them() -> None:
    """Before and after, on the joint graph of rows that are cut into columns."""
    graph = Graph()
    x, expert = graph.placeholder("x"), graph.placeholder("expert")
    made = graph.call_function(torch.ops.autopar.moe_dispatch_own.default, (x, expert, 2, 2))
    rows = graph.call_function(operator.getitem, (made, 0))
    wide = graph.call_function(torch.ops.aten.slice_backward.default, (rows, [8, 8], 1, 0, 8, 2))
    graph.output((wide,))
    val = torch.empty(8, 4, device="meta")
    vals = (val, val, torch.empty(2, device="meta"))
    for node, meta in ((x, val), (expert, val), (made, vals), (rows, val), (wide, torch.empty(8, 8, device="meta"))):
        node.meta["val"] = meta
    gm = GraphModule(nn.Module(), graph)
    routed_sizes(gm)
    assert "sym_size" in str(wide.args[1][0]) and wide.args[1][1] == 8  # type: ignore[index]
