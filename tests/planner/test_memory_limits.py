"""A memory limit on real ranks: what they hold stays below it, they decide alike, and gradients keep their bits.

The bits are those of the same model on the same mesh that recomputes nothing, dropout included; under every schedule
that splits the backward, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compile.model import compile_model, plan_model
from autopar.cost.memory import memories
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.steps.graphs import Compiled
from tests.benchmarks.meter import Meter
from tests.cost.test_measured_memory import holding
from tests.support.ranks import run_ranks
from tests.support.subjects import subject, tiny

WIDE: dict[str, dict[str, Any]] = {  # layers that set the peak, not the head
    "gpt2": {"n_embd": 64},
    "llama": {"hidden_size": 64, "intermediate_size": 160},
}
LIMITED = {
    "zero 3": ("gpt2", {"dp": 2}, {"zero": 3}),
    "tensor parallel": ("gpt2", {"tp": 2}, {}),
    "sequence parallel": ("llama", {"tp": 2}, {"sequence_parallel": True}),
    "1f1b": ("gpt2", {"pp": 2}, {"microbatches": 4, "schedule": "1f1b"}),
    "zb_h1": ("gpt2", {"pp": 2}, {"microbatches": 4, "schedule": "zb_h1"}),
    "interleaved": ("gpt2", {"pp": 2}, {"microbatches": 4, "schedule": "interleaved"}),
}
RARE = ("tensor parallel", "sequence parallel", "1f1b", "interleaved")  # run with -m full only


def wide(name: str, stages: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """As many layers as stages."""
    return tiny(name, stages, dropout=0.1, **WIDE[name])


def peak(step: Compiled) -> int:
    return max(found.peak for found in memories(step))


SPLIT = ("zb_h1", "zb_h2", "zb_v", "zb_auto", "dual_pipe", "dual_pipe_v", "interleaved")
MODELS = (
    *("llama", "gpt2", "t5", "bert", "mixtral", "qwen3_moe", "whisper", "vit", "falcon", "gemma2", "deepseek_v3"),
    *("bart", "opt"),
)


@dataclass
class Seen:
    """Of one rank. held: most bytes of a step, and what AdamW would hold. differing: gradients with other bits."""

    plan: str
    differing: list[str]
    limit: int
    held: int
    predicted: int


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [key for key, x in found.items() if not torch.equal(x, expected[key])]


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.full) if k in RARE else k for k in LIMITED])
def test_ranks_keep_a_limit(kind: str) -> None:
    """Halfway between the peaks of all and nothing that policies keep; these have the bits, too."""
    ranks = run_ranks(2, _limited, *LIMITED[kind], timeout=120.0)
    assert [rank.differing for rank in ranks] == [[], []]
    assert len({rank.plan for rank in ranks}) == 1
    for rank in ranks:
        assert rank.held <= rank.limit and 0.97 * rank.predicted < rank.held


def _gradients(parallel: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    parallel.train_step(**batch)  # type: ignore[operator]
    return parallel.full_gradients()  # type: ignore[operator, no-any-return]


def _own_part(mesh: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    index, count = autopar.dp_rank_and_size(mesh)
    return {key: x.chunk(count)[index].clone() for key, x in batch.items()}


def _limited(name: str, axes: dict[str, int], options: dict[str, Any]) -> Seen:
    mesh = autopar.init_mesh("cpu", 30.0, **axes)
    stages = axes.get("pp", 1)
    batch = _own_part(mesh, wide(name, stages)[1])

    def stepped(**kept: Any) -> tuple[autopar.ParallelModule, dict[str, Tensor]]:
        parallel = autopar.parallelize(wide(name, stages)[0], mesh, **options, **kept)
        return parallel, _gradients(parallel, batch)

    none, expected = stepped(activation_checkpoint="none")
    full, again = stepped(activation_checkpoint="full")
    most, least = (peak(step.compiled()[0]) for step in (none, full))
    assert least < 0.95 * most
    limit = (most + least) // 2
    parallel, found = stepped(memory_limit=limit)
    wrong = differing(again, expected) + differing(found, expected)
    for p in parallel.parameters():
        p.grad = None
    local = [p.to_local() if hasattr(p, "to_local") else p for p in parallel.parameters()]
    with holding(), Meter([local, list(parallel.buffers()), batch]) as meter:
        parallel.train_step(**batch)
    plan = parallel.plan
    said = memories(parallel.compiled()[0])[mesh.get_local_rank("pp") if "pp" in axes else 0]
    assert plan.checkpoints and sum(layer.seconds for layer in plan.checkpoints) > 0
    return Seen(plan.to_json(), wrong, limit, meter.peak + said.optimizer, said.peak)


def test_the_least_that_is_named_does_wherever_a_limit_lets_stages_be_cut() -> None:
    """Under this least an estimate cuts elsewhere, where nothing fits."""
    s, mesh = subject("one-layer llama"), Mesh.of(pp=2)

    def limited(limit: int) -> Options:
        return Options(schedule="dual_pipe_v", microbatches=4, memory_limit=limit)

    def least_under(limit: int) -> int:
        with pytest.raises(ValueError, match="least that would do is ") as error:
            compile_model(s.model, s.batch, mesh, limited(limit))
        return int(str(error.value).partition("least that would do is ")[2].partition(" ")[0].replace(",", ""))

    least = least_under(int(0.995 * (named := least_under(1))))
    made = compile_model(s.model, s.batch, mesh, limited(least))
    assert least == named and max(held.peak for held in memories(made)) <= least
    planned, _ = plan_model(s.model, s.batch, mesh, limited(least))
    assert planned.pipeline is not None and made.plan.pipeline is not None
    assert planned.pipeline.split_points == made.plan.pipeline.split_points


@pytest.mark.full
@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("name", MODELS)
def test_stages_keep_the_bits(schedule: str, name: str) -> None:
    """Also under the least limit."""
    options: dict[str, Any] = {"microbatches": 4, "schedule": schedule}
    with pytest.raises(ValueError, match="least that would do") as error:
        compile_model(*tiny(name, dropout=0.1), Mesh.of(pp=2), Options(memory_limit=1, **options), outputs=())
    least = re.search(r"least that would do is ([\d,]+) bytes", str(error.value))
    assert least is not None
    assert run_ranks(2, _stages, name, options, int(least[1].replace(",", "")), timeout=240.0) == [[], []]


def _stages(name: str, options: dict[str, Any], limit: int) -> list[str]:
    mesh = autopar.init_mesh("cpu", 30.0, pp=2)
    batch = tiny(name, dropout=0.1)[1]

    def stepped(**way: Any) -> tuple[dict[str, Tensor], bool]:
        """Gradients, and whether anything was recomputed."""
        model = tiny(name, dropout=0.1)[0]
        parallel = autopar.parallelize(model, mesh, example_batch=batch, **options, **way)  # for which stages are cut
        return _gradients(parallel, batch), bool(parallel.plan.checkpoints)

    expected, again = stepped(activation_checkpoint="none")
    assert not again
    wrong = []
    for way in ({"activation_checkpoint": "full"}, {"activation_checkpoint": "selective"}, {"memory_limit": limit}):
        found, again = stepped(**way)  # type: ignore[arg-type]
        assert again or "memory_limit" in way, "a limit may be kept by other orders, or the head may set the peak"
        wrong += [f"{way}: {key}" for key in differing(found, expected)]
    return wrong
