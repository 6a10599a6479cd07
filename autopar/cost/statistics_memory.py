"""What rounds ahead of a step take on one rank: totals, values of every microbatch that later rounds or parts take,
and what the graph that runs has alive.
"""

from __future__ import annotations

from autopar.ir.graph import outputs, placeholders
from autopar.ir.live_values import peak_of_values
from autopar.ir.storages import bytes_of
from autopar.schedule.order import Order
from autopar.steps.graphs import Pipeline


def memory_ahead(pipeline: Pipeline, order: Order, rank: int) -> tuple[int, int]:
    """(bytes of all totals, most bytes at once in any round) of the ranks at a coordinate of pp."""
    here = [order.rank_of[stage] == rank for stage in order.chains[0]]
    sizes: dict[str, int] = {}  # of everything that graphs of rounds make
    totals, most = 0, 0
    for one in pipeline.ahead:
        for graph in (g for g in one.graphs if g is not None):
            sizes |= {str(n): bytes_of([x]) for n, x in zip(graph.outputs, outputs(graph.graph), strict=True)}
        totals += sum(sizes.pop(name) for name in one.totals)
        mine = [g for k, g in enumerate(one.graphs) if g is not None and here[k]]
        live = max((peak_of_values(g.graph, {x.name for x in placeholders(g.graph)}) for g in mine), default=0)
        most = max(most, live)
    kept = max((_kept(pipeline, here, sizes, r) for r in range(len(pipeline.ahead))), default=0)
    return totals, totals + order.microbatches * kept + most


def _kept(pipeline: Pipeline, here: list[bool], sizes: dict[str, int], number: int) -> int:
    """Bytes of the values of a microbatch that are made or received by a round, or before it, and taken in it or
    later."""
    there, later = set[str](), set[str]()
    for r, one in enumerate(pipeline.ahead):
        mine = [g for k, g in enumerate(one.graphs) if g is not None and here[k]]
        if r <= number:
            there |= {str(n) for g in mine for n in g.outputs} | {h.value for h in one.hops if here[h.target]}
        if r >= number:
            later |= {n for g in mine for n in g.inputs} | {h.value for h in one.hops if here[h.source]}
    return sum(sizes[name] for name in there & later & sizes.keys())
