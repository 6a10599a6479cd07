"""slice_early: what is needed in pieces is computed in pieces, as far up as rules allow and no further."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from autopar.checks import check_types
from autopar.conversions import convert
from autopar.mesh import Mesh
from autopar.pass_manager import Context
from autopar.passes.slice_early import SliceEarly
from autopar.placement import Placement, Shard
from autopar.plan import Options
from autopar.printing import format_graph
from tests.harness import check_model
from tests.passes.test_placement_passes import levels
from tests.pointwise_samples import normal
from tests.soundness import Ref, Sample, Step, Whole, compare, typed

aten = torch.ops.aten
CP = Mesh.of(cp=2)
ZIGZAG = Shard(1, (4, -4))


def lines(gm: GraphModule) -> list[str]:
    """The calls of a graph as text, without notes."""
    found = [re.sub(r"\s+", " ", line.split("  #")[0]).strip() for line in format_graph(gm).splitlines()]
    return [line for line in found if not line.endswith("parameter") and not line.startswith("return")]


def sliced(sample: Sample, placements: tuple[dict[str, Placement], ...], mesh: Mesh = CP) -> list[str]:
    """The lines after the pass. Types hold, and pieces give what the whole gives, forward and backward."""
    gm = SliceEarly().apply(typed(sample, placements, mesh), Context(mesh))
    check_types(gm, Context(mesh))
    assert not compare(sample, placements, mesh, Whole.of(sample), [SliceEarly()])
    return lines(gm)


def rotary(*more: Step, cut: str = "S(0;4,-4)") -> Sample:
    """cos(arange · 0.3) for each of eight positions, cut where it meets x; steps may follow."""
    steps = [
        Step(aten.arange.default, (8,)),
        Step(aten.mul.Tensor, (Ref(0), 0.3)),
        Step(aten.cos.default, (Ref(1),)),
        Step(convert, (Ref(2), "cp", "I", cut)),
        Step(aten.mul.Tensor, (normal(2, 8), Ref(3))),
        *more,
    ]
    return Sample(steps, private=(0, 1, 2, 3))


def test_a_rotary_table_is_computed_for_the_tokens_of_a_rank() -> None:
    sample, placements = rotary(), ({"cp": ZIGZAG},)
    assert lines(typed(sample, placements, CP)) == [
        "arange: i64[8] = arange(8)",
        "mul_tensor: f32[8] = mul(arange, 0.3)",
        "cos_default: f32[8] = cos(mul_tensor)",
        "convert: f32[8] cp:S(0;4,-4) = convert(cos_default, cp, I -> S(0;4,-4))",
        "mul_tensor_1: f64[2,8] cp:S(1;4,-4) = mul(x0, convert)",
    ]
    assert sliced(sample, placements) == [
        "arange: i64[8] = arange(8)",
        "arange_s: i64[8] cp:S(0;4,-4) = convert(arange, cp, I -> S(0;4,-4))",
        "mul_tensor: f32[8] cp:S(0;4,-4) = mul(arange_s, 0.3)",
        "cos_default: f32[8] cp:S(0;4,-4) = cos(mul_tensor)",
        "mul_tensor_1: f64[2,8] cp:S(1;4,-4) = mul(x0, cos_default)",
    ]
