"""The comparison with one process fails when it must: for planted faults, in the simulator and on real ranks."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.ir.graph import output_node
from autopar.ir.mesh import Mesh
from autopar.ir.signature import ParameterSpec
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.steps.graphs import Compiled, StepGraph
from autopar.testing.reference import Expected, compare_step
from tests.conftest import DEAR
from tests.faulty.planted import calls, set_outputs, skip
from tests.support.cases import COMPILED, Cell, called, check, check_ran, compile_cell, on_ranks, ran, simulated
from tests.support.ranks import close_pools, run_ranks

CELL = Cell("mlp", Mesh.of(dp=2), Options(microbatches=2))
ops = torch.ops.autopar


# --- one comparison -----------------------------------------------------------------------------------------

WHOLE = torch.arange(6.0).view(2, 3)
SPECS = [ParameterSpec("w", (2, 3), torch.float32, aliases=("tied",)), ParameterSpec("b", (3,), torch.float32)]
ONE = Expected(1.0, {"w": WHOLE, "b": None}, {})


@pytest.mark.parametrize(
    ("loss", "found", "worst", "odd"),
    [
        (1.0, {"w": WHOLE}, 0.0, []),
        (1.0, {"w": WHOLE, "b": torch.zeros(3)}, 0.0, []),  # eager has none: zeros are right
        (1.0, {"w": WHOLE, "b": torch.ones(3)}, 1.0, []),
        (1.5, {"w": WHOLE}, 0.5, []),
        (math.nan, {"w": WHOLE}, math.inf, []),
        (1.0, {"w": WHOLE * math.nan}, math.inf, []),
        (1.0, {"w": WHOLE[:, :1]}, math.inf, []),  # subtraction would spread it
        (1.0, {"w": None}, math.inf, ["tied", "w"]),
        (1.0, {}, math.inf, ["w"]),
        (1.0, {"w": WHOLE, "new": WHOLE}, math.inf, ["new"]),
    ],
)
def test_compare(loss: float, found: dict[str, Any], worst: float, odd: list[str]) -> None:
    errors = compare_step(loss, found, ONE, SPECS, lambda spec, whole: whole)
    assert (errors.worst, errors.odd) == (worst, odd)


def test_what_a_rank_does_not_hold_may_be_missing() -> None:
    assert compare_step(1.0, {}, ONE, SPECS, lambda spec, whole: whole, held={"b"}).worst == 0.0


# --- faults in a compiled step ------------------------------------------------------------------------------


def drop_sum(step: StepGraph) -> None:
    """One gradient is not summed over the ranks."""
    skip(calls(step.graph, ops.all_reduce.default)[-1])


def multiply(step: StepGraph, factor: float) -> None:
    graph = step.graph

    def change(outs: list[Any]) -> list[Any]:
        with graph.graph.inserting_before(output_node(graph)):
            return [*outs[:-1], graph.graph.call_function(torch.ops.aten.mul.Tensor, (outs[-1], factor))]

    set_outputs(graph, change)


def scale(step: StepGraph) -> None:
    """One gradient is too large by a millionth."""
    multiply(step, 1 + 1e-6)


def lose(step: StepGraph) -> None:
    """One gradient is not returned."""
    set_outputs(step.graph, lambda outs: outs[:-1])
    step.outputs = step.outputs[:-1]  # (the list is shared with other graphs)


def nan(step: StepGraph) -> None:
    """One gradient is NaN."""
    multiply(step, math.nan)


@pytest.fixture
def plant() -> Iterator[Callable[[Callable[[StepGraph], None]], None]]:
    """Puts a fault into the last step graph of the compiled cell, for the simulator and for ranks to come."""

    def change(fault: Callable[[StepGraph], None]) -> None:
        made: Compiled = compile_cell(CELL)
        step = made.stage.backward_reduce
        assert step is not None
        fault(step)
        step.graph.recompile()
        COMPILED[CELL] = made, time.monotonic()

    yield change
    COMPILED.pop(CELL)
    close_pools()


@pytest.mark.parametrize("fault", [drop_sum, scale, lose, nan])
def test_faults_are_reported(fault: Callable[[StepGraph], None], plant: Callable[..., None]) -> None:
    check(simulated(CELL))
    plant(fault)
    for run in (simulated, called):
        with pytest.raises(AssertionError, match=r"rank \d.*(head|first|second|norm)\."):
            check(run(CELL))
    with pytest.raises(AssertionError, match=r"rank \d.*(head|first|second|norm)\."):
        check_ran(ran(CELL))


# --- who runs where -----------------------------------------------------------------------------------------


def test_groups_that_start_first_are_there() -> None:
    root = Path(__file__).parents[2]
    assert [name for name in DEAR if name not in TINY and not (root / name).is_file()] == []


def is_there(cell: Cell) -> bool:
    return cell in COMPILED


def test_ranks_are_forked_after_compiling() -> None:
    """What is compiled later than a pool was forked makes a new pool; what ranks have keeps it."""
    close_pools()
    assert run_ranks(2, os.getppid) == [os.getpid()] * 2
    before = run_ranks(2, os.getpid)
    COMPILED.pop(CELL, None)
    assert on_ranks(CELL, is_there) == [True, True]
    after = run_ranks(2, os.getpid)
    assert set(before).isdisjoint(after)
    assert on_ranks(CELL, is_there) == [True, True] and run_ranks(2, os.getpid) == after
