"""Sizes that do not divide: shards are padded, no row of padding is ever summed, and nobody but the wire sees one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autopar.compile.model import compile_model
from autopar.cost.traffic import communication
from autopar.ir.graph import calls_of
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard, join, parse_placement, piece, stored_piece, with_padding, without_padding
from autopar.ops.padded_pieces import zero_padding
from autopar.options import Options
from autopar.passes.partition.zero_padding import ZeroPadding
from autopar.testing.harness import check_model
from tests.support.subjects import tiny
from tests.support.uneven import ODD, odd

LIMIT = 1e-10

# --- pieces -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size", "ranks", "sizes"),
    [
        ("S(0/63)", 63, 2, [32, 31]),
        ("S(0/14)", 28, 4, [8, 8, 8, 4]),
        ("S(0/3)", 24, 4, [8, 8, 8, 0]),
        ("S(0/3;6,3x2)", 12, 2, [8, 4]),
        ("S(0/5;5,-5)", 10, 2, [5, 5]),
    ],
)
def test_pieces_are_padded_and_stored_without_padding(text: str, size: int, ranks: int, sizes: list[int]) -> None:
    shard = parse_placement(text)
    assert isinstance(shard, Shard) and str(shard) == text
    whole = torch.arange(1.0, 2 * size + 1).view(size, 2)
    pieces = [piece(whole, shard, ranks, rank) for rank in range(ranks)]
    assert len({x.shape for x in pieces}) == 1 and torch.equal(join(pieces, shard), whole)
    for rank, (padded, rows) in enumerate(zip(pieces, sizes, strict=True)):
        place: Any = {"tp": shard}, {"tp": ranks}, {"tp": rank}
        stored = stored_piece(whole, *place)
        assert len(stored) == rows and bool(stored.all()), "a stored row is a row of the whole"
        assert torch.equal(with_padding(stored, whole.shape, *place), padded)
        assert torch.equal(without_padding(padded, whole.shape, *place), stored)


# --- graphs -------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """A product whose middle has three entries, an operator that zero does not stay zero under, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False)
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down((self.up(x) * self.scale).exp()) ** 2).sum()


X = {"x": torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)}


def passed(model: nn.Module, batch: dict[str, Tensor], mesh: str, **options: Any) -> dict[str, str]:
    """Name of a pass -> text of the graph after it."""
    texts: dict[str, str] = {}

    def see(name: str, gm: GraphModule, ctx: Any) -> None:
        texts[name] = str(gm.graph)

    compile_model(model, batch, Mesh.parse(mesh), Options(**options), lift_to_float64=True, observers=[see])
    return texts


def test_zeros_stand_where_padding_would_be_summed_and_nowhere_else() -> None:
    torch.manual_seed(0)
    texts = passed(Sums().double(), X, "tp=2")
    assert "zero_padding" not in texts["slice_early"] and "'S(1/3)'" not in texts["slice_early"]
    lines = [line.strip() for line in texts["zero_padding"].splitlines() if "zero_padding](" in line]
    assert len(lines) == 2, lines
    assert (
        lines[0].startswith("%mul_0") and "(%mul, tp, 1, 1, [], 3, False, 0.0)" in lines[0]
    )  # scale's gradient is a sum
    assert lines[1].startswith("%exp_0") and "(%exp, tp, 1, 1, [], 3, True, 0.0)" in lines[1]  # exp(0) = 1
    assert "(%exp, tp, 2, 1, [], 3, True, 0.0)" in texts["lower_to_local"]


def test_a_pair_of_products_needs_no_zeros_but_those_of_its_weights() -> None:
    model, batch = odd("llama_mha")
    compiled = compile_model(model, batch, Mesh.of(tp=2), Options(), lift_to_float64=True)
    assert any(isinstance(p, Shard) and p.units for s in compiled.parameters for p in s.placements.values())
    assert not calls_of(compiled.local.graph, zero_padding)


def test_the_plan_says_who_has_how_much() -> None:
    model, batch = odd("llama")
    made = compile_model(model, batch, Mesh.of(tp=4), Options(), lift_to_float64=True, outputs=()).plan
    said = {name: made.parameter(name, "tp").reason for name in made.parameters}
    heads = "14 units over 4 ranks, padded: 4 on 3 ranks, 2"
    assert said["model.layers.0.self_attn.q_proj.weight"].endswith(heads), said
    assert said["lm_head.weight"].endswith("63 units over 4 ranks, padded: 16 on 3 ranks, 15"), said


def test_what_divides_is_not_padded() -> None:
    texts = passed(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).double(), {"input": X["x"]}, "tp=2")
    assert "/8)" not in texts["zero_padding"] and "zero_padding" not in texts["zero_padding"]


def test_without_the_zeros_the_sums_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batch = Between(FUNCTIONS["exponential"]).double(), {"x": X["x"][:, :1]}
    assert check_model(model, batch, Mesh.of(tp=2)).worst < LIMIT
    monkeypatch.setattr(ZeroPadding, "apply", lambda self, gm, ctx: gm)
    assert check_model(model, batch, Mesh.of(tp=2)).worst > 1e-3


def test_labels_of_padding_are_refused() -> None:
    model, batch = odd("llama_mha")
    text = passed(model, batch, "tp=2")["lower_to_local"]
    assert "tp, 2, 'labels of \"labels\"', 63)" in text or 'labels of "labels", 63)' in text


def test_traffic_counts_padding() -> None:
    """An odd sequence is sent as an even one: gathers and scatters of 7 tokens are those of 8."""
    found = []
    for tokens in (7, 8):
        model, batch = odd("llama_mha", tokens=tokens)
        options = Options(sequence_parallel=True)
        made = compile_model(model, batch, Mesh.of(tp=2), options, lift_to_float64=True, outputs=())
        found.append(communication(made.local, Mesh.of(tp=2)))
    odd_one, even_one = found
    for kind in ("all_gather", "reduce_scatter"):
        assert odd_one["tp", kind] == even_one["tp", kind], kind


# --- numbers ------------------------------------------------------------------------------------------------

QUICK = [
    ("llama", "tp=4", {}, 16),  # 14 heads on 4 ranks, two key heads
    ("llama_mha", "tp=4", {}, 16),  # fewer heads than ranks
    ("llama_tied", "tp=2", {"sequence_parallel": True}, 7),
    ("qwen2", "tp=2", {}, 16),
    ("phi3", "tp=2", {}, 16),  # fused projections
    ("gpt2", "dp=2,tp=2", {"zero": 3}, 16),
    ("bert", "tp=2", {"sequence_parallel": True}, 7),
    ("t5", "tp=4", {}, 16),
    ("mixtral", "ep=2,tp=2", {}, 16),
    ("llama_mha", "cp=2,tp=2", {}, 16),
    ("llama_mha", "tp=2", {"loss_chunks": 3, "microbatches": 2}, 16),
]
MESHES = [
    ("tp=2", {}, 16),
    ("tp=3", {}, 16),
    ("tp=4", {}, 16),
    ("tp=2", {"sequence_parallel": True}, 7),
    ("tp=4", {"sequence_parallel": True}, 9),
    ("dp=2,tp=2", {"zero": 3}, 16),
    ("dp=2,tp=2", {"zero": 1, "microbatches": 2}, 16),
]


def check(name: str, mesh: str, options: dict[str, Any], tokens: int) -> None:
    model, batch = odd(name, tokens=tokens)
    found = check_model(model, batch, Mesh.parse(mesh), Options(**options))
    padded = [p for s in found.compiled.parameters for p in s.placements.values() if isinstance(p, Shard) and p.units]
    assert (padded or mesh == "tp=3") and found.worst < LIMIT, str(found)  # some models divide by three


@pytest.mark.parametrize(("name", "mesh", "options", "tokens"), QUICK, ids=str)
def test_loss_and_gradients_are_those_of_one_process(
    name: str, mesh: str, options: dict[str, Any], tokens: int
) -> None:
    check(name, mesh, options, tokens)


@pytest.mark.full
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize(("mesh", "options", "tokens"), MESHES, ids=str)
def test_all_models_on_all_meshes(name: str, mesh: str, options: dict[str, Any], tokens: int) -> None:
    check(name, mesh, options, tokens)


class Between(nn.Module):
    """A function between two products, of which padding would be nan or infinite, or have such a derivative."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(1, 7, bias=False), nn.Linear(7, 1), nn.Parameter(torch.rand(()))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(self.up(x), self.scale)
        return (self.down(y) ** 2).sum() + y.mean()


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "root": lambda z, s: z.abs().sqrt() * s,
    "logarithm": lambda z, s: z.abs().log() * s,
    "inverse root": lambda z, s: z.abs().rsqrt() + s,
    "zero by zero": lambda z, s: z / z.abs() * s,
    "one by zero": lambda z, s: s / z + z,
    "exponential": lambda z, s: z.exp() * s,
    "by the padded": lambda z, s: z * (s / z),
    "above zero": lambda z, s: nn.functional.hardtanh(z, 0.5, 1.0) * s,
    "below zero": lambda z, s: nn.functional.hardtanh(z, -1.0, -0.5) * s,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_infinities_in_padding_go_nowhere(name: str) -> None:
    torch.manual_seed(0)
    model = Between(FUNCTIONS[name]).double()
    found = check_model(model, {"x": torch.linspace(1, 3, 6, dtype=torch.float64).view(6, 1)}, Mesh.of(tp=4))
    assert str(found.compiled.plan.parameter("up.weight", "tp").stored) == "S(0/7)" and found.worst < LIMIT


EXPERTS = [
    ("mixtral", 3, "ep=2", {}),
    ("gpt_oss", 5, "ep=4", {}),  # none on the last rank
    ("qwen3_moe", 5, "ep=2,tp=2", {"token_dispatcher": "allgather"}),
    ("mixtral", 3, "dp=2,ep=2", {"zero": 3, "token_dispatcher": "alltoall"}),
    ("mixtral", 3, "tp=2", {"expert_axis": "tp"}),
]


@pytest.mark.parametrize(("name", "experts", "mesh", "options"), EXPERTS, ids=str)
def test_experts_that_do_not_divide(name: str, experts: int, mesh: str, options: dict[str, Any]) -> None:
    layers = 0 if name == "gpt_oss" else 1  # of each kind
    model, batch = tiny(name, layers=layers, num_experts=experts, num_local_experts=experts)
    found = check_model(model, batch, Mesh.parse(mesh), Options(**options))
    padded = [
        str(p) for s in found.compiled.parameters for p in s.placements.values() if isinstance(p, Shard) and p.units
    ]
    assert f"S(0/{experts})" in padded and found.worst < LIMIT, str(found)


def test_gradients_of_positions_have_no_padding() -> None:
    """Each rank has the gradient of its tokens' positions; the whole is alone in its storage."""

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.positions = nn.Embedding(12, 8), nn.Parameter(torch.rand(9, 8))
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + self.positions
            x = x + self.down(self.up(x).tanh())
            return x.mean(1).pow(2).sum() + x[:, -1].sum()

    torch.manual_seed(0)
    batch = {"ids": torch.arange(18).view(2, 9) % 12}
    for mesh in (Mesh.of(tp=2), Mesh.of(tp=4)):
        found = check_model(Placed().double(), batch, mesh, Options(sequence_parallel=True))
        assert found.worst < LIMIT, str(found)


def test_smoothed_labels_count_no_padding() -> None:
    """The mean of the logits is over the words that exist."""

    class Smoothed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(63, 8), nn.Linear(8, 63)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.head(self.embed(ids).tanh()), labels, label_smoothing=0.1)

    torch.manual_seed(0)
    batch = {"ids": torch.arange(6) * 12, "labels": torch.arange(6) * 12 + 2}
    found = check_model(Smoothed().double(), batch, Mesh.of(tp=4))
    assert str(found.compiled.plan.parameter("head.weight", "tp").stored) == "S(0/63)" and found.worst < LIMIT
