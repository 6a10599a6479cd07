"""Losses in chunks of tokens: the same losses and gradients, and the logits of one chunk at a time."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compile.model import compile_model
from autopar.cost.memory import memories, memory
from autopar.cost.step_traffic import step_communication
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes.chunk_losses import chunk_losses, heads
from autopar.plan import Plan
from autopar.report.graph_text import format_graph
from autopar.steps.graphs import Compiled
from tests.cells import Cell, called, check, compile_cell, simulated
from tests.subjects import tiny

CELLS = [
    Cell("llama", Mesh.of(dp=2, tp=2), Options(loss_chunks=5)),  # a vocabulary cut over tp; 64 rows in fives
    Cell("gemma2", Mesh.of(dp=2), Options(loss_chunks=4, zero=3)),  # a cap on the logits
    Cell("padded llama", Mesh.of(dp=2), Options(loss_chunks=5, micro_batches=2, checkpoint="full")),
    Cell("t5", Mesh.of(tp=2), Options(loss_chunks=3, sequence_parallel=True)),  # an encoder, and a scale
    Cell("multi-query tied llama", Mesh.of(tp=2), Options(loss_chunks=64)),
    Cell("bert", Mesh.of(dp=2), Options(loss_chunks=4)),  # a bias
    Cell("two losses", Mesh.of(dp=2), Options(loss_chunks=3)),
    Cell("llama", Mesh.of(cp=2), Options(loss_chunks=2)),
]
STAGES = Cell("llama", Mesh.of(pp=2), Options(loss_chunks=3, micro_batches=4, schedule="zb_h1"))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_one_process(cell: Cell) -> None:
    assert compile_cell(cell).plan.loss_chunks == cell.options.loss_chunks
    check(simulated(cell))


@pytest.mark.parametrize("cell", [STAGES], ids=str)
def test_stages_on_ranks(cell: Cell) -> None:
    check(called(cell))


@functools.cache
def wide() -> tuple[nn.Module, dict[str, Tensor]]:
    """A vocabulary that sets the peak."""
    return tiny("llama", vocab_size=2048)


def compiled(mesh: Mesh = Mesh.of(), **options: Any) -> Compiled:  # noqa: B008  (frozen)
    model, batch = wide()
    return compile_model(model, batch, mesh, Options(**options), outputs=())


def test_one_chunk_of_logits_exists_at_once() -> None:
    """[128, 2048] float32 logits, and their gradient: of 8 chunks an eighth of each."""
    logits = 128 * 2048 * 4
    whole, parts = (memory(compiled(loss_chunks=n, checkpoint="none")) for n in (1, 8))
    assert whole.saved - parts.saved == pytest.approx(logits, rel=0.01)
    assert whole.forward_peak - parts.forward_peak > 7 / 8 * logits
    weight = 2048 * 32 * 8  # its gradient, which whole logits leave behind before it is there
    assert whole.backward_peak - parts.backward_peak > 7 / 8 * 2 * logits - weight


def test_the_gradient_of_the_weight_is_there_once() -> None:
    """Of a vocabulary that is large against the tokens of a chunk the peak is where the embedding has its gradient as
    well, and not where the sum so far, that of the chunk and the new sum would be."""
    model, batch = tiny("llama", vocab_size=4096)
    held = memory(compile_model(model, batch, Mesh.of(), Options(loss_chunks=32, checkpoint="none"), outputs=()))
    weight, logits = 4096 * 32 * 8, 4 * 4096 * 8
    assert held.backward_peak < held.saved + 2 * weight + 1.5 * logits


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
def test_chunks_hold_no_more_on_stages(schedule: str) -> None:
    """W takes the gradients of all chunks' logits from B, as it would take those of whole logits."""
    options: dict[str, Any] = {"micro_batches": 4, "schedule": schedule, "checkpoint": "none"}
    whole, parts = (memories(compiled(Mesh.of(pp=2), loss_chunks=n, **options)) for n in (1, 8))
    assert all(part.peak <= all_of_it.peak for all_of_it, part in zip(whole, parts, strict=True))


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
    everything = memory(compiled(checkpoint="none")).peak
    fits, tight = compiled(memory_limit=everything), compiled(memory_limit=round(0.75 * everything))
    assert (fits.plan.loss_chunks, fits.plan.checkpoints) == (1, ())
    assert tight.plan.loss_chunks > 1 and memory(tight).peak <= 0.75 * everything
    plan = Plan.from_json(tight.plan.to_json())
    assert plan == tight.plan
    model, batch = wide()
    again = compile_model(model, batch, Mesh.of(), plan=plan, outputs=())
    assert again.plan == plan and memory(again) == memory(tight)


class Odd(nn.Module):
    """A head whose logits somebody else takes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16, dtype=torch.float64)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(x)
        return torch.nn.functional.cross_entropy(logits, target) + logits.square().mean()


def test_bad_input() -> None:
    batch = {"x": torch.randn(4, 8, dtype=torch.float64), "target": torch.randint(0, 16, (4,))}
    with pytest.raises(ValueError, match="loss_chunks: no loss can be computed in 2 chunks: it takes one of a product"):
        compile_model(Odd(), batch, Mesh.of(), Options(loss_chunks=2))
    with pytest.raises(ValueError, match="loss_chunks: expected a whole number of at least 0, found -1"):
        Options(loss_chunks=-1)
    assert compile_model(Odd(), batch, Mesh.of()).plan.loss_chunks == 1
