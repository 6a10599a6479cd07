"""Dataflow classes: which values of a graph depend on parameters, on inputs, on both or on neither.

w_r = convert(w, ..)         used parameter
bias = embedding(w_b, pos)   parameter only: recomputed by every pipeline stage that uses it
cos = cos(freqs)             free of parameters: computed once, before the stages
h = linear(x, w_r)           main: belongs to one stage
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from autopar.ir.conversions import conversion_of, is_cast_input, is_conversion
from autopar.ir.graph import ancestors, placeholders, reach
from autopar.ir.meta import input_specs
from autopar.ir.placement import Placement, Shard, conversion


@dataclass
class Flow:
    """What the values of a graph depend on.

    main: on a parameter and on an input; each belongs to one stage. parameter_only: on parameters, not on inputs.
    used: parameters as they enter compute, after their conversions -> their placeholder (or that itself).
    repeated: depends on something that differs between microbatches.
    kinds: placeholder name -> kind of its input.
    """

    main: list[Node] = field(default_factory=list)
    parameter_only: set[Node] = field(default_factory=set)
    used: dict[Node, Node] = field(default_factory=dict)
    repeated: set[Node] = field(default_factory=set)
    kinds: dict[str, str] = field(default_factory=dict)
    _main: set[Node] = field(default_factory=set, repr=False)

    def is_free(self, node: Node) -> bool:
        """Whether a value depends on no parameter."""
        return node not in self.parameter_only and node not in self._main


def home_of(value: Node, part_of: Mapping[Node, int], flow: Flow) -> int | None:
    """The stage that computes an output. One of parameters alone (the vectors of a spectral norm, the weights of a
    momentum encoder) belongs to the first stage that uses any of these; None for one without any."""
    if value in part_of:
        return part_of[value]
    sources = [n for n in ancestors([value]) if flow.kinds.get(n.name) == "parameter"]
    users = reach(sources, lambda node: node.users)
    return min((part_of[n] for n in users if n in part_of), default=None)


def flow_of(gm: GraphModule, inputs: Mapping[str, Mapping[str, Placement]] | None = None) -> Flow:
    """Classify the values of a graph. ``inputs``: placements of the inputs, which say what microbatches shard."""
    specs = input_specs(gm)
    flow = Flow(kinds={name: spec.kind for name, spec in specs.items()})
    from_input: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.kind == "parameter":
                flow.parameter_only.add(node)
            elif spec.kind not in ("buffer", "constant"):
                from_input.add(node)
            cut = isinstance((inputs or {}).get(spec.name, {}).get("mb"), Shard)
            if spec.kind == "microbatch" or (spec.kind == "input" and cut):
                flow.repeated.add(node)
            continue
        if node.op != "call_function":
            continue
        operands = node.all_input_nodes
        if any(x in flow.repeated for x in operands):
            flow.repeated.add(node)
        if any(x in from_input for x in operands):
            from_input.add(node)
        if any(x in flow.parameter_only or x in flow._main for x in operands):
            if node in from_input:
                flow._main.add(node)
                flow.main.append(node)
            else:
                flow.parameter_only.add(node)
    _find_used(gm, flow)
    return flow


def _find_used(gm: GraphModule, flow: Flow) -> None:
    """Parameters after their conversions. A conversion of a parameter, or of a converted one, is not compute, nor is
    the cast of one that is stored in another dtype."""
    converted: dict[Node, Node] = {n: n for n in placeholders(gm) if flow.kinds[n.name] == "parameter"}
    for node in gm.graph.nodes:
        if node.op != "call_function" or not node.args or node.args[0] not in converted:
            continue
        if is_cast_input(node) or (is_conversion(node) and _moves_whole(node)):
            converted[node] = converted[node.args[0]]
    for node, parameter in converted.items():
        if any(user not in converted for user in node.users):
            flow.used[node] = parameter


def _moves_whole(node: Node) -> bool:
    """Whether a conversion gathers, or only determines how the gradient is reduced; a slice of a weight is compute."""
    _, src, dst = conversion_of(node)
    return conversion(src, dst) in ("none", "all_gather")
