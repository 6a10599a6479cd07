"""zero=0, 1, 2, 3: the numbers of one process, the bytes of the formulas, and what each mode holds."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compile.model import compile_graph, compile_model
from autopar.cost.memory import memory
from autopar.ir.graph import copy_graph, outputs, placeholders
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.ir.traffic import traffic_of
from autopar.ops.traits import COLLECTIVES
from autopar.options import Options
from autopar.runtime.exec.lowering import kind_of
from autopar.steps.graphs import Compiled
from autopar.steps.of_rank import graphs_of_rank
from autopar.zero_stages import ZERO_STAGES
from tests.support.capture_cache import captured_once
from tests.support.cases import Cell, called, check, compile_cell, compiled
from tests.support.subjects import ROWS, tiny

SPLITS = ("1f1b", "zb_h1", "interleaved", "dual_pipe_v")
MODES = tuple(ZERO_STAGES)
PLAIN = [Mesh.of(dp=2), Mesh.of(dp=2, tp=2), Mesh.of(dp=2, cp=2), Mesh.of(dp=4)]
ALL = [
    Cell(name, mesh, Options(zero=zero, microbatches=count))
    for name in ("llama", "gpt2")
    for mesh in PLAIN
    for zero in MODES
    for count in (1, ROWS // mesh.data_size)
    if not (name == "gpt2" and "cp" in mesh.sizes)
] + [
    Cell("llama", Mesh.of(dp=2, pp=2), Options(zero=zero, microbatches=4, schedule=schedule))
    for zero in MODES
    for schedule in SPLITS
]


def small(cell: Cell) -> Cell:
    """One layer of it."""
    return dataclasses.replace(cell, name=f"one-layer {cell.name}")


def whole(cell: Cell) -> Cell:
    """All layers of it."""
    return dataclasses.replace(cell, name=cell.name.removeprefix("one-layer "))


# Each mode with and without microbatches, on two ranks or on a larger mesh; and under each schedule.
FEW = [
    Cell("one-layer llama", PLAIN[0]),
    Cell("one-layer llama", PLAIN[0], Options(microbatches=4)),
    *(Cell("one-layer llama", PLAIN[0], Options(zero=zero)) for zero in MODES[1:]),
    *(small(c) for i, c in enumerate(ALL[-16:]) if (i // 4 + i) % 4 == 1),
    Cell("one-layer gpt2", PLAIN[1], Options(zero=2, microbatches=4)),
    Cell("one-layer llama", PLAIN[2], Options(zero=1, microbatches=4)),
    Cell("one-layer llama", PLAIN[3], Options(zero=3, microbatches=2)),
    # takes rows of microbatches
    Cell("one-layer vit", Mesh.of(dp=2, pp=2), Options(zero=2, microbatches=4, schedule="zb_v")),
    Cell(
        "llama", Mesh.of(dp=2), Options(zero=1, reshard_after_forward=True, reduce_grads="microbatch", microbatches=2)
    ),
    Cell("llama", Mesh.of(dp=2), Options(zero=3, reshard_after_forward=False, reduce_grads="step", microbatches=2)),
]
# Replicas (dp_replicate) of a dp group, each mode, with or without microbatches, stages and other axes.
REPLICAS = [
    Cell("llama", Mesh.of(dp_replicate=2, dp=2), Options(zero=zero, microbatches=count))
    for zero in MODES
    for count in (1, 2)
]
HYBRID = [
    *(small(cell) for cell in REPLICAS if cell.options.zero % 2 and cell.options.microbatches > 1),
    Cell("one-layer llama", Mesh.of(dp_replicate=2, tp=2), Options(sequence_parallel=True)),
    Cell("one-layer llama", Mesh.of(pp=2, dp_replicate=2), Options(microbatches=4, schedule="zb_h1")),
    Cell("one-layer llama", Mesh.of(dp_replicate=2, cp=2), Options(zero=2, microbatches=2)),
]
TIED = Cell("gpt2", Mesh.of(dp_replicate=2, dp=2), Options(zero=3, microbatches=2))
EIGHT = Mesh.of(pp=2, dp_replicate=2, dp=2)
LARGE = [
    *(Cell("llama", EIGHT, Options(zero=zero, microbatches=2, schedule="gpipe")) for zero in MODES),
    *(Cell("llama", Mesh.of(dp_replicate=2, dp=2, tp=2), Options(zero=zero, microbatches=2)) for zero in MODES),
]  # fmt: skip


@pytest.mark.parametrize("cell", FEW, ids=str)
def test_equals_one_process(cell: Cell) -> None:
    check(called(cell))


@pytest.mark.full
@pytest.mark.parametrize("cell", [c for c in dict.fromkeys([*ALL, *map(whole, FEW)]) if c not in FEW], ids=str)
def test_all_equal_one_process(cell: Cell) -> None:
    check(called(cell))


@pytest.mark.parametrize("cell", HYBRID, ids=str)
def test_replicas_equal_one_process(cell: Cell) -> None:
    check(called(cell))


@pytest.mark.full
@pytest.mark.parametrize("cell", dict.fromkeys([*REPLICAS, TIED, *map(whole, HYBRID)]), ids=str)
def test_all_replicas_equal_one_process(cell: Cell) -> None:
    check(called(cell))


@pytest.mark.full
@pytest.mark.parametrize("cell", LARGE, ids=str)
def test_replicas_on_eight_ranks_equal_one_process(cell: Cell) -> None:
    check(called(cell))


def test_few_cover_all() -> None:
    chosen = {(c.options.zero, c.options.microbatches > 1) for c in FEW if "pp" not in c.mesh.sizes}
    assert chosen == {(zero, several) for zero in MODES for several in (False, True)}
    assert {c.options.zero for c in FEW if c.options.schedule} == {*MODES}
    assert {c.options.schedule for c in FEW} == {"", "zb_v", *SPLITS}
    assert {*PLAIN} <= {c.mesh for c in FEW}
    replicas = [c.options for c in HYBRID if not c.options.schedule]
    assert {o.zero for o in replicas} == {*MODES} and {o.microbatches for o in replicas} == {1, 2}


# --- bytes --------------------------------------------------------------------------------------------------


def sent(made: Compiled, axis: str, ranks: int) -> Counter[str]:
    """Bytes that the first rank sends in a step, by kind."""
    found: Counter[str] = Counter()
    for gm, times in graphs_of_rank(made.pipeline, made.prologue, 0).values():
        for node in gm.graph.nodes:
            if node.target in COLLECTIVES and axis in node.args:
                x = node.args[0].meta["val"]
                found[kind_of(node)] += times * traffic_of(kind_of(node), tuple(x.shape), x.dtype, ranks)
    return found


def cut_and_whole(made: Compiled) -> tuple[int, int]:
    """Bytes, of the whole tensors, of parameters that dp cuts, and of the others."""
    sizes = [0, 0]
    for p in made.parameters:
        sizes[not isinstance(p.placements.get("dp"), Shard)] += math.prod(p.shape) * p.dtype.itemsize
    return sizes[0], sizes[1]


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (4, 2), pytest.param(2, 4, marks=pytest.mark.full)])
def test_bytes_are_those_of_the_formulas(ranks: int, count: int) -> None:
    """With m microbatches on N ranks, (N-1)/N of: 2; 1 + 1; 1 + m; at most 2m + m, and m + m at least, for what the
    loss gathers once."""
    share = (ranks - 1) / ranks
    for zero in MODES:
        made = compiled(Cell("one-layer llama", Mesh.of(dp=ranks), Options(zero=zero, microbatches=count)))
        cut, whole = cut_and_whole(made)
        found = sent(made, "dp", ranks)
        sums = count if zero > 1 else 1
        scalars = 64 * count  # of the loss
        assert abs(found["all_reduce"] - share * 2 * (whole if zero else cut + whole)) < scalars, "once per step"
        assert found["reduce_scatter"] == (share * cut * sums if zero else 0)
        if zero < 3:
            assert found["all_gather"] == (share * cut if zero else 0)
        else:
            assert share * cut * count <= found["all_gather"] <= 2 * share * cut * count


@pytest.mark.parametrize(
    ("replicas", "ranks", "count"),
    [(2, 2, 2), (4, 2, 1), *(pytest.param(*of, marks=pytest.mark.full) for of in [(2, 2, 1), (2, 4, 1)])],
)
def test_replicas_sum_pieces_once_per_step(replicas: int, ranks: int, count: int) -> None:
    """Over dp_replicate 2(R-1)/R of a piece, whatever the microbatches; over dp what there is without replicas. What
    nothing cuts is summed over both in one."""
    outer, inner = (replicas - 1) / replicas, (ranks - 1) / ranks
    world = replicas * ranks
    for zero in MODES:
        options = Options(zero=zero, microbatches=count)
        made = compiled(Cell("one-layer llama", Mesh.of(dp_replicate=replicas, dp=ranks), options))
        cut, whole = cut_and_whole(made)
        scalars = 64 * count
        both, over_replicas, over_dp = (
            sent(made, axis, n) for axis, n in (("dp_replicate,dp", world), ("dp_replicate", replicas), ("dp", ranks))
        )
        joint = whole if zero else cut + whole
        assert abs(both["all_reduce"] - 2 * (world - 1) / world * joint) < scalars
        assert abs(over_replicas["all_reduce"] - (2 * outer * cut / ranks if zero else 0)) < scalars
        assert over_dp["reduce_scatter"] == (inner * cut * (count if zero > 1 else 1) if zero else 0)
        assert over_dp["all_reduce"] < scalars and over_replicas.keys() <= {"all_reduce"} == both.keys()


def test_zero_pads_what_does_not_divide() -> None:
    """The largest dim is padded, and the plan says so; a vector stays whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 5), nn.Linear(5, 3)).double()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()  # type: ignore[no-any-return]

    for zero in (1, 2, 3):
        made = compile_model(Net(), {"x": torch.rand(8, 7).double()}, Mesh.of(dp=2), Options(zero=zero))
        assert cut_and_whole(made)[0] >= 5 * 3 * 8
        assert made.plan.stored("layers.2.weight") == {"dp": Shard(1, units=5)}
        assert "5 units over 2 ranks, padded: 3, 2" in made.plan.parameter("layers.2.weight", "dp").reason


# --- what is held -------------------------------------------------------------------------------------------


def test_what_each_mode_holds() -> None:
    """In pieces of the whole: parameters, their gathered copies, sums of gradients of several microbatches."""
    held = {}
    for zero in MODES:
        made = compiled(Cell("one-layer llama", Mesh.of(dp=4), Options(zero=zero, microbatches=2)))
        whole = sum(math.prod(p.shape) * p.dtype.itemsize for p in made.parameters)
        m = memory(made)
        held[zero] = [round(x / whole, 1) for x in (m.parameters, m.gathered, m.accumulated, m.gradients, m.optimizer)]
    assert held == {
        0: [1.0, 0.0, 1.0, 1.0, 2.0],
        1: [0.3, 1.0, 1.0, 0.3, 0.5],
        2: [0.3, 1.0, 0.3, 0.3, 0.5],
        3: [0.3, 0.0, 0.3, 0.3, 0.5],
    }


def test_each_mode_needs_less_than_the_one_before() -> None:
    """Small gradients that travel together are whole until the last of them is made: those of a layer, not of all. Two
    layers and what is on its way are all of a model of two layers, and more than zero=2 saves of four: hence eight."""
    captured = captured_once(*tiny("llama", layers=8))

    def peak(zero: int) -> int:
        given = Options(zero=zero, microbatches=4)
        return memory(compile_graph(copy_graph(captured), Mesh.of(dp=2), given, outputs=())).peak

    peaks = [peak(zero) for zero in MODES]
    assert peaks[0] > peaks[1] > peaks[2] > peaks[3]


class _Wide(nn.Module):
    """Weights of 8 MiB, activations of 16 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        (Mesh.of(dp=1), {}),
        (Mesh.of(dp=2), {"zero": 0}),
        (Mesh.of(dp=2), {"zero": 1}),
        (Mesh.of(pp=2), {"schedule": "1f1b"}),
        (Mesh.of(pp=2), {"schedule": "zb_h1"}),
    ],
    ids=str,
)
def test_no_second_set_of_gradients_is_alive(mesh: Mesh, more: dict[str, Any]) -> None:
    """Each backward adds to the sums of earlier microbatches as it goes."""
    found = memory(
        compile_model(_Wide(), {"x": torch.zeros(8, 256)}, mesh, Options(microbatches=4, bucket_bytes=2**20, **more))
    )
    assert found.accumulated >= (_whole(_Wide()) // mesh.size("pp"))
    assert found.backward_peak < found.gathered + 1.2 * found.accumulated


def _whole(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_gathers_of_a_step_overlap_its_first_forward() -> None:
    """The first F gathers one layer ahead of its use, and hands on what it has gathered."""
    made = compile_cell(Cell("llama", Mesh.of(dp=2), Options(zero=2, microbatches=2)))
    stage = made.stage
    assert stage.gather is not None and stage.gather_forward is not None
    first = stage.gather_forward
    assert first.outputs == [*stage.forward.outputs, *stage.gather.outputs]
    kinds = ["gather" if kind_is(n, "all_gather") else "product" if "mm" in str(n.target) else "" for n in calls(first)]
    kinds = [kind for kind in kinds if kind]
    assert kinds.index("product") < len(kinds) - 1 - kinds[::-1].index("gather"), "all gathers stand ahead of compute"
    for step in (stage.forward, stage.backward):
        assert step is not None and not any(kind_is(n, "all_gather") for n in calls(step))
    assert stage.backward is not None
    values = {name: x.meta["val"] for name, x in zip(stage.backward.outputs, outputs(stage.backward.graph)) if name}
    given = zip(stage.backward.inputs, placeholders(stage.backward.graph), strict=True)
    sums = {name.replace("sum:", "grad:"): x.meta["val"] for name, x in given if name.startswith("sum:")}
    assert sums and {n: x.shape for n, x in sums.items()} == {n: x.shape for n, x in values.items() if n in sums}
    added = [n for n in calls(stage.backward) if "earlier" in str(n.args) and "add" in str(n.target)]
    assert any(kind_is(n.args[0], "reduce_scatter") for n in added), "sums of pieces are added after the reduction"


def calls(step: Any) -> list[Any]:
    return [n for n in step.graph.graph.nodes if n.op == "call_function"]


def kind_is(node: Any, kind: str) -> bool:
    return node.target in COLLECTIVES and kind_of(node) == kind


def test_the_last_backward_of_zero_1_reduces_as_it_goes() -> None:
    stage = compile_cell(Cell("llama", Mesh.of(dp=2), Options(zero=1, microbatches=2))).stage
    assert stage.reduce is None and stage.backward is not None and stage.backward_reduce is not None
    assert not any(n.target in COLLECTIVES for n in calls(stage.backward))
    assert {f"sum:{name[5:]}" for name in stage.backward.outputs if name} <= {*stage.backward_reduce.inputs}
    assert sum(kind_is(n, "reduce_scatter") for n in calls(stage.backward_reduce)) > 0


# --- options ------------------------------------------------------------------------------------------------


def test_names_stand_for_two_decisions() -> None:
    decided = {zero: (Options(zero=zero).gathers_once, Options(zero=zero).reduces_once) for zero in MODES}
    assert decided == {0: (False, True), 1: (True, True), 2: (True, False), 3: (False, False)}
    other = dataclasses.replace(Options(zero=3), reshard_after_forward=False, reduce_grads="step")
    assert other.gathers_once and other.reduces_once


@pytest.mark.parametrize(("schedule", "when"), [("tera_pipe", "once per step"), ("1f1b", "right before use")])
def test_a_plan_says_when_parameters_are_gathered(schedule: str, when: str) -> None:
    """Token slices take what was gathered for all of them."""
    slices = {"token_slices": 2} if schedule == "tera_pipe" else {}
    options = Options(zero=3, microbatches=2, schedule=schedule, **slices)
    made = compile_cell(Cell("one-layer llama", Mesh.of(pp=2, dp=2), options))
    said = made.plan.parameter("lm_head.weight", "dp").reason
    assert said == f"gathered {when}, gradients scattered"
    assert all((part.gather is not None) == (when == "once per step") for part in made.pipeline.parts)


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="zero: expected 0, 1, 2 or 3, found 4"):
        Options(zero=4)
    with pytest.raises(ValueError, match="reduce_grads: expected"):
        Options(reduce_grads="layer")
