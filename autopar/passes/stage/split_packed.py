"""split_packed: the packed graph becomes one graph per pipeline stage.

Consumes    a packed graph and the stage of its nodes that depend on tokens and parameters.
Guarantees  every stage is a graph of its own. It takes the inputs that it uses and what the stage before it sends, and
            returns what the stage after it receives; a value that a later stage uses goes through all in between.
Leaves      values that depend on no parameter, or on parameters alone: every stage that uses them computes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import Graph, GraphModule, Node

from autopar.adapters.fx.lazy import graph_module
from autopar.ir.graph import add_placeholder, copy_node, outputs, placeholders, reach
from autopar.ir.meta import signature_of
from autopar.ir.signature import OutputSpec
from autopar.steps.packed import LOGITS


@dataclass
class PackedPart:
    """One stage. inputs: names of its inputs, those that the stage before sends included. outputs: of what it computes.
    sent: of what the next stage receives, which may be values that it passes on; the logits of the last one."""

    graph: GraphModule
    inputs: list[str]
    outputs: list[str]
    sent: list[str]


def split_packed(gm: GraphModule, stage_of: Mapping[Node, int], count: int) -> list[PackedPart]:
    """The graphs of ``count`` stages. ``gm`` is not changed."""
    stage_of = _of_all(gm, stage_of)
    needed = [_needed(gm, stage_of, k, count) for k in range(count)]
    through: list[list[Node]] = []  # what crosses from stage k to k + 1
    for k in range(count - 1):
        found = {x: None for later in needed[k + 1 :] for x in later if x in stage_of and stage_of[x] <= k}
        through.append(list(found))
    return [_part(gm, stage_of, k, through) for k in range(count)]


def _of_all(gm: GraphModule, known: Mapping[Node, int]) -> dict[Node, int]:
    """Also the stages of nodes that packing has added: those of their operands."""
    found: dict[Node, int] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            stages = [found[x] for x in node.all_input_nodes if x in found]
            if node in known:
                found[node] = max([known[node], *stages])
            elif stages:
                found[node] = max(stages)
    return found


def _needed(gm: GraphModule, stage_of: Mapping[Node, int], k: int, count: int) -> dict[Node, None]:
    """The operands of a stage's nodes; of the last one also the logits."""
    found: dict[Node, None] = {}
    for node in gm.graph.nodes:
        if stage_of.get(node) == k:
            found |= dict.fromkeys(node.all_input_nodes)
    return found | (dict.fromkeys(outputs(gm)) if k == count - 1 else {})


def _part(gm: GraphModule, stage_of: Mapping[Node, int], k: int, through: list[list[Node]]) -> PackedPart:
    received = through[k - 1] if k else []
    sent = through[k] if k < len(through) else outputs(gm)
    made = [x for x in sent if x not in received]
    graph, copies = Graph(), dict[Node, Node]()
    mine = [n for n in gm.graph.nodes if stage_of.get(n) == k]
    used = _inputs_of([*mine, *made], received, stage_of, k)
    for node in (*placeholders(gm), *received):
        if node in used:
            copies[node] = add_placeholder(graph, node.name, like=node)
    for node in mine:
        copy_node(graph, node, copies)
    graph.output(tuple(copy_node(graph, x, copies) for x in made))
    part = graph_module(graph, "Packed", gm)
    ends = [LOGITS] if k == len(through) else [n.name for n in sent]
    names = [LOGITS] if k == len(through) else [n.name for n in made]
    signature = replace(signature_of(gm), outputs=tuple(OutputSpec("output", name) for name in names))
    part.meta = {**gm.meta, "signature": signature}
    return PackedPart(part, [n.name for n in placeholders(part)], names, ends)


def _inputs_of(nodes: list[Node], received: list[Node], stage_of: Mapping[Node, int], k: int) -> set[Node]:
    """The inputs of the packed graph, and the received values, that a stage uses."""
    ends = set(received)
    return {
        x for x in reach(nodes, lambda x: () if x in ends else x.all_input_nodes) if x in ends or x.op == "placeholder"
    }
