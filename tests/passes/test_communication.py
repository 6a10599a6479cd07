"""What the step graphs move, counted: per layer, per parameter byte, and where in the graph."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from autopar.compile.model import compile_model
from autopar.cost.traffic import communication, transfer
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY, VOCAB, TinyModel
from autopar.options import Options
from autopar.rewrite.tidy_checks import is_parameter_gather
from autopar.steps.graphs import Compiled

LAYERS = 4


def compiled(mesh: str, name: str = "llama", layers: int = 2, **options: Any) -> Compiled:
    return _compiled(mesh, name, layers, tuple(sorted((key, value) for key, value in options.items() if value)))


@functools.cache
def _compiled(mesh: str, name: str, layers: int, options: tuple[tuple[str, Any], ...]) -> Compiled:
    tiny = TINY[name]
    deep = TinyModel(name, tiny.config, tiny.model, {**tiny.sizes, "num_hidden_layers": layers}, tiny.kind, tiny.drop)
    return compile_model(deep.build(), tiny.batch(4, 8), Mesh.parse(mesh), Options(**dict(options)), outputs=())


def backward(c: Compiled) -> GraphModule:
    assert c.stage.backward_reduce is not None
    return c.stage.backward_reduce.graph


def moves(c: Compiled, axis: str) -> Counter[str]:
    """Number of collectives of one microbatch on an axis, by kind."""
    found: Counter[str] = Counter()
    for gm in (c.stage.forward.graph, backward(c)):
        for (on, kind), volume in communication(gm, c.plan.mesh).items():
            found[kind] += volume.calls if on == axis else 0
    return found


def collectives(gm: GraphModule, mesh: Mesh) -> list[Node]:
    return [n for n in gm.graph.nodes if (t := transfer(n, mesh)) is not None and t.bytes]


def per_layer(axis: str, **options: Any) -> Counter[str]:
    more, fewer = (moves(compiled(f"{axis}=2", layers=n, **options), axis) for n in (2, 1))
    more.subtract(fewer)
    return Counter({k: v for k, v in more.items() if v})


def test_a_layer_under_tensor_parallelism_sums_activations_four_times() -> None:
    assert per_layer("tp") == {"all_reduce": 4}


def test_a_layer_under_sequence_parallelism_gathers_and_scatters_four_times() -> None:
    found = per_layer("tp", sequence_parallel=True)
    assert found["all_gather"] <= 4 and found["reduce_scatter"] <= 4
    assert set(found) <= {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}])
def test_logits_are_never_gathered(options: dict[str, Any]) -> None:
    c = compiled("tp=2", **options)
    for gm in (c.stage.forward.graph, backward(c)):
        for node in collectives(gm, c.plan.mesh):
            assert VOCAB not in node.meta["val"].shape, node


@pytest.mark.parametrize(
    "zero, times, ranks",
    [(0, 2, 2), (3, 3, 4), *(pytest.param(*c, marks=pytest.mark.full) for c in ((0, 2, 4), (3, 3, 2)))],
)
def test_bytes_of_data_parallelism(zero: int, times: int, ranks: int) -> None:
    """2 (N-1)/N of the parameter bytes whole, at most 3 (N-1)/N cut; the count and the loss are a few bytes more."""
    c = compiled(f"dp={ranks}", zero=zero)
    weights = sum(p.nbytes() for p in c.parameters)
    moved = sum(v.bytes for gm in (c.stage.forward.graph, backward(c)) for v in communication(gm, c.plan.mesh).values())
    bound = times * (ranks - 1) / ranks * weights
    assert moved <= bound + 64
    if zero == 0:
        assert moved >= bound


def test_small_gradients_travel_together() -> None:
    assert moves(compiled("dp=2"), "dp")["all_reduce"] <= 3  # count, loss, one bucket
    names = [n.name for n in backward(compiled("dp=2,tp=2", sequence_parallel=True)).graph.nodes]
    assert sum(n.startswith("bucket_sum") for n in names) >= 1


def test_accumulation_does_not_multiply_reductions() -> None:
    c = compiled("dp=2", microbatches=2)
    assert c.stage.backward is not None
    assert not collectives(c.stage.backward.graph, c.plan.mesh)
    assert len(collectives(backward(c), c.plan.mesh)) == len(collectives(backward(compiled("dp=2")), c.plan.mesh))


def test_zero3_communication_is_spread_between_compute() -> None:
    """Products stand between the collectives of one layer and those of the next."""
    c = compiled("dp=2", layers=LAYERS, zero=3)
    for gm, kinds in ((c.stage.forward.graph, ("all_gather",)), (backward(c), ("all_gather", "reduce_scatter"))):
        for kind in kinds:
            products, places = 0, set()
            for node in gm.graph.nodes:
                products += node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
                if (t := transfer(node, c.plan.mesh)) and t.kind == kind:
                    places.add(products)
            assert len(places) >= LAYERS - 1, f"{kind} stands at {places} of {products} products"


def test_gathered_weights_are_not_saved() -> None:
    c = compiled("dp=2", zero=3)
    forward = {n.name: n for n in c.stage.forward.graph.graph.nodes}
    weights = {n.name for n in c.stage.forward.graph.graph.nodes if is_parameter_gather(n)}
    saved = [n for n in c.stage.forward.outputs if n is not None and n.startswith("saved:")]
    assert weights and saved
    assert not weights & {s.removeprefix("saved:") for s in saved}
    views = (torch.ops.aten.t.default, torch.ops.aten.view.default, torch.ops.aten.permute.default)
    assert not [s for s in saved if forward[s.removeprefix("saved:")].target in views]
    stored = {tuple(p.shape) for p in c.parameters if len(p.shape) > 1}
    assert not [s for s in saved if tuple(forward[s.removeprefix("saved:")].meta["val"].shape) in stored]
