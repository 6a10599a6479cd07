"""What operators of ours hold while they run is known: of every model, under every policy, what a step is said to hold
is what a meter sees, within 3 %."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import autopar
from autopar.adapters.operators import kernel_of
from autopar.capture.trace.python_workspace import workspace_bytes
from autopar.compile.model import compile_model
from autopar.cost.memory import memory
from autopar.ir import live_values
from autopar.ir.mesh import Mesh
from autopar.ops import cross_entropy
from autopar.options import Options
from autopar.steps.graphs import Compiled
from tests.benchmarks.meter import Meter
from tests.planner.test_memory_limits import MODELS
from tests.support.ranks import run_ranks
from tests.support.subjects import tiny

POLICIES = ("none", "selective", "full", "auto")
FEW = [  # a cap on scores; experts; a bias that has a gradient; values narrower than keys
    ("gemma2", "selective"),
    ("qwen3_moe", "full"),
    ("t5", "selective"),
    ("deepseek_v3", "full"),
]


@pytest.mark.parametrize("name, policy", FEW)
def test_a_step_holds_what_is_said(name: str, policy: str) -> None:
    said, seen = run_ranks(1, held, name, policy, timeout=120.0)[0]
    assert 0.97 <= said / seen <= 1.03


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_steps_of_all_models_hold_what_is_said(name: str, policy: str) -> None:
    test_a_step_holds_what_is_said(name, policy)


def held(name: str, policy: str) -> tuple[int, int]:
    """(said, seen) bytes at the peak of a step on one rank, without an optimizer."""
    model, batch = tiny(name, layers=1)

    def compiled(**options: Any) -> Compiled:
        return compile_model(model, batch, Mesh.of(dp=1), Options(**options), outputs=())

    if policy == "auto":
        with pytest.raises(ValueError, match="least that would do") as error:
            compiled(memory_limit=1)
        least = re.search(r"least that would do is ([\d,]+) bytes", str(error.value))
        assert least is not None
        options = {
            "memory_limit": (int(least[1].replace(",", "")) + memory(compiled(activation_checkpoint="none")).peak) // 2
        }
    else:
        options = {"activation_checkpoint": policy}  # type: ignore[dict-item]
    parallel = autopar.parallelize(model, autopar.init_mesh("cpu", 30.0, dp=1), **options)  # type: ignore[arg-type]
    parallel.train_step(**batch)
    for p in parallel.parameters():
        p.grad = None
    with Meter([list(parallel.parameters()), list(parallel.buffers()), batch]) as meter:
        parallel.train_step(**batch)
    said = memory(parallel.compiled()[0])
    return said.peak - said.optimizer, meter.peak


LOGITS, LABELS, NUMBERS = ((601, 1000), torch.bfloat16), ((601,), torch.int64), ((601,), torch.float32)
OF_ROWS = {
    "cross_entropy": [LOGITS, LABELS, -100, 0.1],
    "cross_entropy_backward": [NUMBERS, LOGITS, LABELS, NUMBERS, -100, 0.1],
    "piece_max": [LOGITS, ((1000,), torch.bool)],
    "piece_sums": [LOGITS, LABELS, NUMBERS, 2000],
    "piece_backward": [NUMBERS, LOGITS, LABELS, NUMBERS, 0.1, 2000],
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_blocks_of_rows_are_counted_and_not_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three rows: 201 blocks, of which 3 or 6 run."""
    monkeypatch.setattr(cross_entropy, "BLOCK", 3000)
    monkeypatch.setattr(live_values, "FEW", 3)
    operator = getattr(torch.ops.autopar, name).default
    values = [torch.empty(x[0], dtype=x[1], device="meta") if isinstance(x, tuple) else x for x in OF_ROWS[name]]
    given = dict(zip((argument.name for argument in operator._schema.arguments), values))
    function = kernel_of(operator)
    assert function is not None
    assert live_values._of_many_rows(function, given, False) == workspace_bytes(function, given, False)
