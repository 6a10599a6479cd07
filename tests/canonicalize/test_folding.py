"""Experts over an axis that cuts something else anyway: the batch, the sequence or weights."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import parallelize
from autopar.compile.model import compile_model, plan_model
from autopar.cost.traffic import step_communication
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.options import Options
from autopar.plan import Plan
from autopar.runtime.mesh.process_groups import dp_rank_and_size, init_mesh
from tests.experts.test_expert_load import chosen
from tests.experts.test_experts import Layer, in_full, routed
from tests.support.cases import Cell, called, check, compile_cell, simulated
from tests.support.compile_cache import compiled_once
from tests.support.ranks import run_ranks
from tests.support.subjects import make

DP, CP, TP = (Options(expert_axis=axis) for axis in ("dp", "cp", "tp"))
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
NODES = "dp%2=switch:450e9,dp/2=switch:50e9"
CELLS = [
    Cell("one-layer mixtral", Mesh.of(dp=2), replace(DP, token_dispatcher="allgather", microbatches=2, zero=3)),
    Cell("gpt_oss", Mesh.of(dp=4), replace(DP, token_dispatcher="alltoall_dedup")),
    Cell("deepseek_v3", Mesh.of(cp=2), replace(CP, token_dispatcher="alltoall")),
    Cell(
        "one-layer mixtral", Mesh.of(cp=2, dp=2), replace(DP, token_dispatcher="allgather", zero=3)
    ),  # cp leaves experts in one
    Cell(
        "one-layer qwen3_moe",
        Mesh.of(dp=2, tp=2),
        replace(DP, token_dispatcher="allgather", sequence_parallel=True, zero=1),
    ),
    Cell(
        "deepseek_v3",
        Mesh.of(dp=2, tp=2),
        replace(TP, token_dispatcher="alltoall_dedup", sequence_parallel=True, zero=2),
    ),
    Cell("gpt_oss", Mesh.of(tp=2), TP),  # all ranks have all tokens
]
MORE = [
    Cell("qwen3_moe", Mesh.of(dp_replicate=2, dp=2), replace(DP, token_dispatcher="allgather")),
    *(
        Cell(name, Mesh.of(dp=2), replace(DP, token_dispatcher=way))
        for name in FAMILIES
        for way in ("allgather", "alltoall_dedup")
    ),
    *(Cell(name, Mesh.of(dp=4), replace(DP, token_dispatcher="alltoall", microbatches=2, zero=1)) for name in FAMILIES),
    *(Cell(name, Mesh.of(dp=4), replace(DP, token_dispatcher="hierarchical", topology=NODES)) for name in FAMILIES),
    *(Cell(name, Mesh.of(dp=2, tp=2), replace(DP, token_dispatcher="alltoall_dedup")) for name in FAMILIES),
    *(
        Cell(name, Mesh.of(tp=4), replace(TP, token_dispatcher="alltoall_dedup", sequence_parallel=True))
        for name in FAMILIES
    ),
    *(
        Cell(name, Mesh.of(tp=2), replace(TP, token_dispatcher="allgather", sequence_parallel=True))
        for name in FAMILIES
    ),
    *(Cell(name, Mesh.of(dp=2, tp=2), TP) for name in FAMILIES),
    *(
        Cell(name, Mesh.of(cp=2, dp=2), replace(CP, token_dispatcher="allgather", zero=3, microbatches=2))
        for name in FAMILIES
    ),
    *(
        Cell(name, Mesh.of(cp=2, dp=2), replace(DP, token_dispatcher="alltoall_dedup", zero=2, microbatches=2))
        for name in FAMILIES
    ),
    *(
        Cell(
            "mixtral",
            Mesh.of(dp=2),
            replace(DP, token_dispatcher="alltoall_dedup", zero=zero, activation_checkpoint="full"),
        )
        for zero in range(4)
    ),
]
RANKS = [
    Cell(
        "mixtral",
        Mesh.of(pp=2, dp=2),
        replace(DP, schedule="zb_h1", microbatches=2, token_dispatcher="alltoall_dedup", zero=1),
    ),
]
MORE_RANKS = [
    Cell("qwen3_moe", Mesh.of(dp=2), replace(DP, token_dispatcher="allgather", microbatches=2)),
    *(Cell("qwen3_moe", Mesh.of(dp=2), replace(DP, zero=zero, token_dispatcher="alltoall")) for zero in range(4)),
    Cell(
        "mixtral",
        Mesh.of(pp=2, dp=2),
        replace(DP, schedule="1f1b", microbatches=2, token_dispatcher="alltoall_dedup", zero=2),
    ),
    Cell(
        "mixtral",
        Mesh.of(pp=2, dp=2),
        replace(DP, schedule="zb_h1", microbatches=2, token_dispatcher="alltoall", zero=3),
    ),
    Cell(
        "deepseek_v3",
        Mesh.of(pp=2, dp=2),
        replace(DP, schedule="dual_pipe_v", microbatches=4, token_dispatcher="alltoall_dedup"),
    ),
    Cell(
        "gpt_oss", Mesh.of(dp=2, tp=2), replace(TP, token_dispatcher="alltoall_dedup", sequence_parallel=True, zero=3)
    ),
    Cell("mixtral", Mesh.of(cp=2), replace(CP, token_dispatcher="allgather")),
    Cell("mixtral", Mesh.of(dp=4), replace(DP, token_dispatcher="hierarchical", topology=NODES)),
]


@pytest.mark.parametrize("cell", [*CELLS, *in_full(MORE)], ids=str)
def test_equals_one_process(cell: Cell) -> None:
    check(simulated(cell))


@pytest.mark.parametrize("cell", [*RANKS, *in_full(MORE_RANKS)], ids=str)
def test_on_ranks(cell: Cell) -> None:
    check(called(cell))


def test_gradients_of_experts_are_not_summed() -> None:
    """Over dp, where those of the router and of shared experts are, and where zero=1 cuts these."""
    sent, batch = {}, routed(16, 8, 2, "any")
    for options in (Options(), replace(DP, token_dispatcher="allgather")):
        made = compile_model(Layer(8), batch, Mesh.of(dp=4), options, lift_to_float64=True, outputs=())
        sent[options.expert_axis] = step_communication(made, 0)["dp", "all_reduce"].bytes
    layer = Layer(8)
    experts = sum(p.numel() * 8 for p in (layer.up, layer.bias, layer.down))
    assert sent["ep"] - sent["dp"] == 2 * experts * 3 // 4
    plan = compile_cell(Cell("deepseek_v3", Mesh.of(dp=2), replace(DP, zero=1))).plan
    cut = {name for name, axes in plan.parameters.items() if axes["dp"].used == Shard(0)}
    assert cut and all(".experts." in name for name in cut)
    shared = [axes["dp"] for name, axes in plan.parameters.items() if "shared_experts" in name or "gate.weight" in name]
    assert shared and all(isinstance(p.stored, Shard) and not isinstance(p.used, Shard) for p in shared)


def test_nobody_gathers_for_it_but_its_axis() -> None:
    """Microbatches and replicas cut what is gathered over dp as they cut each piece of it."""
    made = compile_cell(
        Cell("qwen3_moe", Mesh.of(dp_replicate=2, dp=2), replace(DP, token_dispatcher="allgather", microbatches=2))
    )
    assert {axis for axis, kind in step_communication(made, 0) if kind in ("all_gather", "reduce_scatter")} == {"dp"}
    assert not [n for n in made.local.graph.nodes if "mb" in n.args]


class Wide(Layer):
    """Experts of more weights than there are numbers in its tokens."""

    def __init__(self) -> None:
        super().__init__(8)
        self.up = nn.Parameter(torch.randn(8, 2048, 4, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(8, 2048, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(8, 4, 2048, dtype=torch.float64))


FAST = "dp=switch:1e6:0,tp=switch:1e6:0,cp=switch:1e6:0"  # bytes decide


def plan_of(model: nn.Module, mesh: Mesh, tokens: int = 16, **options: Any) -> Plan:
    options = {"expert_axis": "auto", "topology": ",".join(x for x in FAST.split(",") if x[:2] in mesh.sizes)} | options
    return compile_model(
        model, routed(tokens, 8, 2, "any"), mesh, Options(**options), lift_to_float64=True, outputs=()
    ).plan


def test_auto_takes_what_costs_less() -> None:
    """Exchanged tokens against summed gradients; what was estimated is in the plan."""
    assert {e.axis for e in plan_of(Wide(), Mesh.of(dp=4)).experts.values()} == {"dp"}
    many = plan_of(Layer(8), Mesh.of(dp=4), tokens=1024)
    assert not many.experts and "axis by estimated time of all layers: replicated" in str(many)
    assert {e.axis for e in plan_of(Layer(8), Mesh.of(ep=2, dp=2), topology="").experts.values()} == {"ep"}
    assert not plan_of(Wide(), Mesh.of(dp=3), tokens=12).experts  # 8 experts do not divide
    assert not plan_of(Wide(), Mesh.of(dp=4), expert_axis="ep", topology="").experts  # nobody asked
    assert not compile_cell(Cell("mlp", Mesh.of(dp=2), Options(expert_axis="auto"))).plan.experts


def test_estimates_count_gathers_for_each_use() -> None:
    """Whichever option asks for them: zero=3 is only their default."""

    def estimated(zero: int, again: bool | str = "auto") -> str:
        plan = plan_of(Wide(), Mesh.of(dp=4), zero=zero, reshard_after_forward=again)
        return next(line for line in str(plan).splitlines() if "estimated time of all layers" in line)

    each, once = estimated(3), estimated(2)
    assert each != once and estimated(2, True) == each and estimated(3, False) == once
    assert estimated(0) == once  # nothing is gathered


def test_plans_keep_the_axis() -> None:
    """Whatever would be chosen for another batch: parameters are cut so."""
    first = plan_of(Wide(), Mesh.of(dp=4))
    again = Plan.from_json(first.to_json())
    assert again == first
    later = compile_model(Wide(), routed(4096, 8, 2, "any"), Mesh.of(dp=4), Options(expert_axis="auto"), plan=again)
    assert {e.axis for e in later.plan.experts.values()} == {"dp"}
    changed = json.loads(first.to_json())
    changed["experts"] = {name: {**e, "axis": "tp"} for name, e in changed["experts"].items()}
    with pytest.raises(
        ValueError, match="sharded on 'tp', which must be the same one of ep, dp, cp, tp for all layers"
    ):
        compile_model(Wide(), routed(16, 8, 2, "any"), Mesh.of(dp=4), plan=Plan.from_json(json.dumps(changed)))


def test_a_plan_and_an_option_that_differ() -> None:
    """No option loses without a word against a plan that was made by hand."""
    mesh, batch = Mesh.of(dp=2, tp=2), routed(16, 8, 2, "any")
    made, _ = plan_model(Wide(), batch, mesh, DP)
    with pytest.raises(ValueError, match="expert_axis: the given plan shards experts on 'dp', found expert_axis='tp'"):
        plan_model(Wide(), batch, mesh, TP, made)
    whole = plan_of(Layer(8), Mesh.of(dp=4), tokens=1024)
    with pytest.raises(ValueError, match="shards experts on no axis, found expert_axis='dp'; leave the option out"):
        compile_model(Layer(8), batch, Mesh.of(dp=4), DP, plan=whole)


BAD = [
    (
        {"dp": 2},
        {"expert_axis": "tp"},
        "expert_axis: expected an axis of the mesh dp=2 to shard experts on, found",
    ),
    ({"dp": 4, "ep": 2}, {"expert_axis": "dp"}, "an axis 'ep' shards experts, found expert_axis='dp' beside ep=2"),
    (
        {"dp": 2},
        {"token_dispatcher": "alltoall_dedup"},
        "token_dispatcher: needs experts that are sharded on an axis, found",
    ),
    (
        {"tp": 2},
        {"expert_axis": "tp", "token_dispatcher": "alltoall_dedup"},
        "ranks of axis 'tp' have the same tokens, found token_dispatcher=",
    ),
    (
        {"dp": 16},
        {"expert_axis": "dp"},
        "8 experts do not divide over axis 'dp' of size 16; .*: dp=2,ep=8 for this dp=16",
    ),
    ({"dp": 2}, {"expert_axis": "dp", "token_dispatcher": "hierarchical"}, "needs an axis 'dp' over several nodes"),
    ({"pp": 2}, {"expert_axis": "auto"}, "expert_axis: needs a mesh axis ep or dp or cp or tp, found"),
    (
        {"dp": 2},
        {"expert_axis": "dp_replicate"},
        "expert_axis: expected 'auto', 'ep', 'dp', 'cp' or 'tp', found 'dp_replicate'",
    ),
]


@pytest.mark.parametrize(("sizes", "options", "error"), BAD)
def test_bad_input(sizes: dict[str, int], options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        compile_model(Layer(8), routed(16, 8, 2, "any"), Mesh.of(**sizes), Options(**options))


def test_models_without_experts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"experts: nothing to shard on axis 'dp' of size 2: .*leave the option"):
        compile_model(nn.Linear(4, 4), {"input": torch.randn(4, 4)}, Mesh.of(dp=2), DP)


def counted(sizes: dict[str, int], options: dict[str, Any]) -> dict[str, list[int]]:
    """`expert_load` of a step."""
    model, batch = make("one-layer qwen3_moe")
    mesh = init_mesh("cpu", 60.0, **sizes)
    part, parts = dp_rank_and_size(mesh)
    mine = {key: x.chunk(parts)[part] for key, x in batch.items()}
    parallel = parallelize(model, mesh, example_batch=mine, lift_to_float64=True, **options)
    parallel.train_step(**mine)
    return {name: count.tolist() for name, count in parallel.expert_load().items()}


LOADS = [
    ({"dp": 2}, {"expert_axis": "dp", "token_dispatcher": "allgather"}),
    ({"tp": 2}, {"expert_axis": "tp"}),
    ({"tp": 2}, {"expert_axis": "tp", "sequence_parallel": True, "token_dispatcher": "alltoall_dedup"}),
]


@pytest.mark.parametrize(("sizes", "options"), LOADS)
def test_counts_are_those_of_one_process(sizes: dict[str, int], options: dict[str, Any]) -> None:
    for found in run_ranks(2, counted, sizes, options):
        assert found == chosen("one-layer qwen3_moe")


def gone_on(folder: str, sizes: dict[str, int], options: dict[str, Any], saves: bool) -> dict[str, Tensor]:
    """A step of AdamW, which is saved; or another one that goes on from there, and what it ends with."""
    torch.manual_seed(0)
    mesh = init_mesh("cpu", 60.0, **sizes)
    part, parts = dp_rank_and_size(mesh)
    batch = {name: x.chunk(parts)[part] for name, x in routed(8, 8, 2, "lower half").items()}
    parallel = parallelize(Layer(8), mesh, example_batch=batch, **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    if not saves:
        autopar.load(folder, parallel, optimizer)
    parallel.train_step(**batch)
    optimizer.step()
    optimizer.zero_grad()
    if saves:
        autopar.save(folder, parallel, optimizer)
    return {name: x.clone() for name, x in parallel.full_state_dict().items()}


OTHERS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {"expert_axis": "dp", "token_dispatcher": "alltoall_dedup", "zero": 2}),
    ({"ep": 2}, {}),
    ({"dp": 2}, {"zero": 3}),
]


def test_checkpoints_go_on_with_experts_elsewhere(tmp_path: Any) -> None:
    """States of experts without tokens included; and single process, before and after."""
    model, batch = Layer(8), routed(8, 8, 2, "lower half")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    run_ranks(2, gone_on, f"{tmp_path}/folded", *OTHERS[0], True)
    run_ranks(2, gone_on, f"{tmp_path}/own", *OTHERS[1], True)
    found = [run_ranks(2, gone_on, f"{tmp_path}/folded", *other, False) for other in OTHERS]
    found += [run_ranks(2, gone_on, f"{tmp_path}/own", *OTHERS[0], False)]
    for of_rank in (state for states in found for state in states):
        for name, x in model.state_dict().items():
            torch.testing.assert_close(of_rank[name], x, rtol=1e-10, atol=1e-12, msg=name)


def through_a_folder(folder: str, sizes: dict[str, int], options: dict[str, Any]) -> list[str]:
    """Save for transformers, load into another model; names that differ, and those of a rank's own experts."""
    model, batch = make("one-layer mixtral")
    mesh, given = init_mesh("cpu", 60.0, **sizes), {**options, "example_batch": batch, "lift_to_float64": True}
    with compiled_once():
        first = parallelize(copy.deepcopy(model), mesh, **given)
        first.save_pretrained(folder)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        second = parallelize(model, mesh, **given)
    second.load_pretrained(folder)
    wanted, found = first.full_state_dict(), second.full_state_dict()
    return [name for name, x in wanted.items() if not torch.equal(x, found[name])]


FOLDED: list[Any] = [
    ({"dp": 2}, {"expert_axis": "dp", "zero": 3}),
    ({"tp": 2}, {"expert_axis": "tp"}),
    pytest.param({"dp": 2}, {"expert_axis": "dp"}, marks=pytest.mark.full),
    pytest.param({"cp": 2}, {"expert_axis": "cp", "zero": 3}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("sizes", "options"), FOLDED)
def test_folders_of_transformers(tmp_path: Any, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Whole experts, on any rank."""
    assert run_ranks(2, through_a_folder, str(tmp_path), sizes, options) == [[], []]
    wanted, _ = make("one-layer mixtral")
    found = type(wanted).from_pretrained(str(tmp_path), dtype=torch.float64)
    for name, x in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], x), name
