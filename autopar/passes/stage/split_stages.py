"""cut_stages: a local graph becomes the graphs of its parts, by dataflow.

Consumes    a local graph without microbatch conversions, and the part of each main node.
Guarantees  every part is a graph of its own. Its inputs: parameters as they are used, buffers, values that depend on no
            parameter, and values received from earlier parts. Its outputs: values for later parts, losses, new
            buffer values. A value that several later parts use goes from user to user (hops); so a part that uses a
            value and hands it on has no copy of it among its outputs, where its gradient would be lost.
Leaves      one computation of each main value. Values that derive from parameters alone (a position bias) are made
            again by every part that uses them, so that their gradients are added as those of tied weights are;
            values that depend on no parameter (rotary tables, masks, shifted labels) are made once, by a prologue:
            per step if they are the same for all microbatches, else per microbatch.

    h0 = layer0(embed(ids)); h1 = layer1(h0, cos); loss = head(h1)
        -->
    once: cos       part 0: (ids) -> h0       part 1: (h0, cos, labels) -> loss        hop h0: 0 -> 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.adapters.fx.graph_nodes import copied_node
from autopar.adapters.fx.lazy import graph_module
from autopar.ir.custom_backward import parts_of_token
from autopar.ir.flow import Flow
from autopar.ir.graph import add_placeholder, ancestors, copy_node, has_gradient, is_call, loss_places, outputs, reach
from autopar.ir.signature import Signature
from autopar.ops.gradient import OWN_BACKWARD
from autopar.ops.traits import is_view
from autopar.passes.autodiff.joint import part_of_view
from autopar.passes.stage.slice_tokens import of_slice
from autopar.schedule.order import P2PEdge
from autopar.steps.value_names import output, output_place


@dataclass
class PartGraph:
    """One part: its graph, the kind of each result (see `differentiate`), the names of its placeholders that are
    parameters, buffers or constants. parameters: original names of those that it holds. used: what is cut out between
    stored and used parameters, as used node -> its parameter; None where that is inside of the graph."""

    graph: GraphModule
    results: dict[str, str]
    fixed: list[str]
    mutations: dict[str, str]
    parameters: list[str]
    used: dict[Node, Node] | None = None


@dataclass
class Cut:
    """The parts of a model, what goes between them, and the prologue's graphs with the names of their results."""

    parts: list[PartGraph]
    hops: list[P2PEdge] = field(default_factory=list)
    once: GraphModule | None = None
    each: GraphModule | None = None


def cut_stages(gm: GraphModule, flow: Flow, part_of: Mapping[Node, int], count: int) -> Cut:
    """Cut a local graph into ``count`` parts; ``part_of`` says it for each main node. ``gm`` is left as it is."""
    cutter = _Cutter(gm, flow, part_of, count)
    parts = [cutter.part(k) for k in range(count)]
    cutter.refuse_split_backwards()
    once = cutter.prologue([n for n in cutter.frontier if n not in flow.repeated], "Once")
    each = cutter.prologue([n for n in cutter.frontier if n in flow.repeated], "Each")
    return Cut(parts, cutter.hops, once, each)


def uncut(gm: GraphModule, tangents: Sequence[str] = (), used: Mapping[Node, Node] | None = None) -> Cut:
    """A local graph as its only part. ``tangents``: names of outputs that gradients come for, beside the losses.
    ``used``: used node -> its parameter, where what is between them is cut out; then the graph is a new one."""
    signature = gm.meta["signature"]
    results, losses = {}, loss_places(gm)
    for i, (spec, value) in enumerate(zip(signature.outputs, outputs(gm), strict=True)):
        kind = "loss" if i in losses else spec.kind
        results[output(i)] = "sent" if spec.name in tangents and has_gradient(value) else kind
    fixed = [s.node for s in signature.inputs if s.kind in ("parameter", "buffer", "constant")]
    held = [s.name for s in signature.inputs if s.kind == "parameter"]
    if used is not None:
        stored = {p.name for p in used.values()}
        gm, fixed = _behind_conversions(gm, used), [*(u.name for u in used), *(n for n in fixed if n not in stored)]
    return Cut([PartGraph(gm, results, fixed, _mutations(signature, results), held, dict(used) if used else None)])


def _behind_conversions(gm: GraphModule, used: Mapping[Node, Node]) -> GraphModule:
    """A graph that takes parameters as they are used."""
    graph, copies = Graph(), dict[Node, Node]()
    between = set(used.values())
    for node, parameter in used.items():
        while node is not parameter:
            between.add(node)
            node = node.args[0]  # type: ignore[assignment]
    inputs = [n for n in gm.graph.nodes if n in used or (n.op == "placeholder" and n not in between)]
    for node in inputs:
        copies[node] = add_placeholder(graph, node.name, like=node)
        val = node.meta["val"]
        copies[node].meta["val"] = val.new_empty(val.shape) if node in used else val
    for node in gm.graph.nodes:
        if node.op == "call_function" and node not in between:
            copy_node(graph, node, copies)
    graph.output(tuple(copies[x] if isinstance(x, Node) else x for x in outputs(gm)))
    made = graph_module(graph, "Part")
    made.meta = dict(gm.meta)
    return made


def _mutations(signature: Signature, results: Mapping[str, str]) -> dict[str, str]:
    """Output -> name of the buffer whose new value it is."""
    return {name: signature.outputs[output_place(name)].name for name, kind in results.items() if kind == "mutation"}


class _Cutter:
    def __init__(self, gm: GraphModule, flow: Flow, part_of: Mapping[Node, int], count: int) -> None:
        self.gm, self.flow, self.part_of, self.count = gm, flow, part_of, count
        self.order = {n: i for i, n in enumerate(gm.graph.nodes)}
        self.frontier: dict[Node, None] = {}  # values of the prologue
        self.kept = self._outputs()
        self.hops, self.sent, self.received = self._hops()
        self.backwards: dict[Node, list[int]] = {}  # tokens -> the parts that have them

    def _outputs(self) -> list[list[tuple[str, str, Node]]]:
        """Per part: (name, kind, value) of the model's outputs that it makes."""
        found: list[list[tuple[str, str, Node]]] = [[] for _ in range(self.count)]
        specs, losses = self.gm.meta["signature"].outputs, loss_places(self.gm)
        for i, (spec, value) in enumerate(zip(specs, outputs(self.gm), strict=True)):
            if not isinstance(value, Node):
                continue
            part = self._home(value)
            if spec.kind == "own":  # keys for later token slices: their gradient comes back as that of a sent value
                found[part].append((value.name, "sent", value))
                continue
            found[part].append((output(i), "loss" if i in losses else spec.kind, value))
        return found

    def _home(self, value: Node) -> int:
        """The part that makes an output. One of parameters alone (the vectors of a spectral norm) is made where these
        are used, and held; one of nothing in the last part."""
        if value in self.part_of:
            return self.part_of[value]
        sources = [n for n in ancestors([value]) if self.flow.kinds.get(n.name) == "parameter"]
        users = reach(sources, lambda node: node.users)
        return min((self.part_of[n] for n in users if n in self.part_of), default=self.count - 1)

    def _hops(self) -> tuple[list[P2PEdge], list[list[Node]], list[list[Node]]]:
        """Main values that later parts use travel from user to user."""
        hops: list[P2PEdge] = []
        sent: list[list[Node]] = [[] for _ in range(self.count)]
        received: list[list[Node]] = [[] for _ in range(self.count)]
        for node in self.flow.main:
            home = self.part_of[node]
            users = sorted({self.part_of[u] for u in node.users if u in self.part_of} - {home})
            assert all(k > home for k in users), f"cut_stages: {node.name} of part {home} is used before it is made"
            for source, target in zip([home, *users], users, strict=False):
                val = node.meta["val"]
                assert isinstance(val, torch.Tensor), f"cut_stages: the tuple {node.name} crosses a cut"
                hops.append(P2PEdge(node.name, source, target, has_gradient(node), (tuple(val.shape),), val.dtype))
                received[target].append(node)
            if users:
                sent[home].append(node)
        return hops, sent, received

    # --- parts --------------------------------------------------------------------------------------------

    def part(self, k: int) -> PartGraph:
        """The graph of one part."""
        graph, copies = Graph(), dict[Node, Node]()
        results = self._results(k)
        own = [n for n in self.flow.main if self.part_of[n] == k]
        wanted = [*own, *(value for _, _, value in results)]
        inputs = self._inputs(k, wanted)
        for node in inputs:
            copies[node] = add_placeholder(graph, node.name, like=node)
            self._as_input(copies[node], node)

        for node in own:
            copy_node(graph, node, copies)
        graph.output(tuple(copy_node(graph, value, copies) for _, _, value in results))
        for token in (n for n in copies if is_call(n, OWN_BACKWARD)):
            self.backwards.setdefault(token, []).append(k)
        gm = graph_module(graph, f"Part{k}")
        gm.meta["signature"] = signature = self.gm.meta["signature"]
        kinds = {name: kind for name, kind, _ in results}
        fixed = [n.name for n in inputs if n in self.flow.used or self.flow.kinds.get(n.name) in ("buffer", "constant")]
        used = {n: self.flow.used[n] for n in inputs if n in self.flow.used}
        names = {s.node: s.name for s in signature.inputs}
        held = list(dict.fromkeys(names[p.name] for p in used.values()))
        return PartGraph(gm, kinds, fixed, _mutations(signature, kinds), held, used)

    def _as_input(self, new: Node, node: Node) -> None:
        """A received value is contiguous, whatever its strides were; a gathered weight has a gradient as stored."""
        val = node.meta["val"]
        new.meta["val"] = val.new_empty(val.shape)

    def _results(self, k: int) -> list[tuple[str, str, Node]]:
        return [*self.kept[k], *((n.name, "sent", n) for n in self.sent[k])]

    def _inputs(self, k: int, wanted: Iterable[Node]) -> list[Node]:
        """Where the part begins: used parameters, received values, and what depends on no parameter."""
        found: set[Node] = set()
        seen: set[Node] = set()
        queue = list(wanted)
        while queue:
            node = queue.pop()
            if node in seen:
                continue
            seen.add(node)
            elsewhere = node in self.part_of and self.part_of[node] != k
            if elsewhere or node in self.flow.used or node.op == "placeholder":
                found.add(node)
            elif self.flow.is_free(node) and not self._is_view(node) and not of_slice(node):
                found.add(node)
                self.frontier[node] = None
            else:
                queue += node.all_input_nodes
        return sorted(found, key=self.order.__getitem__)

    @staticmethod
    def _is_view(node: Node) -> bool:
        """A view of what a prologue made is made again where it is used: sent through, it would be written out."""
        return bool(node.all_input_nodes) and (is_view(node.target) or part_of_view(node))

    def refuse_split_backwards(self) -> None:
        """Raises ValueError for a function of parameters alone that several parts would make again: each would run its
        backward on a part of the gradient."""
        for token, parts in self.backwards.items():
            if len(parts) > 1:
                raise ValueError(
                    f"pipeline: the result of the autograd function {parts_of_token(token)[3]} is used by parts "
                    f"{', '.join(map(str, parts))}, and its backward needs their gradients together; call the function "
                    "where each part uses it, or cut such that one part has all uses"
                )

    # --- prologue -----------------------------------------------------------------------------------------

    def prologue(self, wanted: list[Node], title: str) -> GraphModule | None:
        """A graph that makes values which depend on no parameter; its results have their nodes' names in
        ``meta["results"]``."""
        if not wanted:
            return None
        wanted = sorted(wanted, key=self.order.__getitem__)
        needed = ancestors(wanted)
        graph, copies = Graph(), dict[Node, Node]()
        for node in self.gm.graph.nodes:
            if node in needed:
                copies[node] = copied_node(graph, node, copies.__getitem__)
        graph.output(tuple(copies[n] for n in wanted))
        gm = graph_module(graph, title)
        gm.meta["results"] = [n.name for n in wanted]
        return gm
