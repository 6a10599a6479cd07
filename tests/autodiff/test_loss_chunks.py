"""Losses in chunks of tokens: the same losses and gradients, and the logits of one chunk at a time."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from autopar.api import parallelize
from autopar.compile import loss_chunks
from autopar.compile.model import compile_model
from autopar.cost.memory import memories, memory
from autopar.cost.traffic import step_communication
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.ops.traits import PRODUCTS
from autopar.options import Options
from autopar.passes.stage.chunk_losses import chunk_losses, heads
from autopar.plan import Plan
from autopar.report.graph_text import format_graph
from autopar.runtime.mesh.process_groups import init_mesh
from autopar.steps.graphs import Compiled
from tests.support.cases import Cell, called, check, compile_cell, simulated
from tests.support.ranks import run_ranks
from tests.support.subjects import tiny

CELLS = [
    Cell("one-layer llama", Mesh.of(dp=2, tp=2), Options(loss_chunks=5)),  # vocabulary sharded on tp; 64 rows in fives
    Cell("one-layer gemma2", Mesh.of(dp=2), Options(loss_chunks=4, zero=3)),  # a cap on the logits
    Cell("padded llama", Mesh.of(dp=2), Options(loss_chunks=5, microbatches=2, activation_checkpoint="full")),
    Cell("one-layer t5", Mesh.of(tp=2), Options(loss_chunks=3, sequence_parallel=True)),  # an encoder, and a scale
    Cell("one-layer bert", Mesh.of(dp=2), Options(loss_chunks=4)),  # a bias
    Cell("two losses", Mesh.of(dp=2), Options(loss_chunks=3)),
    Cell("one-layer llama", Mesh.of(cp=2), Options(loss_chunks=2)),
]
STAGES = {
    "backward": Cell("llama", Mesh.of(pp=2), Options(loss_chunks=3, microbatches=4, schedule="zb_h1")),
    "forward": Cell("one-layer gpt2", Mesh.of(pp=2), Options(loss_chunks=3, microbatches=4, schedule="1f1b")),  # tied
}


TIED = Cell("multi-query tied llama", Mesh.of(tp=2), Options(loss_chunks=8))


@pytest.mark.parametrize("cell", [*CELLS, pytest.param(TIED, marks=pytest.mark.full)], ids=str)
def test_equals_one_process(cell: Cell) -> None:
    plan = compile_cell(cell).plan
    assert (plan.loss_chunks, plan.loss_gradients) == (cell.options.loss_chunks, "forward")
    check(simulated(cell))


@pytest.mark.parametrize("maker", STAGES)
def test_stages_on_ranks(maker: str) -> None:
    assert compile_cell(STAGES[maker]).plan.loss_gradients == maker
    check(called(STAGES[maker]))


@functools.cache
def wide(layers: int = 1, classes: int = 2048) -> tuple[nn.Module, dict[str, Tensor]]:
    """A vocabulary that sets the peak."""
    return tiny("llama", layers, vocab_size=classes)


@functools.cache
def compiled(mesh: Mesh = Mesh.of(), maker: str = "", classes: int = 2048, **options: Any) -> Compiled:  # noqa: B008  (frozen)
    """``maker``: of the gradients of chunks, where it is not the plan's choice."""
    model, batch = wide(mesh.size("pp"), classes)
    if not maker:
        return compile_model(model, batch, mesh, Options(**options), outputs=())
    made = compiled(mesh, classes=classes, **options)
    if maker == made.plan.loss_gradients:
        return made
    plan = dataclasses.replace(made.plan, loss_gradients=maker, checkpoints=())
    return compile_model(model, batch, mesh, plan=plan, outputs=())


@pytest.mark.parametrize("maker", ["forward", "backward"])
def test_one_chunk_of_logits_exists_at_once(maker: str) -> None:
    """[128, 2048] float32 logits, and their gradient: of 8 chunks an eighth of each."""
    logits, weight = 128 * 2048 * 4, 2048 * 32 * 8
    whole, parts = (memory(compiled(maker=maker, loss_chunks=n, activation_checkpoint="none")) for n in (1, 8))
    kept = weight if maker == "forward" else 0  # the weight's gradient
    assert whole.saved - parts.saved == pytest.approx(logits - kept, rel=0.01)
    assert whole.forward_peak - parts.forward_peak > 7 / 8 * logits - kept - logits / 4
    # whole logits are gone before it is there
    assert whole.backward_peak - parts.backward_peak > 7 / 8 * 2 * logits - weight - kept


@pytest.mark.parametrize("maker", ["forward", "backward"])
def test_the_gradient_of_the_weight_is_there_once(maker: str) -> None:
    """Of a vocabulary that is large against the tokens of a chunk the peak is where the embedding has its gradient as
    well, and not where the sum so far, that of the chunk and the new sum would be."""
    held = memory(compiled(maker=maker, classes=4096, loss_chunks=32, activation_checkpoint="none"))
    weight, logits = 4096 * 32 * 8, 4 * 4096 * 8
    kept = weight if maker == "forward" else 0
    assert max(held.forward_peak, held.backward_peak) < held.saved - kept + 2 * weight + 2.5 * logits


def test_no_product_is_made_twice() -> None:
    """F and B together have the head's three products, of each chunk; or its first once more."""
    counts = {}
    for maker in ("forward", "backward"):
        stage = compiled(maker=maker, loss_chunks=4, activation_checkpoint="none").stage
        graphs = [step.unnamed for step in (stage.forward, stage.backward_reduce or stage.backward) if step is not None]
        wide = [n for gm in graphs for n in gm.graph.nodes if n.target in PRODUCTS and _has_classes(n, 2048)]
        counts[maker] = len(wide)
    assert counts == {"forward": 12, "backward": 16}


def _has_classes(node: Node, classes: int) -> bool:
    return any(classes in x.meta["val"].shape for x in (node, *node.all_input_nodes))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", pytest.param("interleaved", marks=pytest.mark.full)])
def test_chunks_hold_no_more_on_stages(schedule: str) -> None:
    """W takes the gradients of all chunks' logits from B, as it would take those of whole logits; or F leaves that of
    the weight, which B scales."""
    options: dict[str, Any] = {"microbatches": 4, "schedule": schedule, "activation_checkpoint": "none"}
    whole, parts = (memories(compiled(Mesh.of(pp=2), loss_chunks=n, **options)) for n in (1, 8))
    assert all(part.peak <= all_of_it.peak + 8 for all_of_it, part in zip(whole, parts, strict=True))


def test_the_graph() -> None:
    model, batch = wide()
    local = compile_model(model, batch, Mesh.of(tp=2), Options(), outputs=()).local
    before = format_graph(local)
    (head,) = heads(local)
    assert (head.rows, head.logit_bytes) == (128, 1024 * 4)
    assert [str(n.target) for n in head.between] == ["aten._to_copy.default"]
    chunk_losses(local, head, 50)
    after = format_graph(local)
    assert before.count("= cross_entropy_of_piece(") == 1 and "f32[128,1024]" in before
    assert after.count("= cross_entropy_of_piece(") == 3 and "f32[128,1024]" not in after
    assert "[50, 50, 28]" in after and after.count("f32[28,1024] tp:S(1)") == 1


def test_what_a_cut_vocabulary_exchanges() -> None:
    """As many bytes; a maximum and sums for each chunk instead of one."""
    sent = [step_communication(compiled(Mesh.of(tp=2), loss_chunks=n), 0)["tp", "all_reduce"] for n in (1, 4)]
    assert sent[0].bytes == sent[1].bytes and sent[1].calls - sent[0].calls == 2 * 3


def test_under_a_limit_they_come_where_they_help() -> None:
    everything = memory(compiled(activation_checkpoint="none")).peak
    fits, tight = compiled(memory_limit=everything), compiled(memory_limit=round(0.75 * everything))
    assert (fits.plan.loss_chunks, fits.plan.checkpoints) == (1, ())
    assert tight.plan.loss_chunks > 1 and memory(tight).peak <= 0.75 * everything
    plan = Plan.from_json(tight.plan.to_json())
    assert plan == tight.plan
    model, batch = wide()
    again = compile_model(model, batch, Mesh.of(), plan=plan, outputs=())
    assert again.plan == plan and memory(again) == memory(tight)


@pytest.mark.parametrize(
    ("sizes", "options", "chunks"),
    [
        ({"dp": 2}, {}, 4),  # 64 rows on a rank
        ({}, {"microbatches": 2, "activation_checkpoint": "none"}, 4),
        ({"tp": 4}, {}, 1),  # a rank has a quarter of the logits
        ({}, {"loss_chunks": 1}, 1),
        ({"pp": 2}, {"microbatches": 4, "schedule": "zb_h1"}, 1),  # its backward would compute logits again
    ],
    ids=str,
)
def test_large_logits_are_chunked_where_that_is_free(
    sizes: dict[str, int], options: dict[str, Any], chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = wide(2)
    monkeypatch.setattr(loss_chunks, "LARGE", 64 * 2048 * 4)
    monkeypatch.setattr(loss_chunks, "ROWS", 16)
    made = compile_model(model, batch, Mesh.of(**sizes), Options(**options), outputs=())
    assert (made.plan.loss_chunks, made.plan.loss_gradients) == (chunks, "forward" if chunks > 1 else "")


@pytest.mark.parametrize(("habit", "chunks"), [("mean", 2), ("clipped", 1), ("square", 1)])
def test_logits_are_not_computed_twice_unasked(habit: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_chunks, "LARGE", 8 * 16 * 8)
    monkeypatch.setattr(loss_chunks, "ROWS", 4)
    seen: list[list[str]] = [[], []]
    for names, options in zip(seen, (Options(), Options(loss_chunks=chunks))):
        watch = [lambda name, gm, ctx, names=names: names.append(name)]
        made = compile_model(Habits(habit), habit_batch(), Mesh.of(), options, outputs=(), observers=watch)
        assert made.plan.loss_chunks == chunks
    assert seen[0] == seen[1], "what was tried is not observed"


class Habits(nn.Module):
    """A head, and what somebody does with the losses of its rows, before anybody asks for a gradient."""

    def __init__(self, habit: str, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.habit, self.body, self.head = habit, nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 16, dtype=dtype)

    def forward(self, x: Tensor, target: Tensor, weight: Tensor) -> Any:
        rows = torch.nn.functional.cross_entropy(self.head(self.body(x)), target, reduction="none")
        if self.habit == "weighted":
            return (rows * weight).sum() / weight.sum()
        if self.habit == "clipped":
            return rows.clamp(max=2.9).mean()
        if self.habit == "square":
            return rows.mean() ** 2
        if self.habit == "two":
            return {"first_loss": rows.mean(), "other_loss": (rows * weight).mean()}
        if self.habit == "beside":
            return rows.mean() + 0.1 * self.body(x).square().mean()
        return rows.mean()


def habit_batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(8, 8, dtype=dtype),
        "target": torch.randint(0, 16, (8,)),
        "weight": torch.rand(8).to(dtype),
    }


@pytest.mark.parametrize(
    ("habit", "maker"),
    [
        ("mean", "forward"),
        ("weighted", "forward"),
        ("beside", "forward"),
        ("clipped", "backward"),  # which rows count depends on their losses
        ("square", "backward"),
        ("two", "backward"),
    ],
)
def test_whose_gradient_is_known_before_the_loss(habit: str, maker: str) -> None:
    """Such losses are exact if F or B computes their gradients, for any gradient of the loss."""
    assert run_ranks(1, scaled_losses, habit) == [maker]


def scaled_losses(habit: str) -> str:
    """A loss that is scaled, and taken away, before anybody asks for its gradient; twice. Who makes it."""
    torch.manual_seed(1)
    model, batch = Habits(habit), habit_batch()
    parallel = parallelize(copy.deepcopy(model), init_mesh("cpu", 60.0, dp=1), loss_chunks=3, example_batch=batch)
    for scale in (3.0, -0.5):
        for module in (model, parallel):
            found = module(**batch)
            loss = found["first_loss"] * scale + found["other_loss"] if isinstance(found, dict) else found * scale
            loss.backward()
    for (name, mine), right in zip(parallel.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), right.grad, rtol=1e-12, atol=1e-14, msg=name)
    return parallel.compiled()[0].plan.loss_gradients


def test_gradients_in_half_precision_wait_for_the_scale() -> None:
    batch = habit_batch(torch.float16)
    made = compile_model(Habits("mean", torch.float16), batch, Mesh.of(), Options(loss_chunks=3))
    assert made.plan.loss_gradients == "backward"


class Odd(nn.Module):
    """A head whose logits somebody else takes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16, dtype=torch.float64)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(x)
        return torch.nn.functional.cross_entropy(logits, target) + logits.square().mean()


class OddClasses(nn.Module):
    """11 classes, of 8 values that may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.embed(x)).flatten(0, 1), x.flatten())


@pytest.mark.parametrize("scattered", [False, True])
def test_a_head_whose_classes_do_not_divide(scattered: bool) -> None:
    """It is padded, with chunks and without."""
    batch, options = {"x": torch.zeros(2, 4, dtype=torch.long)}, {"sequence_parallel": scattered}
    for chunks in (1, 2):
        made = compile_model(OddClasses(), batch, Mesh.of(tp=2), Options(loss_chunks=chunks, **options), outputs=())
        assert made.plan.stored("head.weight") == {"tp": Shard(0, units=11)}


class Few(nn.Module):
    """Four parts of it are four operations."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(256, 8), nn.Linear(8, 8), nn.Linear(8, 256)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(self.table(x))).double().flatten(0, 1), x.flatten())


def test_a_stage_begins_between_logits_and_loss() -> None:
    batch, mesh, stages = {"x": torch.zeros(4, 32, dtype=torch.long)}, Mesh.of(pp=2), {"schedule": "interleaved"}
    with pytest.raises(
        ValueError, match="loss_chunks: needs logits and their loss in one stage, found one that begins"
    ):
        compile_model(Few(), batch, mesh, Options(loss_chunks=4, **stages))
    whole = memories(compile_model(Few(), batch, mesh, Options(microbatches=4, **stages)))
    limit = max(held.peak for held in whole) - 1
    with pytest.raises(
        ValueError, match="activation_checkpoint: no choice of what to recompute fits"
    ):  # chunks are no choice
        compile_model(Few(), batch, mesh, Options(microbatches=4, memory_limit=limit, **stages))


def test_bad_input() -> None:
    batch = {"x": torch.randn(4, 8, dtype=torch.float64), "target": torch.randint(0, 16, (4,))}
    with pytest.raises(ValueError, match="loss_chunks: no loss can be computed in 2 chunks: it needs a loss"):
        compile_model(Odd(), batch, Mesh.of(), Options(loss_chunks=2))
    with pytest.raises(ValueError, match="loss_chunks: expected a whole number of at least 0, found -1"):
        Options(loss_chunks=-1)
    assert compile_model(Odd(), batch, Mesh.of()).plan.loss_chunks == 1
