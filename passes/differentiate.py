"""differentiate: from a local graph to its step graphs, forward (F) and backward (B), without autograd at run time.

Consumes    a local graph, or the graph of one part of a pipeline.
Guarantees  F returns the outputs and what the backward needs; BW takes that, parameters and tangents, and returns the
            gradients. F saves no views (it saves their base), no tuples, and nothing that derives from parameters
            alone: the backward makes it again. For a part of a pipeline the backward also comes in two: B is what
            leads to the gradient of a received value or to two or more parameters' gradients (else the first part's
            B would be empty), W the rest.
Leaves      the operators: they are AOTAutograd's.

    F:  y = mm(x, t(gather(w)))         -->    saves x
    B:  dx = mm(dy, gather(w))                 gathers w again;  stashes dy
    W:  dw = mm(t(dy), x)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.conversions import is_conversion
from autopar.ir.graph import ancestors, has_gradient, output_node, outputs, placeholders
from autopar.ir.placement import conversion, parse_placement
from autopar.ops.traits import PRODUCTS, aliases
from autopar.passes.joint import Joint, part_of_view
from autopar.steps.graphs import Stage, StepGraph, StepGraphs

aten = torch.ops.aten
FIXED = ("parameter", "buffer", "constant")


def differentiate(gm: GraphModule, train: bool = True, tangents: Sequence[str] = ()) -> StepGraphs:
    """Make the step graphs of a local graph. The backward starts from losses, which are scalars with a gradient, and
    from the outputs named in ``tangents``."""
    values = outputs(gm)
    kinds = gm.meta["signature"].outputs
    dependent = [
        i for i, v in enumerate(values) if kinds[i].kind == "output" and isinstance(v, Node) and has_gradient(v)
    ]
    losses = [i for i in dependent if train and (_is_loss(values[i]) or kinds[i].name in tangents)]
    own_outputs(gm, losses)
    joint = _joint(gm, losses, [s.node for s in gm.meta["signature"].inputs if s.kind in FIXED])
    forward, names = joint.forward(), joint.names
    if not joint.gradients:
        return StepGraphs(forward, None, names, len(values), dependent=dependent)
    known = _known(joint) | {t: t.name for t in joint.tangents}
    results = [(name, g) for name, g in joint.gradients.items()]
    backward = joint.graph_of(joint.dependent, results, known, "Backward", always=joint.tangents)
    return StepGraphs(
        forward, backward.graph, names, len(values),
        saved=[_saved_name(n) for n in joint.saved], backward_inputs=backward.inputs, tangents=len(joint.tangents),
        losses=losses, dependent=dependent, gradients=list(joint.gradients),
    )  # fmt: skip


def differentiate_part(gm: GraphModule, results: Mapping[str, str], fixed: Iterable[str]) -> Stage:
    """The step graphs of one part of a pipeline.

    results: name of each output, in order -> its kind: "loss", "sent", "mutation" or "output". fixed: names of the
    placeholders that are parameters, buffers or constants. Gradients are made for every placeholder that has one.
    """
    names = list(results)
    values = outputs(gm)
    active = [
        i
        for i, (name, v) in enumerate(zip(names, values, strict=True))
        if results[name] in ("loss", "sent") and has_gradient(v)
    ]
    own_outputs(gm, active)
    joint = _joint(gm, active, fixed)
    losses = [n for n, kind in results.items() if kind == "loss"]
    forward = _forward_of(joint, names)
    stage = Stage(forward, losses=losses)
    if not joint.gradients:
        return stage
    tangents = {}
    for i, tangent in zip(active, joint.tangents, strict=True):
        if results[names[i]] == "loss":
            _seed_loss(joint, tangent)
        else:
            tangents[tangent] = f"grad:{names[i]}"
    known = _known(joint) | tangents
    grads = {f"grad:{name}": g for name, g in joint.gradients.items()}
    stage.backward = joint.graph_of(joint.dependent, list(grads.items()), known, "Backward")
    stage.backward_input, stage.backward_weight = _split_backward(joint, grads, known, set(fixed))
    return stage


def _split_backward(
    joint: Joint, grads: Mapping[str, Node | None], known: Mapping[Node, str], fixed: set[str]
) -> tuple[StepGraph, StepGraph]:
    """B and W of the backward: see the module's docstring."""
    to_inputs = {n: g for n, g in grads.items() if n.removeprefix("grad:") not in fixed}
    to_weights = {n: g for n, g in grads.items() if n not in to_inputs}
    first = _needed_first(joint, to_inputs.values(), to_weights.values())
    early = [n for n in joint.dependent if n in first and n.op != "placeholder"]
    late = [n for n in joint.dependent if n not in first and n.op != "placeholder"]
    reached = ancestors([g for g in to_weights.values() if g is not None])
    late = [n for n in late if n in reached]
    stash = {
        x: f"stash:{x.name}"
        for x in joint.dependent
        if x in first and x not in known and any(user in late for user in x.users)
    }
    direct = {n: g for n, g in to_weights.items() if g is not None and (g in first or g not in joint.dependent)}
    rest = {n: g for n, g in to_weights.items() if n not in direct}
    made = [*to_inputs.items(), *direct.items(), *((name, x) for x, name in stash.items())]
    split = joint.graph_of(early, made, known, "BackwardInput")
    return split, joint.graph_of(late, list(rest.items()), {**known, **stash}, "BackwardWeight")


def _needed_first(joint: Joint, inputs: Iterable[Node | None], weights: Iterable[Node | None]) -> set[Node]:
    """Nodes that lead to the gradient of an input, or to those of two or more parameters; entries of a tuple go with
    it."""
    needed = ancestors([g for g in inputs if g is not None]) & set(joint.dependent)
    reach = {g: 1 << i for i, g in enumerate(g for g in weights if g is not None)}
    for node in reversed(list(joint.dependent)):
        bits = reach.get(node, 0)
        for user in node.users:
            bits |= reach.get(user, 0) if user in joint.dependent else 0
        reach[node] = bits
        if bits.bit_count() > 1:
            needed.add(node)
    for node in joint.dependent:
        if isinstance(node.meta.get("val"), (tuple, list)) and node in needed:
            needed |= set(node.users) & set(joint.dependent)
    return needed


def _forward_of(joint: Joint, names: list[str]) -> StepGraph:
    graph = joint.forward(keep=())
    return StepGraph(graph, _inputs_of(graph, joint), [*names, *(_saved_name(n) for n in joint.saved)])


def _inputs_of(graph: GraphModule, joint: Joint) -> list[str]:
    known = set(joint.names)
    found = [n.name for n in placeholders(graph)]
    assert known.issuperset(found)
    return found


def _seed_loss(joint: Joint, tangent: Node) -> None:
    """The tangent of a loss is 1, made where it is used."""
    graph, val = tangent.graph, tangent.meta["val"]
    with graph.inserting_after(joint.tangents[-1]):
        one = graph.call_function(aten.ones.default, (list(val.shape),), {"dtype": val.dtype, "device": val.device})
    one.meta = dict(tangent.meta)
    tangent.replace_all_uses_with(one)
    joint.gradients = {n: one if g is tangent else g for n, g in joint.gradients.items()}
    joint.dependent = {one if n is tangent else n: None for n in joint.dependent}
    joint.order = {n: i for i, n in enumerate(graph.nodes)}


def lowered(gm: GraphModule) -> GraphModule:
    """A graph that nobody differentiates, in the operators of step graphs."""
    specs = placeholders(gm)
    own_outputs(gm, [])
    return Joint(gm, [False for _ in specs], ()).forward()


def _joint(gm: GraphModule, active: list[int], fixed: Iterable[str]) -> Joint:
    """Gradients are wanted of every placeholder that has one and that an active output depends on."""
    values = outputs(gm)
    reached = ancestors([values[i] for i in active])
    return Joint(gm, [has_gradient(n) and n in reached for n in placeholders(gm)], fixed)


def _known(joint: Joint) -> dict[Node, str]:
    return {**joint.primals, **{n: _saved_name(n) for n in joint.saved}}


def _saved_name(node: Node) -> str:
    return f"saved:{node.name}"


def _is_loss(value: Any) -> bool:
    return isinstance(value, Node) and has_gradient(value) and not value.meta["val"].dim()


def own_outputs(gm: GraphModule, active: list[int]) -> None:
    """Every output but the active ones is detached, or AOTAutograd would ask for its tangent; every output has
    storage of its own, or it would be returned in a way that depends on what it is a view of. What is active and no
    loss is contiguous: tangents have the strides of their outputs."""
    out = output_node(gm)
    values: list[Any] = []
    given = outputs(gm)
    for i, value in enumerate(given):
        if isinstance(value, Node):
            owned = not _may_alias(value) and value not in given[:i]
            owned = owned and (i not in active or value.meta["val"].is_contiguous())
            source = value
            with gm.graph.inserting_before(out):
                if i not in active and has_gradient(value):
                    value = gm.graph.call_function(aten.detach.default, (value,))
                if not owned:
                    how: dict[str, Any] = {"memory_format": torch.contiguous_format} if i in active else {}
                    value = gm.graph.call_function(aten.clone.default, (value,), how)
            if value is not source:
                value.meta = {"val": source.meta["val"].clone(memory_format=torch.contiguous_format)}
                value.meta["has_gradient"] = i in active and has_gradient(source)
        values.append(value)
    out.args = (tuple(values),)
    gm.recompile()


def _may_alias(value: Node) -> bool:
    """Whether an output may share storage with an input or with another value."""
    if is_conversion(value):
        return conversion(*map(parse_placement, map(str, value.args[-2:]))) in ("none", "slice")
    # products of values with more than two dims end in a view of a product of matrices
    return value.op == "placeholder" or value.target in PRODUCTS or aliases(value.target) or part_of_view(value)


__all__ = ["StepGraphs", "differentiate", "differentiate_part", "lowered", "own_outputs"]
