"""Products beside exchanges over tp, in chunks: the rewritten graph, the numbers, the traffic, and when it pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from autopar.cost.traffic import step_communication
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes.step.async_tp import AsyncTensorParallel, _Prices
from autopar.passes.step.row_regions import row_region
from autopar.passes.step.schedule_collectives import ScheduleCollectives
from autopar.plan import Plan
from autopar.rewrite.compilation import Compilation
from tests.support.cases import (
    Cell,
    called,
    check,
    compile_cell,
    compiled,
    on_ranks,
    simulated,
)
from tests.support.slow_links import slow_step

ours, aten = torch.ops.autopar, torch.ops.aten
ALWAYS = Options(async_tp=True)
SEQUENCE = replace(ALWAYS, sequence_parallel=True)
CELLS = [
    Cell("llama", Mesh.of(tp=2), SEQUENCE),
    Cell("gpt2", Mesh.of(tp=2), ALWAYS),  # fused qkv, biases
    Cell("gpt2", Mesh.of(tp=2), SEQUENCE),
    Cell("llama", Mesh.of(dp=2, tp=2), replace(SEQUENCE, zero=3, activation_checkpoint="full")),
    Cell("llama", Mesh.of(pp=2, tp=2), replace(SEQUENCE, microbatches=2)),
    Cell("t5", Mesh.of(tp=2), SEQUENCE),
]


def given(graph: Graph, name: str, *shape: int) -> Node:
    made = graph.placeholder(name)
    made.meta["val"] = torch.empty(*shape, device="meta")
    return made


def call(graph: Graph, target: Any, *args: Any) -> Node:
    made = graph.call_function(target, args)
    made.meta["val"] = target(*(x.meta["val"] if isinstance(x, Node) else x for x in args))
    return made


def rewritten(graph: Graph, *results: Node, links: str = "") -> list[str]:
    """The calls of the graph; with named links it is rewritten only where that pays."""
    graph.output(results)
    options = Options(topology=links) if links else ALWAYS
    ctx = Compilation(Mesh.of(tp=2), Plan(Mesh.of(tp=2), "", options))
    gm = AsyncTensorParallel().apply(GraphModule(nn.Module(), graph), ctx)
    gm.graph.lint()
    return [
        str(node.target).split(".")[1]
        for node in gm.graph.nodes
        if node.op == "call_function" and "." in str(node.target)
    ]


def test_gathered_before_products() -> None:
    """Three rows in two chunks of one and two; two products share the gathers, and a third user gets the whole."""
    graph = Graph()
    x, w, v = given(graph, "x", 3, 2, 8), given(graph, "w", 8, 6), given(graph, "v", 8, 4)
    whole = call(graph, ours.all_gather.default, x, 1, [], "tp", 2)
    flat = call(graph, aten.view.default, whole, [12, 8])
    both = [call(graph, aten.mm.default, flat, weight) for weight in (w, v)]
    names = rewritten(graph, *both, call(graph, aten.neg.default, whole))
    assert names.count("all_gather") == 2 and names.count("mm") == 4 and names.count("cat") == 3
    assert names.index("mm") > names.index("all_gather")


def test_reduced_behind_products() -> None:
    """A sum of two products is reduced chunk by chunk, each right behind its products."""
    graph = Graph()
    a, b = given(graph, "a", 12, 8), given(graph, "b", 12, 5)
    w, v = given(graph, "w", 8, 6), given(graph, "v", 5, 6)
    views = [
        call(graph, aten.view.default, call(graph, aten.mm.default, *pair), [3, 4, 6]) for pair in ((a, w), (b, v))
    ]
    total = call(graph, ours.reduce_scatter.default, call(graph, aten.add.Tensor, *views), 1, [], "tp", 2)
    names = [name for name in rewritten(graph, total) if name in ("mm", "reduce_scatter", "cat")]
    assert names == ["mm", "mm", "reduce_scatter", "mm", "mm", "reduce_scatter", "cat"]


@pytest.fixture
def four_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the price."""
    monkeypatch.setattr(_Prices, "best", lambda self, node, least: (row_region(node), 4))


@pytest.mark.usefixtures("four_chunks")
def test_from_products_to_products() -> None:
    """A sum over tp, the residual stream, a norm and the next products run chunk by chunk; a loss over all rows is of
    the joined values, and so is what the backward keeps."""
    graph = Graph()
    a, w, x = given(graph, "a", 8, 8), given(graph, "w", 8, 6), given(graph, "x", 4, 2, 6)
    v, scale = given(graph, "v", 6, 3), given(graph, "scale", 6)
    product = call(graph, aten.view.default, call(graph, aten.mm.default, a, w), [4, 2, 6])
    stream = call(graph, aten.add.Tensor, call(graph, ours.all_reduce.default, product, "tp", "sum"), x)
    mean = call(graph, aten.mean.dim, call(graph, aten.mul.Tensor, stream, stream), [-1], True)
    normed = call(graph, aten.mul.Tensor, call(graph, aten.mul.Tensor, stream, mean), scale)
    out = call(graph, aten.mm.default, call(graph, aten.view.default, normed, [8, 6]), v)
    names = rewritten(graph, out, stream, call(graph, aten.sum.default, normed))
    assert names.count("mm") == 8 and names.count("all_reduce") == names.count("mean") == 4 and names.count("sum") == 1
    assert names.count("cat") == 3  # of the result, of the stream, of what is summed


@pytest.mark.usefixtures("four_chunks")
def test_through_both_exchanges() -> None:
    """From the products before a reduce-scatter to those behind the all-gather: the first chunk is gathered before the
    last is reduced."""
    graph = Graph()
    a, w, v = given(graph, "a", 16, 8), given(graph, "w", 8, 6), given(graph, "v", 6, 3)
    product = call(graph, aten.view.default, call(graph, aten.mm.default, a, w), [4, 4, 6])
    part = call(graph, aten.relu.default, call(graph, ours.reduce_scatter.default, product, 1, [], "tp", 2))
    whole = call(graph, ours.all_gather.default, part, 1, [], "tp", 2)
    out = call(graph, aten.mm.default, call(graph, aten.view.default, whole, [16, 6]), v)
    names = rewritten(graph, out)
    assert names.count("reduce_scatter") == names.count("all_gather") == 4 and names.count("cat") == 1
    assert names.index("all_gather") < len(names) - 1 - names[::-1].index("reduce_scatter")


@pytest.mark.usefixtures("four_chunks")
def test_what_mixes_rows_ends_a_region() -> None:
    """A sum over the batch, a random mask, an operand that others compute from the reduced value."""
    graph = Graph()
    a, w, v = given(graph, "a", 8, 8), given(graph, "w", 8, 6), given(graph, "v", 6, 3)
    product = call(graph, aten.view.default, call(graph, aten.mm.default, a, w), [4, 2, 6])
    total = call(graph, ours.all_reduce.default, product, "tp", "sum")
    centred = call(graph, aten.sub.Tensor, total, call(graph, aten.mean.dim, total, [0], True))
    out = call(graph, aten.mm.default, call(graph, aten.view.default, centred, [8, 6]), v)
    names = rewritten(graph, out)
    assert names.count("all_reduce") == 4 and names.count("mm") == 5 and names.count("sub") == 1


def test_what_is_left() -> None:
    """One row; rows that are the sharded dim; a product that somebody else uses."""
    graph = Graph()
    one, first = given(graph, "one", 1, 4, 8), given(graph, "first", 4, 8)
    w = given(graph, "w", 8, 8)
    flat = call(graph, aten.view.default, call(graph, ours.all_gather.default, one, 1, [], "tp", 2), [8, 8])
    rows = call(graph, ours.all_gather.default, first, 0, [], "tp", 2)
    product = call(graph, aten.mm.default, rows, w)
    total = call(graph, ours.all_reduce.default, product, "tp", "sum")
    names = rewritten(graph, call(graph, aten.mm.default, flat, w), total, call(graph, aten.neg.default, product))
    assert names.count("all_gather") == 2 and names.count("all_reduce") == 1


@pytest.mark.parametrize("cell", CELLS[1:2] + CELLS[3:4] + CELLS[5:], ids=str)
def test_equals_one_process(cell: Cell) -> None:
    check(simulated(cell))


@pytest.mark.parametrize("cell", [CELLS[0], pytest.param(CELLS[2], marks=pytest.mark.full), CELLS[4]], ids=str)
def test_equals_one_process_on_ranks(cell: Cell) -> None:
    check(called(cell))


def test_as_many_bytes() -> None:
    """In more collectives."""
    off = replace(CELLS[0], options=replace(SEQUENCE, async_tp=False))
    with_chunks, without = (step_communication(compile_cell(cell)) for cell in (CELLS[0], off))
    assert with_chunks.keys() == without.keys()
    for key, traffic in with_chunks.items():
        assert traffic.bytes == without[key].bytes and traffic.calls >= without[key].calls
    assert with_chunks["tp", "all_gather"].calls > without["tp", "all_gather"].calls


@pytest.mark.parametrize(
    ("links", "chunks"), [("tp=switch:20e9:1e-6", 8), ("tp=switch:20e9:1e-2", 1), ("tp=mesh:1e7", 1)]
)
def test_auto_goes_by_the_links(links: str, chunks: int) -> None:
    """Chunks where the exchange takes about as long as the product; none where the start of a collective takes longer
    than both, or where the exchange takes so long that the product beside it saves little."""
    graph = Graph()
    a, w = given(graph, "a", 8192, 4096), given(graph, "w", 4096, 4096)
    value = call(graph, aten.view.default, call(graph, aten.mm.default, a, w), [8, 1024, 4096])
    names = rewritten(graph, call(graph, ours.reduce_scatter.default, value, 1, [], "tp", 2), links=links)
    assert names.count("reduce_scatter") == names.count("mm") == chunks


SLOW = Options(target_hardware="CPU", topology="tp=switch:2e7:0", sequence_parallel=True)
GIVEN = Cell("llama", Mesh.of(tp=2), replace(SLOW, bucket_bytes=2**20))


def test_less_of_slow_links_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On ranks, with a clock that links and kernels set forward: in the order that is made, and in the given one."""
    with monkeypatch.context() as patched:
        patched.setattr(ScheduleCollectives, "apply", lambda self, gm, ctx: gm)
        compiled(GIVEN)
    ordered, plain = (on_ranks(cell, slow_step) for cell in (replace(GIVEN, options=SLOW), GIVEN))
    for (seconds, computed, _, waited), (before, alike, _, all_of_it) in zip(ordered, plain, strict=True):
        assert seconds == pytest.approx(computed + waited) and before == pytest.approx(alike + all_of_it)
        assert computed == pytest.approx(alike) and waited < 0.95 * all_of_it
