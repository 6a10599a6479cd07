"""Each pass by the text of a small graph before and after."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.report.graph_text import format_graph


class Mlp(nn.Module):
    """Column, activation, row, loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x))).square().sum()


class Heads(nn.Module):
    """Two key heads, four query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(8, 8, False), nn.Linear(8, 4, False), nn.Linear(8, 8, False)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (p(x).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (self.q, self.k))
        k = k.repeat_interleave(2, 1)
        return self.out(F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)).square().sum()


def levels(model: nn.Module, batch: dict[str, Tensor], mesh: str, **options: Any) -> dict[str, list[str]]:
    """Name of each pass -> lines of the graph after it, spaces and notes removed."""
    seen: dict[str, list[str]] = {}

    def see(name: str, gm: torch.fx.GraphModule, ctx: Any) -> None:
        lines = (re.sub(r"\s+", " ", line.split("  #")[0]).strip() for line in format_graph(gm).splitlines())
        seen.setdefault(name, list(lines))

    compile_model(model, batch, Mesh.parse(mesh), Options(**options), observers=[see])
    return seen


X = {"x": torch.zeros(4, 8)}


@pytest.fixture(scope="module")
def tensor_parallel() -> dict[str, list[str]]:
    return levels(Mlp(), X, "tp=2")


def test_split_biases_only_where_the_contraction_is_cut(tensor_parallel: dict[str, list[str]]) -> None:
    before, after = tensor_parallel["normalize"], tensor_parallel["split_biases"]
    assert "linear_1: f32[4,8] = linear(relu, p_down_weight, p_down_bias)" in before
    assert [line for line in after if line not in before and "linear_1" in line][:2] == [
        "linear_1: f32[4,8] = linear(relu, p_down_weight, None)",
        "linear_1_biased: f32[4,8] = add(linear_1, p_down_bias)",
    ]
    assert "linear: f32[4,16] = linear(x, p_up_weight, p_up_bias)" in after


def test_propagate_types_values_and_inserts_conversions(tensor_parallel: dict[str, list[str]]) -> None:
    assert tensor_parallel["propagate_placements"][:9] == [
        "p_up_weight: f32[16,8] tp:S(0) = parameter",
        "p_up_bias: f32[16] tp:S(0) = parameter",
        "p_down_weight: f32[8,16] tp:S(1) = parameter",
        "p_down_bias: f32[8] = parameter",
        "x: f32[4,8] = input",
        "linear: f32[4,16] tp:S(1) = linear(x, p_up_weight, p_up_bias)",
        "relu: f32[4,16] tp:S(1) = relu(linear)",
        "linear_1: f32[4,8] tp:P = linear(relu, p_down_weight, None)",
        "linear_1_i: f32[4,8] = convert(linear_1, tp, P -> I)",
    ]


def test_localize_gives_one_ranks_shapes(tensor_parallel: dict[str, list[str]]) -> None:
    after = tensor_parallel["lower_to_local"]
    assert after[0] == "p_up_weight: f32[8,8] tp:S(0) = parameter"
    assert "linear: f32[4,8] tp:S(1) = linear(x, p_up_weight, p_up_bias)" in after
    assert "linear_1_i: f32[4,8] = exchange(linear_1, tp, P -> I)" in after


def test_expand_kv_heads_repeats_to_the_number_of_ranks() -> None:
    seen = levels(Heads(), {"x": torch.zeros(2, 3, 8)}, "tp=4")
    assert not any("repeat_interleave" in line for line in seen["normalize"])
    repeated = [line for line in seen["expand_kv_heads"] if "repeat_interleave" in line]
    assert len(repeated) == 2 and all("f32[2,4,3,2]" in line and ", 2, 1)" in line for line in repeated)
    local = [line for line in seen["lower_to_local"] if "autopar.attention" in line]
    assert "f32[2,1,3,2]" in local[0]


def test_buckets_join_small_gradients() -> None:
    seen = levels(Mlp(), X, "dp=2")
    before = [line for line in seen["backward_reduce.differentiate"] if "= autopar.all_reduce" in line]
    after = [line for line in seen["backward_reduce"] if "= autopar.all_reduce" in line]
    assert len(before) == 4
    assert after == ["bucket_sum: f32[280] = autopar.all_reduce(bucket, 'dp', 'sum')"]


class Mean(nn.Module):
    """A mean over targets that are not ignored: the count is known only after all microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), y)


def test_prologue_counts_targets_of_all_microbatches() -> None:
    batch = {"x": torch.zeros(4, 8), "y": torch.zeros(4, dtype=torch.int64)}
    seen = levels(Mean(), batch, "dp=1", microbatches=2)
    assert any("convert(sum_default_1, mb, P -> I)" in line for line in seen["propagate_placements"])
    prologue = " ".join(seen["prologue"])
    assert "ne.Scalar(y, -100)" in prologue and "sum(" in prologue
    assert any("total_0" in line and "watch" in line for line in seen["forward"])
    assert any("watch" in line and "div" in line for line in seen["forward"])
    assert not any("mb" in line for line in seen["forward"])
