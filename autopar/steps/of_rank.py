"""What one rank of a pipeline runs in a step, how often, and what it sends to other stages, from the lowered order.

A rank is given by its coordinate on pp; ranks that differ in other axes run the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.adapters.fx.graph_nodes import copied_node
from autopar.adapters.fx.lazy import graph_module
from autopar.ir.compute_dtypes import added_in
from autopar.ir.graph import ancestors, is_call, outputs, placeholders
from autopar.ir.mesh import Mesh
from autopar.ir.signature import ParameterSpec
from autopar.precision import Precision
from autopar.schedule.lowering import lower
from autopar.schedule.order import BACKWARD, TRANSFERS, Order, P2PEdge
from autopar.steps.graphs import Pipeline, Prologue, Stage, StepGraph, grad, is_a, of

GRAPHS = {
    "F": "forward", "BW": "backward", "B": "backward_input", "W": "backward_weight", "BWR": "backward_reduce",
    "G": "gather", "R": "reduce", "GF": "gather_forward",
}  # fmt: skip
BACKWARDS = ("BW", "B", "W", "BWR")  # kinds of actions whose graphs compute gradients


def graph_name(parts: int, part: int, graph: str) -> str:
    """The displayed name of a step graph: part1.backward, or backward if there is only one of ``parts``."""
    return f"part{part}.{graph}" if parts > 1 else graph


def backwards(part: Stage) -> list[StepGraph]:
    """The backward graphs that a stage has."""
    return [graph for kind in BACKWARDS if (graph := graph_of(part, kind)) is not None]


def graph_of(part: Stage, kind: str) -> StepGraph | None:
    """The step graph that an action of a kind runs."""
    found: StepGraph | None = getattr(part, GRAPHS[kind])
    return found


def exchanges_tokens(part: Stage) -> bool:
    """Whether a stage has experts that are sharded over ranks: its graphs pause where tokens are exchanged."""
    return any(is_call(node, torch.ops.autopar.moe_dispatch_own.default) for node in part.forward.unnamed.graph.nodes)


def sum_dtypes(part: Stage, precision: Precision) -> dict[str, torch.dtype]:
    """Gradient of a parameter -> the dtype in which it is accumulated over microbatches: that of the graph that takes
    the sum, if there is one."""
    taken = part.reduce or part.backward_reduce
    known = {
        grad(of(name)) if is_a(name, "sum") else name: dtype
        for name, dtype in (_dtypes(taken.inputs, placeholders(taken.unnamed)) if taken is not None else ())
    }
    made = [step for kind in ("BW", "B", "W") if (step := graph_of(part, kind)) is not None]
    owns = {name: dtype for step in made for name, dtype in _dtypes(step.outputs, outputs(step.unnamed))}
    return {name: known.get(name) or added_in(own, own, precision) for name, own in owns.items() if is_a(name, "grad")}


def _dtypes(names: Sequence[str | None], values: Sequence[Any]) -> Iterator[tuple[str, torch.dtype]]:
    for name, x in zip(names, values, strict=True):
        if name is not None and isinstance(x, Node) and isinstance(x.meta.get("val"), torch.Tensor):
            yield name, x.meta["val"].dtype


def lowered_order(pipeline: Pipeline) -> Order:
    """The order with gathers, reductions and transfers, as the executor runs it; made once for a pipeline."""
    if pipeline.order.lowered:
        return pipeline.order
    parts = list(enumerate(pipeline.parts))
    gathers, reductions = (frozenset(i for i, p in parts if getattr(p, name)) for name in ("gather", "reduce"))
    joined = frozenset(i for i, p in parts if p.backward_reduce)
    edges = tuple(replace(edge, gradient=comes_back(pipeline, edge)) for edge in pipeline.edges)
    known, added = pipeline.order.lowerings, (edges, gathers, reductions, joined)
    if added not in known:
        known[added] = lower(pipeline.order, *added)
    return known[added]


def slice_shares(pipeline: Pipeline) -> list[float]:
    """Tokens of each slice relative to the step graphs' static shapes; 1 where there are no slices."""
    for edge in pipeline.edges:
        if len(edge.shapes) > 1:
            forward = pipeline.parts[edge.source].forward
            sample = dict(zip(forward.outputs, outputs(forward.graph), strict=True))[edge.value].meta["val"]
            return [math.prod(shape) / math.prod(sample.shape) for shape in edge.shapes]
    return [1.0] * pipeline.order.slices


def parts_of(order: Order, rank: int) -> list[int]:
    """The stages that a rank runs."""
    return sorted({order.part_of(stage) for chain in order.chains for stage in chain if order.rank_of[stage] == rank})


# --- graphs --------------------------------------------------------------------------------------------------


def graphs_of_rank(pipeline: Pipeline, prologue: Prologue | None, rank: int) -> dict[str, tuple[GraphModule, int]]:
    """Name, such as part1.backward_input -> (graph, runs per step); of the prologue what the rank's stages need."""
    order = lowered_order(pipeline)
    mine = [a for a in order.ranks[rank] if a.kind not in TRANSFERS]
    parts = [pipeline.parts[k] for k in parts_of(order, rank)]
    taken = {name for part in parts for kind in ("F", *BACKWARDS) for name in _inputs(graph_of(part, kind))}
    found: dict[str, tuple[GraphModule, int]] = {}
    microbatches = len({a.microbatch for a in mine if a.kind == "F"})
    totals = StepGraph(prologue.graph, prologue.inputs, list(prologue.totals)) if prologue is not None else None
    for name, step, times in (
        ("each", pipeline.each, microbatches),
        ("once", pipeline.once, 1),
        ("prologue", totals, order.microbatches),
    ):
        needed = restricted(step, taken)
        if needed is not None:
            found[name] = needed.graph, times
            taken.update(needed.inputs)
    for r, one in enumerate(pipeline.pre_pass):
        for k, step in enumerate(one.graphs):
            if step is not None and order.rank_of[order.chains[0][k]] == rank:
                found[graph_name(len(pipeline.parts), k, f"pre_pass{r}")] = step.graph, order.microbatches
    for (k, kind), times in sorted(Counter((order.part_of(a.stage), a.kind) for a in mine).items()):
        graph = graph_of(pipeline.parts[k], kind)
        if graph is not None:
            found[graph_name(len(pipeline.parts), k, GRAPHS[kind])] = graph.graph, times
    return found


def graphs_of_all(pipeline: Pipeline, prologue: Prologue | None) -> Iterator[GraphModule]:
    """The step graphs of every rank; of equal stages one."""
    steps = [getattr(part, name) for part in pipeline.parts for name in dict.fromkeys(GRAPHS.values())]
    pre_pass = [step for one in pipeline.pre_pass for step in one.graphs]
    for step in (pipeline.each, pipeline.once, prologue, *pre_pass, *steps):
        if step is not None:
            yield step.graph if isinstance(step, Prologue) else step.unnamed


def _inputs(step: StepGraph | None) -> Sequence[str]:
    return step.inputs if step is not None else ()


def restricted(step: StepGraph | None, wanted: Collection[str]) -> StepGraph | None:
    """The subgraph that computes the results named in ``wanted``; None if it has none of them."""
    if step is None:
        return None
    made = {name: node for name, node in zip(step.outputs, outputs(step.graph), strict=True) if name in wanted}
    if not made:
        return None
    needed = ancestors(made.values())
    graph, copies = Graph(), dict[Any, Any]()
    for node in step.graph.graph.nodes:
        if node in needed:
            copies[node] = copied_node(graph, node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in made.values()))
    inputs = [name for name, node in zip(step.inputs, placeholders(step.graph), strict=True) if node in needed]
    return StepGraph(graph_module(graph, root=step.graph), inputs, list(made))


# --- communication between stages ----------------------------------------------------------------------------


def sends(pipeline: Pipeline, rank: int) -> Iterator[int]:
    """Bytes of every tensor that a rank sends to other stages: values with F, their gradients with B or BW."""
    order, of = pipeline.order, pipeline.order.rank_of
    for action in order.ranks[rank]:
        part, chain = order.part_of(action.stage), order.chains[order.chain_of[action.microbatch]]
        for edge in pipeline.edges:
            forward = action.kind == "F" and edge.source == part and of[chain[edge.target]] != rank
            backward = action.kind in BACKWARD and edge.target == part and of[chain[edge.source]] != rank
            if forward or (backward and comes_back(pipeline, edge)):
                yield edge_bytes(edge, action.slice)


def edge_bytes(edge: P2PEdge, piece: int = 0) -> int:
    """Bytes of a edge's value for a microbatch, or for one of its token slices."""
    return math.prod(edge.shapes[piece if len(edge.shapes) > 1 else 0]) * edge.dtype.itemsize


def comes_back(pipeline: Pipeline, edge: P2PEdge) -> bool:
    """Whether a gradient is sent against a edge: the target computes one, or forwards that of a later stage."""
    part = pipeline.parts[edge.target]
    made = any(grad(edge.value) in _outputs(graph_of(part, kind)) for kind in BACKWARDS)
    onward = (h for h in pipeline.edges if h.source == edge.target and h.value == edge.value)
    return edge.gradient and (made or any(comes_back(pipeline, h) for h in onward))


def _outputs(step: StepGraph | None) -> Sequence[str | None]:
    return step.outputs if step is not None else ()


# --- gradients summed over stages ----------------------------------------------------------------------------


def trained(part: Stage, received: Collection[str]) -> set[str]:
    """Placeholders of the stored parameters whose gradients a stage computes."""
    made = {of(n) for kind in BACKWARDS for n in _outputs(graph_of(part, kind)) if is_a(n, "grad")}
    made -= {*received, *(cache.past for cache in part.caches)}
    reduced = {of(n) for n in _inputs(part.reduce)}
    found = {of(n) for n in _outputs(part.reduce) if n}
    return found | {part.aliases.get(name, name) for name in made - reduced}


def shared_gradients(
    pipeline: Pipeline, parameters: Sequence[ParameterSpec], nodes: dict[str, str], mesh: Mesh, rank: int, bucket: int
) -> list[tuple[int, int, int]]:
    """(bytes, ranks, gradients) of every all-reduce of gradients over the stages that share parameters, in buckets of
    at most ``bucket`` bytes. ``nodes``: parameter -> placeholder."""
    received = [{h.value for h in pipeline.edges if h.target == k} for k in range(len(pipeline.parts))]
    made = {name for part, names in zip(pipeline.parts, received, strict=True) for name in trained(part, names)}
    sums: list[tuple[int, int, int]] = []
    open_buckets: dict[tuple[tuple[int, ...], torch.dtype], tuple[int, int]] = {}  # -> (index in sums, room)
    for p in parameters:
        if len(p.ranks) < 2 or rank not in p.ranks or nodes[p.name] not in made:
            continue
        size, key = p.nbytes(mesh), (p.ranks, p.dtype)
        index, room = open_buckets.get(key, (-1, 0))
        if index < 0 or size > room:
            index, room = len(sums), bucket
            sums.append((0, len(p.ranks), 0))
        sums[index] = sums[index][0] + size, len(p.ranks), sums[index][2] + 1
        open_buckets[key] = index, room - size
    return sums


def output_types(part: Stage, names: Collection[str]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of some outputs of a stage's F."""
    made = zip(part.forward.outputs, outputs(part.forward.unnamed), strict=True)
    values = {name: node.meta["val"] for name, node in made if name is not None and name in names}
    return {name: (tuple(val.shape), val.dtype) for name, val in values.items()}


def results_of(pipeline: Pipeline, order: Order, train: bool) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
    """Output of F -> coordinate of the rank that computes it for the last microbatch, shape, dtype: the new buffers in
    training, everything that the model returns otherwise."""
    last = order.chains[order.chain_of[-1]]
    found = {}
    for index, part in enumerate(pipeline.parts):
        names = [n for n in part.forward.outputs if n in part.mutations or (not train and is_a(n, "output"))]
        for name, facts in output_types(part, [n for n in names if n]).items():
            found[name] = (order.rank_of[last[index]], *facts)
    return found


def broadcasts(pipeline: Pipeline, rank: int, train: bool) -> list[int]:
    """Bytes that a rank sends of every value that one stage broadcasts: new buffers, and outputs in evaluation."""
    results = results_of(pipeline, pipeline.order, train).values()
    return [math.prod(shape) * dtype.itemsize * (source == rank) for source, shape, dtype in results]
