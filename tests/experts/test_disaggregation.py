"""Attention and experts on GPUs of their own: the formulas against a simulation, the search against known results and
against every deployment of a small grid."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from autopar.chips import Chip
from autopar.cost.ping_pong import LayerTimes, simulated, step_seconds
from autopar.cost.roles import ExpertLayers, layers_of_sizes
from autopar.planner.experts.disaggregation import RoleChip, best_apart, best_together

A100 = RoleChip("A100", Chip(312e12, 19.5e12, 19.5e12, 2039e9, 25e9, inside=300e9))
LIMIT = 0.15
SIZES = {
    "mixtral": dict(
        layers=56, hidden=6144, intermediate=16384, num_experts=8,
        top_k=2, query_group=6, vocabulary=32768
    ),
    "dbrx": dict(
        layers=40, hidden=6144, intermediate=10752, num_experts=16,
        top_k=4, query_group=6, vocabulary=100352
    ),
    "scaled": dict(
        layers=48, hidden=8192, intermediate=8192, num_experts=32,
        top_k=4, query_group=8, vocabulary=32768
    ),
}  # fmt: skip


def model(name: str, keys: int = 650) -> ExpertLayers:
    return layers_of_sizes(**SIZES[name], keys=keys)


def test_a_step_takes_as_long_as_its_simulation() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        times = LayerTimes(*(draw.choice((draw.random(), 0.0, 1.0)) for _ in range(3)))
        layers, m = draw.randint(1, 60), draw.randint(1, 6)
        last = simulated(times, layers, m)[-1].end + times.exchange
        assert step_seconds(times, layers, m) == pytest.approx(last, rel=1e-12, abs=1e-15), (times, layers, m)


def test_nothing_runs_before_it_can() -> None:
    times = LayerTimes(1.0, 1.5, 0.25)
    found = {(i.role, i.layer, i.microbatch): i for i in simulated(times, 4, 3)}
    assert len(found) == 4 * 3 * 2
    for (role, layer, m), x in found.items():
        before = ("attention", layer, m) if role == "experts" else ("experts", layer - 1, m)
        assert before not in found or x.start >= found[before].end + times.exchange
    for role in ("attention", "experts"):
        ends = sorted((x.start, x.end) for x in found.values() if x.role == role)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))


def test_the_best_deployment_of_mixtral() -> None:
    began = time.process_time()
    best = best_apart(model("mixtral"), (A100, A100), LIMIT)
    assert time.process_time() - began < 2
    assert (best.microbatches, best.tp, best.nodes, best.tokens) == (3, (2, 1), 2, 333)
    assert best.seconds == pytest.approx(0.0553, rel=0.01) and best.per_gpu == pytest.approx(3013, rel=0.01)
    assert best.gpus == (4, 8) and best.rows == 2 * 333 * 2 / 8
    for m, value in {1: 1158, 2: 2288, 4: 2925}.items():
        found = best_apart(model("mixtral"), (A100, A100), LIMIT, microbatches=[m])
        assert found.microbatches == m and found.per_gpu == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize(
    ("name", "exposed", "overlapped"), [("mixtral", 1.26, 1.00), ("dbrx", 1.41, 0.97), ("scaled", 1.57, 0.98)]
)
def test_against_experts_beside_attention(name: str, exposed: float, overlapped: float) -> None:
    layers = model(name)
    apart = best_apart(layers, (A100, A100), LIMIT)
    for hidden, ratio in ((False, exposed), (True, overlapped)):
        together = best_together(layers, A100, LIMIT, hidden)
        assert together.seconds <= LIMIT and apart.per_gpu / together.per_gpu == pytest.approx(ratio, abs=0.006)


@pytest.mark.parametrize(("limit", "priced"), [(0.003, False), (0.004, True), (0.02, False)])
def test_nothing_of_a_small_grid_is_better(limit: float, priced: bool) -> None:
    sizes = dict(layers=4, hidden=1024, intermediate=2048, num_experts=4, top_k=2, query_group=4, vocabulary=1000)
    layers = layers_of_sizes(**sizes, keys=2000, tps=(1, 2))
    small = Chip(20e12, 1e12, 1e12, 200e9, 5e9, capacity=0.9e9, inside=50e9)
    chips = RoleChip("a", small, 2.0 * priced), RoleChip("b", Chip(30e12, 1e12, 1e12, 100e9, 5e9), 1.0 * priced)
    best = best_apart(layers, chips, limit, most_nodes=3, microbatches=[1, 2, 3])
    values = []
    for a, e, n, m, b in itertools.product((1, 2), (1, 2), (1, 2, 3), (1, 2, 3), range(1, 300)):
        took = step_seconds(layers.apart(b, n, (a, e), (chips[0].chip, chips[1].chip)), 4, m)
        held = 2 * 2 * m * b * 2000 * 1024 * 4 / 4 + 2 * (4 * (2 * 1024**2 + 2 * 1024**2 / 4) + 2 * 1000 * 1024)
        if took <= limit and held <= a * 0.9e9:
            paid = (2 * n * a + 4 * e) / 3600 if priced else n * a + 4 * e
            values.append(n * m * b / took / paid)
    assert max(values) == pytest.approx(best.per_price if priced else best.per_gpu, rel=1e-9)
    assert best.tokens < 300


def test_refusals() -> None:
    layers = model("mixtral")
    with pytest.raises(
        ValueError, match=r"limit: needs steps of at least .* ms \(disaggregated\), found 1 ms; raise it"
    ):
        best_apart(layers, (A100, A100), 1e-3)
    with pytest.raises(ValueError, match=r"limit: needs steps of at least .* \(colocated\)"):
        best_together(layers, A100, 1e-3, False)
    tiny = RoleChip("tiny", Chip(1e12, 1e12, 1e12, 1e12, capacity=1e9))
    with pytest.raises(ValueError, match=r"memory for 1.* GB of attention's weights .* found 1 GB \(tiny\); use chips"):
        best_apart(layers, (tiny, tiny), LIMIT)
    with pytest.raises(ValueError, match=r"4.2\d GB of an expert's"):
        best_apart(layers, (A100, tiny), LIMIT)
