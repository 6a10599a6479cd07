"""A pipeline whose forward changes after its weights have been dealt to ranks: cuts move, weights do not. Losses and
weights of several steps equal one process, on real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import autopar
from autopar.planner.pipeline.pipeline_plan import _starts
from tests.support.compile_cache import compiled_once
from tests.support.ranks import run_ranks

WIDTH = 8


def batch(step: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {k: torch.randn(8, WIDTH, generator=g, dtype=torch.float64) for k in ("x", "y")}


class Paths(nn.Module):
    """Four blocks, taken in the order that ``path`` says; "^" is the first one's weight alone, "u" a spare block."""

    def __init__(self, path: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.path = path
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for step in self.path:
            if step == "^":
                x = linear(x, self.blocks[0].weight)
            else:
                x = torch.tanh((self.spare if step == "u" else self.blocks[int(step)])(x))
        return ((x - y) ** 2).mean()


def taken(paths: Sequence[str], **options: Any) -> str:
    """On a rank: a step on each path, the last one in evaluation, too. The refusal, or "" for torch's numbers."""
    alone = Paths(paths[0])
    mesh = autopar.init_mesh("cpu", 30.0, pp=2)
    parallel: Any = autopar.parallelize(Paths(paths[0]), mesh, example_batch=batch(), **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (alone, parallel)]
    for number, path in enumerate(paths):
        alone.path = parallel.path = path
        loss = alone(**batch(number))
        loss.backward()
        try:
            found = parallel.train_step(**batch(number))
        except ValueError as error:
            return str(error)
        assert abs(float(found - loss)) < 1e-10, f"step {number} on {path}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        assert abs(float(parallel.eval_step(**batch(9)) - alone(**batch(9)))) < 1e-10
    state = parallel.full_state_dict()
    assert all(torch.allclose(state[n], x, atol=1e-10, rtol=0) for n, x in alone.state_dict().items())
    return ""


def all_taken(cases: Sequence[Sequence[str]], options: dict[str, Any]) -> list[str]:
    with compiled_once():
        return [taken(paths, **options) for paths in cases]


FITS = [
    [
        "0123",
        "013",
        "u03",
    ],  # without the block that the second part began with; one that nobody used
    ["0123^", "0123", "0123", "123^"],  # a copy that a step does not use has its gradient all the same
]
REFUSED = [["0123", "3012"], ["0123", "0123^"], ["0123", "0123u"]]
OPTIONS = {"schedule": "1f1b", "microbatches": 2, "split_points": ("blocks.2",)}


def test_cuts_move_where_weights_allow() -> None:
    for found in run_ranks(2, all_taken, FITS, OPTIONS):
        assert found == [""] * len(FITS)
    for found in run_ranks(2, all_taken, REFUSED, OPTIONS):
        for text in found:
            assert text.startswith("pipeline: aten.linear.default (linear")
            assert "make such a change before parallelize" in text
        assert "computes with blocks.0.weight (rank 0), which no stage at this point holds" in found[1]


def test_both_ranks_hold_all_under_dual_pipe() -> None:
    cases = [["0123", "320^"]]
    for found in run_ranks(2, all_taken, cases, {"schedule": "dual_pipe", "microbatches": 4}):
        assert found == [""]


def test_a_part_without_an_operation_is_refused() -> None:
    for found in run_ranks(2, all_taken, [["0123", "23"]], OPTIONS):
        assert "so a stage has no operation; make such a change before parallelize" in found[0]


def test_starts_are_as_late_as_weights_allow() -> None:
    both = {0, 1}
    assert _starts([{0}, both, both, {1}], 2) == [0, 3]
    assert _starts([both, both], 2) == [0, 1] and _starts([both], 2) == []
    assert _starts([{1}, {0}], 2) == [] and _starts([{0}, {0}], 2) == []
    assert _starts([{0, 2}, {1}, {0, 2}, {3}], 4) == [0, 1, 2, 3]
