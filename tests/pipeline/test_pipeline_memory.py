"""What a pipeline keeps and sends on real ranks is what its schedule says."""

from __future__ import annotations

import functools
import math

import pytest

from autopar.ir.storages import storage_bytes
from autopar.models.tiny import TINY
from autopar.schedule.order import Order, P2PEdge
from autopar.schedule.request import SCHEDULES
from autopar.schedule.simulate import simulate
from autopar.steps.graphs import Stage, StepGraph
from tests.pipeline.test_pipeline_models import WHOLE, whole_cell
from tests.support.cases import Cell, Found, compiled, ran, with_schedule
from tests.support.subjects import ROWS, TOKENS

MODEL = "llama"


def cell_of(ranks: int, chunks: int) -> Cell:
    return whole_cell(MODEL, f"pp={ranks}", chunks)


@functools.cache
def results(cell: Cell) -> dict[str, list[Found]]:
    """What the ranks of a cell found under every schedule that runs so many parts."""
    names = [name for name in WHOLE if SCHEDULES[name].virtual_stages == cell.options.virtual_stages]
    return {name: found for (name, _), found in ran(cell, names).items()}


FOUR = [pytest.param(cell_of(4, n), marks=pytest.mark.full, id=str(cell_of(4, n))) for n in (1, 2)]
of_all = pytest.mark.parametrize("cell", [cell_of(2, 1), cell_of(2, 2), *FOUR], ids=str)
of_single = pytest.mark.parametrize("cell", [cell_of(2, 1), FOUR[0]], ids=str)


def order_of(cell: Cell, schedule: str) -> Order:
    return with_schedule(compiled(cell), schedule).pipeline.order


@of_all
def test_microbatches_in_flight_are_those_of_the_schedule(cell: Cell) -> None:
    for name, ranks in results(cell).items():
        assert tuple(found.live for found in ranks) == simulate(order_of(cell, name)).live, name


@of_all
def test_bytes_over_every_boundary_follow_the_formula(cell: Cell) -> None:
    pipeline = compiled(cell).pipeline
    for name, ranks in results(cell).items():
        order = order_of(cell, name)
        expected = [0] * len(order.ranks)
        for chain in (order.chains[i] for i in order.chain_of):
            for edge in pipeline.edges:
                source, target = order.rank_of[chain[edge.source]], order.rank_of[chain[edge.target]]
                if source != target:
                    expected[source] += size(edge)
                    expected[target] += size(edge)  # the gradient, on its way back
        assert [found.traffic["pp", "send"].bytes for found in ranks] == expected, name


def size(edge: P2PEdge) -> int:
    assert edge.gradient, f"{edge.value} has no gradient, which the formula counts"
    return sum(math.prod(shape) for shape in edge.shapes) * edge.dtype.itemsize


@pytest.mark.parametrize("cell", [cell_of(2, 1), cell_of(2, 2), FOUR[0]], ids=str)
def test_between_layers_only_the_hidden_states_pass(cell: Cell) -> None:
    """One value per boundary: rows of a microbatch x tokens x hidden size, in float64."""
    pipeline, rows = compiled(cell).pipeline, ROWS // cell.options.microbatches
    assert [(h.source, h.target) for h in pipeline.edges] == [(k, k + 1) for k in range(len(pipeline.parts) - 1)]
    assert {size(h) for h in pipeline.edges} == {rows * TOKENS * TINY[MODEL].sizes["hidden_size"] * 8}


@of_single
def test_bytes_kept_follow_the_microbatches_in_flight(cell: Cell) -> None:
    """Of m microbatches GPipe keeps all, 1F1B p - i on rank i, ZB-H1 no more than p, some of which wait for W."""
    parts = compiled(cell).pipeline.parts
    p, m = cell.mesh.size("pp"), cell.options.microbatches
    kept = {name: [found.saved for found in of_ranks] for name, of_ranks in results(cell).items()}
    print(f"{p} ranks, bytes kept: {kept}")
    assert all(kept["gpipe"][1:])
    for i, whole in enumerate(kept["gpipe"]):
        assert kept["1f1b"][i] * m == (p - i) * whole, i
        assert kept["1f1b"][i] <= kept["zb_h1"][i] <= p * max(whole / m, left_for_w(parts[i])), i
    assert max(kept["1f1b"]) < max(kept["gpipe"]) and max(kept["zb_h1"]) < max(kept["zb_h2"])


@pytest.mark.parametrize("cell", [cell_of(2, 1)], ids=str)
def test_b_leaves_for_w_about_what_f_kept(cell: Cell) -> None:
    """Of every matmul, W takes the input from F and the output's gradient from B; what only B needed is freed."""
    for k, part in enumerate(compiled(cell).pipeline.parts):
        kept, left = bytes_named(part.forward, "saved:"), left_for_w(part)
        print(f"part {k}: F keeps {kept} bytes, W takes {left}, {left / kept:.2f} of it")
        assert 0.5 < left / kept < 1.3, k


def left_for_w(part: Stage) -> int:
    """Bytes that wait for W when B is done."""
    if part.backward_input is None or part.backward_weight is None:  # an embedding alone has no B
        return 0
    taken = part.backward_weight.inputs
    return bytes_named(part.forward, "saved:", taken) + bytes_named(part.backward_input, "stash:", taken)


def bytes_named(step: StepGraph, prefix: str, wanted: list[str] | None = None) -> int:
    """Bytes behind the results of that name, each storage once."""
    found = [i for i, n in enumerate(step.outputs) if n and n.startswith(prefix) and (wanted is None or n in wanted)]
    return storage_bytes(step.graph, found)
