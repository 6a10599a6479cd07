"""slice_early: what is needed in pieces is computed in pieces, as far up as rules allow and no further."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from autopar.compile.model import compile_model
from autopar.ir.conversions import convert
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement, Shard
from autopar.ops.traits import FILLED
from autopar.options import Options
from autopar.passes.partition.slice_early import SliceEarly
from autopar.report.graph_text import format_graph
from autopar.rewrite.checks import check_types
from autopar.rewrite.compilation import Compilation
from autopar.testing.harness import check_model
from autopar.testing.soundness import Ref, Sample, SampleCall, Whole, typed, wrong_pieces
from tests.passes.test_placement_passes import levels
from tests.support.pointwise_samples import normal

aten = torch.ops.aten
CP = Mesh.of(cp=2)
ZIGZAG = Shard(1, (4, -4))


def lines(gm: GraphModule) -> list[str]:
    """The calls of a graph as text, without notes."""
    found = [re.sub(r"\s+", " ", line.split("  #")[0]).strip() for line in format_graph(gm).splitlines()]
    return [line for line in found if not line.endswith("parameter") and not line.startswith("return")]


def sliced(sample: Sample, placements: tuple[dict[str, Placement], ...], mesh: Mesh = CP) -> list[str]:
    """The lines after the pass. Types hold, and pieces give what the whole gives, forward and backward."""
    gm = SliceEarly().apply(typed(sample, placements, mesh), Compilation(mesh))
    check_types(gm, Compilation(mesh))
    assert not wrong_pieces(sample, placements, mesh, Whole.of(sample), [SliceEarly()])
    return lines(gm)


def rotary(*more: SampleCall, cut: str = "S(0;4,-4)") -> Sample:
    """cos(arange · 0.3) for each of eight positions, cut where it meets x; steps may follow."""
    steps = [
        SampleCall(aten.arange.default, (8,)),
        SampleCall(aten.mul.Tensor, (Ref(0), 0.3)),
        SampleCall(aten.cos.default, (Ref(1),)),
        SampleCall(convert, (Ref(2), "cp", "I", cut)),
        SampleCall(aten.mul.Tensor, (normal(2, 8), Ref(3))),
        *more,
    ]
    return Sample(steps, private=(0, 1, 2, 3))


def test_a_rotary_table_is_computed_for_the_tokens_of_a_rank() -> None:
    sample, placements = rotary(), ({"cp": ZIGZAG},)
    assert lines(typed(sample, placements, CP)) == [
        "arange_default: i64[8] = arange(8)",
        "mul_tensor: f32[8] = mul(arange_default, 0.3)",
        "cos_default: f32[8] = cos(mul_tensor)",
        "convert: f32[8] cp:S(0;4,-4) = convert(cos_default, cp, I -> S(0;4,-4))",
        "mul_tensor_1: f64[2,8] cp:S(1;4,-4) = mul(x0, convert)",
    ]
    assert sliced(sample, placements) == [
        "arange_default: i64[8] = arange(8)",
        "arange_default_s: i64[8] cp:S(0;4,-4) = convert(arange_default, cp, I -> S(0;4,-4))",
        "mul_tensor: f32[8] cp:S(0;4,-4) = mul(arange_default_s, 0.3)",
        "cos_default: f32[8] cp:S(0;4,-4) = cos(mul_tensor)",
        "mul_tensor_1: f64[2,8] cp:S(1;4,-4) = mul(x0, cos_default)",
    ]


def test_one_slice_serves_two_tables_from_before_the_first() -> None:
    """cos and sin of the same angles: the angles are sliced at their source, once."""
    sample = rotary(
        SampleCall(aten.sin.default, (Ref(1),)),
        SampleCall(convert, (Ref(5), "cp", "I", "S(0;4,-4)")),
        SampleCall(aten.mul.Tensor, (Ref(4), Ref(6))),
    )
    sample.private = (0, 1, 2, 3, 5, 6)
    after = sliced(sample, ({"cp": ZIGZAG},))
    assert [line for line in after if "convert" in line] == [
        "arange_default_s: i64[8] cp:S(0;4,-4) = convert(arange_default, cp, I -> S(0;4,-4))"
    ]
    assert "sin_default: f32[8] cp:S(0;4,-4) = sin(mul_tensor)" in after


def test_rows_of_a_mask_are_cut_and_its_columns_are_not() -> None:
    """le(key, query) of the same positions: one view of them is cut, the other stays whole."""
    steps = [
        SampleCall(aten.arange.default, (8,)),
        SampleCall(aten.view.default, (Ref(0), [8, 1])),
        SampleCall(aten.le.Tensor, (Ref(0), Ref(1))),
        SampleCall(convert, (Ref(2), "cp", "I", "S(0;4,-4)")),
        SampleCall(aten.where.ScalarOther, (Ref(3), normal(8, 8), 0.0)),
    ]
    after = sliced(Sample(steps, private=(0, 1, 2, 3)), ({"cp": Shard(0, (4, -4))},))
    assert after == [
        "arange_default: i64[8] = arange(8)",
        "arange_default_s: i64[8] cp:S(0;4,-4) = convert(arange_default, cp, I -> S(0;4,-4))",
        "view_default: i64[8,1] cp:S(0;4,-4) = view(arange_default_s, [8, 1])",
        "le_tensor: bool[8,8] cp:S(0;4,-4) = le(arange_default, view_default)",
        "where_scalar_other: f64[8,8] cp:S(0;4,-4) = where.ScalarOther(le_tensor, x0, 0.0)",
    ]


def test_flattened_labels_are_cut_where_they_come_in() -> None:
    """[B, S] labels in a loss over [B·S] rows: the pattern of the rows becomes that of the sequence."""
    steps = [
        SampleCall(aten.mul.Tensor, (torch.arange(16).view(2, 8), 2)),
        SampleCall(aten.view.default, (Ref(0), [16])),
        SampleCall(convert, (Ref(1), "cp", "I", "S(0;(4,-4)x2)")),
        SampleCall(aten.mul.Tensor, (normal(16), Ref(2))),
    ]
    after = sliced(Sample(steps, private=(0, 1, 2)), ({}, {"cp": Shard(0, (4, -4) * 2)}))
    assert after == [
        "x0_s: i64[2,8] cp:S(1;4,-4) = convert(x0, cp, I -> S(1;4,-4))",
        "mul_tensor: i64[2,8] cp:S(1;4,-4) = mul(x0_s, 2)",
        "view_default: i64[16] cp:S(0;(4,-4)x2) = view(mul_tensor, [16])",
        "mul_tensor_1: f64[16] cp:S(0;(4,-4)x2) = mul(x1, view_default)",
    ]


# --- where a slice stays ----------------------------------------------------------------------------------------------


def unchanged(sample: Sample, *placements: dict[str, Placement]) -> bool:
    return sliced(sample, placements) == lines(typed(sample, placements, CP))


def test_above_an_op_that_spans_the_dim() -> None:
    sample = rotary()
    sample.steps[2] = SampleCall(aten.cumsum.default, (Ref(1), 0))
    assert unchanged(sample, {"cp": ZIGZAG})


def test_a_cumulative_sum_of_integers_is_scanned_by_shards() -> None:
    steps = [
        SampleCall(aten.cumsum.default, (torch.arange(8), 0)),
        SampleCall(convert, (Ref(0), "cp", "I", "S(0;4,-4)")),
        SampleCall(aten.mul.Tensor, (normal(2, 8), Ref(1))),
    ]
    after = sliced(Sample(steps, gradients=False, private=(0, 1)), ({}, {"cp": ZIGZAG}))
    assert [line.partition(" = ")[2].partition("(")[0] for line in after] == ["convert", "cumsum", "mul"]


def test_above_an_op_of_several_results() -> None:
    steps = [
        SampleCall(aten.split_with_sizes.default, (torch.arange(16.0), [8, 8])),
        SampleCall(convert, (Ref(0), "cp", "I", "S(0;4,-4)")),
        SampleCall(aten.mul.Tensor, (normal(2, 8), Ref(1))),
    ]
    assert unchanged(Sample(steps, gradients=False, private=(0, 1)), {}, {"cp": ZIGZAG})


@pytest.mark.parametrize("user", [1, 2])
def test_at_a_value_that_somebody_uses_whole(user: int) -> None:
    """Its other users are cut all the same: what was cut before is, and nothing is computed twice."""
    sample = rotary(SampleCall(aten.neg.default, (Ref(user),)))
    after = sliced(sample, ({"cp": ZIGZAG},))
    shared = {1: "mul_tensor", 2: "cos_default"}[user]
    assert [line.split(" = ")[1] for line in after if "convert(" in line] == [f"convert({shared}, cp, I -> S(0;4,-4))"]
    assert f"neg_default: f32[8] = neg({shared})" in after


def test_at_a_value_that_is_cut_in_two_ways() -> None:
    sample = rotary(
        SampleCall(convert, (Ref(2), "cp", "I", "S(0)")),
        SampleCall(aten.mul.Tensor, (normal(8), Ref(5))),
    )
    sample.private = (0, 1, 2, 3, 5)
    assert unchanged(sample, {"cp": ZIGZAG}, {"cp": Shard(0)})


def test_at_a_value_that_its_user_needs_in_two_ways() -> None:
    """The rows of a @ a: the left one would be cut, the right one whole."""
    steps = [
        SampleCall(aten.view.default, (torch.arange(64), [8, 8])),
        SampleCall(aten.matmul.default, (Ref(0), Ref(0))),
        SampleCall(convert, (Ref(1), "cp", "I", "S(0;4,-4)")),
        SampleCall(aten.mul.Tensor, (normal(8, 8), Ref(2))),
    ]
    assert unchanged(Sample(steps, private=(0, 1, 2)), {}, {"cp": Shard(0, (4, -4))})


def test_at_a_value_with_a_gradient() -> None:
    sample = rotary()
    sample.steps[1] = SampleCall(aten.mul.Tensor, (Ref(0), normal(8)))
    assert unchanged(sample, {}, {"cp": ZIGZAG})


# --- whole models -----------------------------------------------------------------------------------------------------


class Tables(nn.Module):
    """A table and a mask for each token of each row, made of positions that come in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0) + torch.arange(x.shape[0]).unsqueeze(1)
        table = torch.cos(positions.to(x.dtype) * 0.3)[..., None]
        return F.mse_loss(self.down(F.relu(self.up(x))) * table, x)


def test_data_parallel_ranks_compute_the_tables_of_their_rows() -> None:
    seen = levels(Tables(), {"x": torch.zeros(4, 6, 4)}, "dp=2")
    before, after = (
        [line for line in seen[name] if "convert(" in line and "weight" not in line and "bias" not in line]
        for name in ("propagate_placements", "slice_early")
    )
    assert any("convert(unsqueeze_2, dp, I -> S(0))" in line for line in before)
    assert not any("unsqueeze_2, dp" in line for line in after)
    assert any(re.search(r"cos: f32\[2,6\] dp:S\(0\)", line) for line in seen["lower_to_local"])


@pytest.mark.parametrize("mesh, options", [("dp=2", {}), ("dp=2,tp=2", {"zero": 3}), ("dp=2", {"microbatches": 2})])
def test_numbers_stay(mesh: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6, 4, dtype=torch.float64)}
    assert check_model(Tables().double(), batch, Mesh.parse(mesh), Options(**options)).worst < 1e-12


class _Filled(nn.Module):
    """Attention of DeepSeek writes both halves of its keys into a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        keys = h.new_empty(*h.shape[:-1], 12)
        keys[..., :8].copy_(h)
        keys[..., 8:].copy_(x[..., :4])
        return (self.down(keys + torch.zeros(x.shape[0], 1, 12, dtype=x.dtype)) ** 2).mean()


@pytest.mark.parametrize("mesh", [Mesh.of(dp=2), Mesh.of(dp=2, tp=2)])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_filled_tensor_is_made_for_the_rows_of_a_rank(mesh: Mesh, microbatches: int) -> None:
    """Its size is the batch's in the model; a rank's graph makes its own rows, of one microbatch."""
    batch = {"x": torch.randn(8, 4, 8, dtype=torch.float64)}
    compiled = compile_model(_Filled().double(), batch, mesh, Options(microbatches=microbatches))
    made = [n for part in compiled.pipeline.parts for n in part.forward.graph.graph.nodes if n.target in FILLED]
    assert made and all(n.meta["val"].shape[0] == 4 // microbatches for n in made if n.meta["val"].dim() == 3)
    assert check_model(_Filled().double(), batch, mesh, Options(microbatches=microbatches)).worst < 1e-12


@pytest.mark.parametrize("order", list(itertools.permutations([("dp", 0), ("cp", 1), ("tp", 2)])), ids=str)
def test_slices_of_several_axes_in_any_order_are_moved(order: tuple[tuple[str, int], ...]) -> None:
    """Each waits for the one above it."""
    steps = [SampleCall(aten.ones.default, ((4, 8, 2),))]
    steps += [SampleCall(convert, (Ref(i), axis, "I", f"S({dim})")) for i, (axis, dim) in enumerate(order)]
    steps.append(SampleCall(aten.mul.Tensor, (normal(4, 8, 2), Ref(3))))
    x: dict[str, Placement] = {axis: Shard(dim) for axis, dim in order}
    mesh = Mesh.of(dp=2, cp=2, tp=2)
    found = sliced(Sample(steps, private=(0, 1, 2, 3)), (x,), mesh)
    assert not any("convert" in line for line in found), found
