"""How long a step of a model that is served takes, and its memory, from the packed graph with the sizes of the step.

A step's logits are gathered and its tokens chosen by the host; neither is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from autopar.cost.flops import Requests
from autopar.cost.graph_times import graph_times
from autopar.cost.hardware import Links, device_of
from autopar.ir.graph import copy_graph, fake_mode, placeholders, run_fake
from autopar.ir.live_values import peak_of_values
from autopar.steps.packed import LAST, POSITIONS, ROWS, TOKENS, Packed, PackedStage, slots


@dataclass(frozen=True)
class ServingStep:
    """Of one replica. seconds: from the ids to the logits, through all stages. period: seconds between the ends of two
    steps, with as many in flight as there are stages. exposed: of ``seconds``, the time that computation waits for
    transfers. peak: most bytes of values at once in the graph of a stage, without weights and cache."""

    seconds: float
    period: float
    exposed: float
    peak: int


def serving_step(packed: Packed, requests: Requests) -> ServingStep:
    """The estimate for a step of these requests, (tokens, keys with these) each; all get a token."""
    plan, tokens, rows = packed.plan, sum(new for new, _ in requests), len(requests)
    device, links, ranks = device_of(plan.options), Links.of(plan.options, plan.mesh), dict[int, float]()
    seconds, exposed, peak = 0.0, 0.0, 0
    for stage, following in zip(packed.stages, [*packed.stages[1:], None], strict=True):
        gm = with_sizes(packed, stage, tokens, rows)
        times = graph_times(gm, device, links, requests)
        ranks[stage.rank] = ranks.get(stage.rank, 0.0) + times.seconds
        seconds, exposed = seconds + times.seconds, exposed + sum(times.exposed.values())
        peak = max(peak, peak_of_values(gm, [n.name for n in placeholders(gm)]))
        if following is not None and following.rank != stage.rank:
            sent = sum(math.prod(x.shape(tokens, rows)) * x.dtype.itemsize for x in stage.sent)
            moved = links.seconds("pp", "send", sent)
            seconds, exposed = seconds + moved, exposed + moved
    return ServingStep(seconds, max(*ranks.values(), seconds / plan.mesh.size("pp")), exposed, peak)


def with_sizes(packed: Packed, stage: PackedStage, tokens: int, rows: int) -> GraphModule:
    """A copy of the graph of a stage whose fake values are those of ``tokens`` tokens and ``rows`` rows of logits."""
    gm = copy_graph(stage.graph.graph)
    ids = next(s.node for s in packed.signature.inputs if s.name == packed.tokens)
    shapes: dict[str, tuple[int, ...]] = {ids: (1, tokens), POSITIONS: (tokens,), LAST: (rows,)}
    shapes |= {slots(kind): (tokens,) for kind in range(len(packed.windows))}
    shapes |= {x.name: x.shape(tokens, rows) for x in stage.received}
    numbers = {TOKENS: tokens, ROWS: rows}
    mode = fake_mode(gm.graph)
    for name, node in zip(stage.graph.inputs, placeholders(gm), strict=True):
        if name in numbers:
            node.meta["val"] = numbers[name]
        elif name in shapes:
            with mode:
                node.meta["val"] = torch.empty(shapes[name], dtype=node.meta["val"].dtype)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta["val"] = run_fake(gm.graph, node.target, node.args, node.kwargs)
    return gm
