"""Tiles of tokens: the same losses and gradients, and the inner values of one tile at a time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compile import tiles
from autopar.compile.model import compile_model
from autopar.compile.stages import StageBuilder
from autopar.compile.tiles import regions_of
from autopar.cost.memory import memory
from autopar.cost.traffic import step_communication
from autopar.ir.mesh import Mesh
from autopar.ops.traits import PRODUCTS
from autopar.options import Options
from autopar.passes.stage.tile_regions import tile_sizes
from autopar.passes.stage.tile_tokens import tile_tokens
from autopar.plan import Plan
from autopar.report.graph_text import format_graph
from autopar.steps.graphs import Compiled, Pipeline
from autopar.testing.harness import MeshRun, check_model
from autopar.testing.reference import LIMIT
from tests.support.cases import Cell, called, check, compile_cell, simulated
from tests.support.subjects import SEED, tiny

# 16 tokens in tiles of 6, 6 and 4
CELLS = [
    Cell("one-layer llama", Mesh.of(dp=2), Options(tiles=3, zero=3, activation_checkpoint="full")),
    Cell("one-layer llama", Mesh.of(tp=2), Options(tiles=3, sequence_parallel=True)),
    Cell("one-layer llama", Mesh.of(cp=2), Options(tiles=3, zero=1, loss_chunks=3, microbatches=2)),
    Cell("gpt2 with dropout", Mesh.of(dp=2), Options(tiles=3, activation_checkpoint="selective")),
    Cell("gpt2 with dropout", Mesh.of(cp=2), Options(tiles=3)),
    Cell("one-layer gpt2", Mesh.of(cp=2, tp=2), Options(tiles=3)),
    Cell(
        "one-layer gemma2", Mesh.of(dp=2), Options(tiles=16, activation_checkpoint="offload", activation_offload=2**30)
    ),
    Cell("one-layer qwen3_moe", Mesh.of(dp=2), Options(tiles=3, activation_checkpoint="full")),  # experts of a tile
    Cell("one-layer qwen3_moe", Mesh.of(dp=8), Options(tiles=3)),  # one example: from attention to the next layer
    Cell("one-layer qwen3_moe", Mesh.of(ep=2), Options(tiles=3)),  # the experts' tokens meet: not theirs
    Cell("one-layer t5", Mesh.of(dp=2), Options(tiles=5)),
    Cell("one-layer vit", Mesh.of(dp=2), Options(tiles=3)),
]
FULL = [
    Cell(name, mesh, Options(tiles=3, activation_checkpoint="full"))
    for name in ("whisper", "deepseek_v3", "gpt_oss", "gpt_neox", "bert", "falcon", "mixtral", "phi3", "cohere")
    for mesh in (Mesh.of(dp=2), Mesh.of(cp=2))
    if (name, str(mesh)) not in {("bert", "cp=2"), ("gpt_oss", "cp=2")}
]
RANKS = [
    Cell("llama", Mesh.of(pp=2), Options(tiles=3, microbatches=4, schedule="zb_h1", activation_checkpoint="full")),
    Cell("one-layer gpt2", Mesh.of(dp=2), Options(tiles=3, zero=2, microbatches=2)),
]


@pytest.mark.parametrize("cell", [*CELLS, *(pytest.param(cell, marks=pytest.mark.full) for cell in FULL)], ids=str)
def test_equals_one_process(cell: Cell) -> None:
    assert compile_cell(cell).plan.tiles == cell.options.tiles
    check(simulated(cell))


@pytest.mark.parametrize("cell", RANKS, ids=str)
def test_on_ranks(cell: Cell) -> None:
    check(called(cell))


class Block(nn.Module):
    """An MLP with dropout within, and values that others use as well."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.place = nn.Parameter(torch.randn(12, 32))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.nn.functional.gelu(self.up(self.norm(x)))
        if self.habit == "dropout":
            inner = nn.functional.dropout(inner, 0.3)
        if self.habit == "places":  # a parameter that has tokens
            inner = inner + self.place
        y = x + self.down(inner)
        if self.habit == "beside":  # between the calls of the region
            mean = inner.mean(1, keepdim=True)
            return (y + self.down(inner * 2)).square().mean() + mean.square().mean()
        if self.habit == "flat":
            return (self.down(self.up(y.reshape(-1, 8)).reshape(-1, 32)) ** 2).mean()
        return y.square().mean()


def block(habit: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Block(habit).double(), {"x": torch.randn(4, 12, 8).double()}


@pytest.mark.parametrize("habit", ["plain", "dropout", "places", "beside", "flat"])
def test_what_stands_beside_a_region(habit: str) -> None:
    """Gradients are those of the whole region: dropout draws the same numbers, calls between those of a region follow
    it, and parameters with a dim of tokens have all of it."""
    losses, gradients = zip(*(_step(habit, count) for count in (1, 5)), strict=True)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-14)
    for name, (gradient,) in gradients[0].items():
        torch.testing.assert_close(gradients[1][name][0], gradient, rtol=1e-12, atol=1e-14, msg=name)


class Plain(nn.Module):
    """An MLP and a head with nothing around them that a module or an operator keeps apart."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down, self.head = (
            nn.Embedding(16, 8), nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 16),
        )  # fmt: skip

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        logits = self.head(x + self.down(self.up(x).relu()))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_a_head_is_of_the_chunks_of_its_loss() -> None:
    torch.manual_seed(0)
    model, ids = Plain().double(), torch.randint(0, 16, (4, 12))
    batch = {"ids": ids, "labels": ids.flip(1)}
    made = compile_model(model, batch, Mesh.of(), Options(), outputs=())
    for chunks, products in ((1, 3), (4, 2)):
        (region,) = regions_of(made.local, dataclasses.replace(made.plan, options=Options(loss_chunks=chunks)))
        assert sum(n.target in PRODUCTS for n in region.calls) == products
    assert check_model(model, batch, Mesh.of(dp=2), Options(tiles=3, loss_chunks=4, zero=3)).worst < LIMIT


def _step(habit: str, count: int) -> tuple[list[float], dict[str, list[Tensor]]]:
    model, batch = block(habit)
    made = compile_model(model, batch, Mesh.of(), Options(tiles=count), outputs=())
    assert (count > 1) == any("tile" in n.meta for n in made.local.graph.nodes)
    return MeshRun(made, model, batch, Mesh.of(), SEED).step()


@functools.cache
def wide(**options: Any) -> Compiled:
    """MLPs that set the peak: of 16 times the width, on one example of 64 tokens."""
    model, batch = tiny("llama", layers=2, hidden_size=16, intermediate_size=256)
    ids = torch.zeros(1, 64, dtype=torch.long)
    return compile_model(model, {name: ids for name in batch}, Mesh.of(), Options(**options), outputs=())


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_one_tile_of_inner_values_exists_at_once(policy: str) -> None:
    """Of gate, its activation, up and their product, and their gradients: one tile's."""
    inner = 64 * 256 * 8
    whole, parts = (memory(wide(tiles=n, activation_checkpoint=policy)) for n in (1, 16))
    assert whole.backward_peak - parts.backward_peak > 4 * inner
    assert parts.saved <= whole.saved
    if policy != "full":
        assert whole.saved - parts.saved >= 2 * 2 * inner  # of each layer at least gate and up


def test_gradients_of_weights_are_there_once() -> None:
    """A tile's product is added up in place: three weights of a layer, and not the sum so far beside them."""
    held = memory(wide(tiles=16, activation_checkpoint="full"))
    weight, tile = 16 * 256 * 8, 4 * 256 * 8
    assert held.backward_peak < 2 * 3 * weight + weight / 2 + 8 * tile + 20 * 64 * 16 * 8


def test_products() -> None:
    """Those of the forward twice, but for the last one of a region, which the backward does not need."""
    counts = []
    for options in ({"tiles": 1}, {"tiles": 4}):
        stage = wide(activation_checkpoint="none", **options).stage
        graphs = [step.unnamed for step in (stage.forward, stage.backward_reduce or stage.backward) if step is not None]
        flops = [_flops(n) for gm in graphs for n in gm.graph.nodes if n.target in PRODUCTS]
        counts.append(sum(flops))
    wider, square = 2 * 64 * 16 * 256, 2 * 64 * 16 * 16
    assert counts[1] - counts[0] == 2 * (2 * wider + square)  # gate and up, and what is before them, of two layers


def _flops(node: Any) -> int:
    left, right = (x.meta["val"].shape for x in node.all_input_nodes[-2:])
    return 2 * left.numel() * right[-1] if len(left) == 2 else 0


def test_the_graph() -> None:
    model, batch = tiny("llama", layers=1)
    local = compile_model(model, batch, Mesh.of(tp=2), Options(), outputs=()).local
    (region,) = regions_of(local, compile_model(model, batch, Mesh.of(tp=2), Options(), outputs=()).plan)
    names = [str(n.target) for n in region.calls]
    assert names == [
        "aten.linear.default",
        "aten.silu.default",
        "aten.linear.default",
        "aten.mul.Tensor",
        "aten.linear.default",
    ]
    assert region.tokens == 16 and len(region.given) == len(region.made) == 1  # between the exchanges of tp
    before = format_graph(local)
    tile_tokens(local, region, 3)
    after = format_graph(local)
    assert after.count("= silu(") == 3 and "[6, 6, 4], 1)" in after and before.count("= silu(") == 1
    assert before.count("exchange(") == after.count("exchange(")
    assert sum("tile" in n.meta for n in local.graph.nodes) == 3 * 5


def test_exchanges_are_the_same() -> None:
    for mesh, options in ((Mesh.of(tp=2), {"sequence_parallel": True}), (Mesh.of(cp=2), {"zero": 3})):
        sent = []
        for count in (1, 3):
            model, batch = tiny("llama", layers=1)
            made = compile_model(model, batch, mesh, Options(tiles=count, **options), outputs=())
            sent.append(step_communication(made))
        assert sent[0] == sent[1]


def test_experts_run_in_tiles_where_every_rank_has_them() -> None:
    def targets(mesh: Mesh) -> set[str]:
        made = compile_cell(Cell("one-layer qwen3_moe", mesh, Options(tiles=3)))
        return {str(n.target) for n in made.local.graph.nodes if "tile" in n.meta}

    experts = {"autopar.moe_dispatch.default", "autopar.grouped_mm.default", "autopar.moe_combine.default"}
    assert targets(Mesh.of(dp=2)) >= experts and targets(Mesh.of(ep=2)).isdisjoint(experts)
    assert "aten.topk.default" not in targets(Mesh.of(dp=2))  # a choice is made once


def test_under_a_limit_they_come_where_they_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "ROWS", 4)
    everything = memory(wide(activation_checkpoint="none")).peak
    least = memory(wide(activation_checkpoint="full")).peak
    wide.cache_clear()
    fits, tight = wide(memory_limit=everything), wide(memory_limit=round(0.8 * least))
    assert (fits.plan.tiles, fits.plan.checkpoints) == (1, ())
    assert tight.plan.tiles == 16 and memory(tight).peak <= 0.8 * least
    assert "2 regions run in 16 tiles of tokens: " in str(tight.plan)
    plan = Plan.from_json(tight.plan.to_json())
    assert plan == tight.plan
    model, batch = tiny("llama", layers=2, hidden_size=16, intermediate_size=256)
    ids = torch.zeros(1, 64, dtype=torch.long)
    again = compile_model(model, {name: ids for name in batch}, Mesh.of(), plan=plan, outputs=())
    assert again.plan == plan and memory(again) == memory(tight)


def test_choices_are_compared_as_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was found by drafts, few graphs are finished; the least limit that is named does."""
    monkeypatch.setattr(tiles, "ROWS", 4)
    made: list[bool] = []
    make = StageBuilder.make

    def counted(self: StageBuilder, *given: Any) -> Pipeline:
        made.append(self.ctx.draft)
        return make(self, *given)

    monkeypatch.setattr(StageBuilder, "make", counted)
    with pytest.raises(ValueError, match="least that would do is ") as error:
        wide(memory_limit=1)
    least = int(str(error.value).partition("least that would do is ")[2].partition(" ")[0].replace(",", ""))
    made.clear()
    tight = wide(memory_limit=least)
    assert memory(tight).peak <= least and tight.plan.tiles == 16
    assert made.count(False) <= 4 <= made.count(True)


def test_sizes() -> None:
    assert tile_sizes(16, 3) == [6, 6, 4] and tile_sizes(16, 99) == [1] * 16 and tile_sizes(10, 4) == [3, 3, 3, 1]


class Mixed(nn.Module):
    """A product of sums over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).cumsum(1)).square().mean()


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="tiles: nothing can run in 2 tiles: it needs a product with a weight"):
        compile_model(Mixed(), {"x": torch.randn(2, 4, 8)}, Mesh.of(), Options(tiles=2))
    with pytest.raises(ValueError, match="tiles: 2 tiles need whole microbatches, found token slices"):
        compile_cell(Cell("llama", Mesh.of(pp=2), Options(tiles=2, microbatches=2, schedule="tera_pipe")))
    with pytest.raises(ValueError, match="tiles: expected a whole number of at least 0, found -1"):
        Options(tiles=-1)
    with pytest.raises(ValueError, match="tiles"):
        compile_cell(Cell("one-layer qwen3_moe", Mesh.of(tp=2), Options(tiles=2)))
