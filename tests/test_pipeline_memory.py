"""What a pipeline keeps and sends on real ranks is what its schedule says."""

from __future__ import annotations

import dataclasses
import math

import pytest

from autopar.ir.mesh import Mesh
from autopar.ir.storages import storage_bytes
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.planner.step_order import make_order
from autopar.schedule.order import Hop, Order
from autopar.schedule.request import SCHEDULES
from autopar.schedule.simulate import simulate
from autopar.steps.graphs import Pipeline, Stage, StepGraph
from tests.pipeline_cases import Case, Found, compiled, prepare, run_case

MODEL, ROWS, TOKENS = "llama", 8, 16
MESHES = {2: Mesh.of(pp=2), 4: Mesh.of(pp=4)}
WHOLE = [name for name, entry in SCHEDULES.items() if not entry.sliced]


def case(ranks: int, chunks: int) -> Case:
    base = "1f1b" if chunks == 1 else "interleaved"
    return Case(MODEL, MESHES[ranks], Options(micro_batches=8, schedule=base, chunks=chunks), ROWS, TOKENS)


def names(chunks: int) -> list[str]:
    return [name for name in WHOLE if SCHEDULES[name].chunks == chunks]


@pytest.fixture(scope="module", params=[(2, 1), (2, 2), (4, 1), (4, 2)], ids="ranks {0[0]} chunks {0[1]}".format)
def ran(request: pytest.FixtureRequest) -> tuple[Case, dict[str, list[Found]]]:
    """A case, and what its ranks found under every schedule that runs so many parts."""
    prepare([case(*request.param)])
    return case(*request.param), run_case(case(*request.param), names(request.param[1]))


def pipeline_of(this: Case) -> Pipeline:
    found = compiled(this).pipeline
    assert found is not None
    return found


def order_of(this: Case, schedule: str) -> Order:
    made = compiled(this)
    assert made.plan.pipeline is not None
    plan = dataclasses.replace(made.plan, pipeline=dataclasses.replace(made.plan.pipeline, schedule=schedule))
    return make_order(plan, made.pipeline.parts, made.pipeline.hops)


def test_micro_batches_in_flight_are_those_of_the_schedule(ran: tuple[Case, dict[str, list[Found]]]) -> None:
    this, results = ran
    for name, ranks in results.items():
        assert tuple(found.live for found in ranks) == simulate(order_of(this, name)).live, name


def test_bytes_over_every_boundary_follow_the_formula(ran: tuple[Case, dict[str, list[Found]]]) -> None:
    this, results = ran
    pipeline = pipeline_of(this)
    for name, ranks in results.items():
        order = order_of(this, name)
        expected = [0] * len(order.ranks)
        for chain in (order.chains[i] for i in order.chain_of):
            for hop in pipeline.hops:
                source, target = order.rank_of[chain[hop.source]], order.rank_of[chain[hop.target]]
                if source != target:
                    expected[source] += size(hop)
                    expected[target] += size(hop)  # the gradient, on its way back
        assert [found.traffic["pp", "send"].bytes for found in ranks] == expected, name


def size(hop: Hop) -> int:
    assert hop.gradient, f"{hop.value} has no gradient, which the formula counts"
    return sum(math.prod(shape) for shape in hop.shapes) * hop.dtype.itemsize


def test_between_layers_only_the_hidden_states_pass() -> None:
    """One value per boundary: rows of a micro-batch x tokens x hidden size, in float64."""
    for this in (case(2, 1), case(2, 2), case(4, 1)):
        hops = pipeline_of(this).hops
        assert [(h.source, h.target) for h in hops] == [(k, k + 1) for k in range(len(pipeline_of(this).parts) - 1)]
        assert {size(h) for h in hops} == {ROWS // 8 * TOKENS * TINY[MODEL].sizes["hidden_size"] * 8}


@pytest.mark.parametrize("ran", [(2, 1), (4, 1)], indirect=True)
def test_bytes_kept_follow_the_micro_batches_in_flight(ran: tuple[Case, dict[str, list[Found]]]) -> None:
    """Of m micro-batches GPipe keeps all, 1F1B p - i on rank i, ZB-H1 no more than p, some of which wait for W."""
    this, results = ran
    parts = pipeline_of(this).parts
    p, m = this.mesh.size("pp"), this.options.micro_batches
    kept = {name: [found.saved for found in of_ranks] for name, of_ranks in results.items()}
    print(f"{p} ranks, bytes kept: {kept}")
    assert all(kept["gpipe"][1:])
    for i, whole in enumerate(kept["gpipe"]):
        assert kept["1f1b"][i] * m == (p - i) * whole, i
        assert kept["1f1b"][i] <= kept["zb_h1"][i] <= p * max(whole / m, left_for_w(parts[i])), i
    assert max(kept["1f1b"]) < max(kept["gpipe"]) and max(kept["zb_h1"]) < max(kept["zb_h2"])


@pytest.mark.parametrize("ran", [(2, 1)], indirect=True)
def test_b_leaves_for_w_about_what_f_kept(ran: tuple[Case, dict[str, list[Found]]]) -> None:
    """Of every matmul, W takes the input from F and the output's gradient from B; what only B needed is freed."""
    for k, part in enumerate(pipeline_of(ran[0]).parts):
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
