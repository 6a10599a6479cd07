"""parameter_graphs: gather a stage's parameters before compute, and reduce their gradients after it.

Consumes    the conversions that follow the parameters of a stage: chains of identities and gathers.
Guarantees  G computes the used parameters from the stored ones; R computes the gradients of the stored ones from those
            of the used ones, by the transposed conversions in reverse. Both run once per step, whatever the number of
            microbatches. A chain that moves nothing forward (replicated weights) is not in G, but its transpose, an
            all-reduce, is in R.
Leaves      parameters that are used as they are stored.

To overlap with compute, G may also be merged into the first F of a step, and R into every backward or the last one.

    w_r = exchange(w, "dp", S(0), R)        G: w -> w_r = all_gather(w)      R: grad w_r -> reduce_scatter -> grad w
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.adapters.fx.graph_nodes import copied_node
from autopar.adapters.fx.lazy import graph_module
from autopar.ir.compute_dtypes import added_in, summed_in
from autopar.ir.conversions import conversion_of, exchange, is_cast_input, is_conversion
from autopar.ir.graph import add_placeholder, copy_graph, insert_call, output_node, outputs, placeholders
from autopar.ir.placement import conversion, dual, parse_placement
from autopar.passes.autodiff.clone_aliased_grads import clone_aliased_grads
from autopar.passes.autodiff.differentiate import lowered
from autopar.passes.stage.accumulate_gradients import add_earlier
from autopar.precision import Precision
from autopar.steps.graphs import StepGraph, earlier_sum, grad, of


def chain_of(node: Node) -> list[Node]:
    """The cast and the conversions between a parameter and one of its used values, in order."""
    found: list[Node] = []
    while is_conversion(node) or is_cast_input(node):
        found.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return found[::-1]


def moves(node: Node) -> bool:
    """Whether a conversion, or a cast, changes the value."""
    return not is_conversion(node) or conversion(*map(parse_placement, map(str, node.args[3:5]))) != "none"


def gather_graph(used: Mapping[Node, Node]) -> tuple[StepGraph | None, dict[str, str]]:
    """(G, aliases: used -> stored name of those that need no gather). ``used``: used node -> its parameter."""
    aliases = {u.name: p.name for u, p in used.items() if not any(map(moves, chain_of(u))) and u is not p}
    moved = {u: p for u, p in used.items() if u is not p and u.name not in aliases}
    if not moved:
        return None, aliases
    graph, copies = Graph(), dict[Node, Node]()
    for parameter in dict.fromkeys(moved.values()):
        copies[parameter] = add_placeholder(graph, parameter.name, like=parameter)
    for u in moved:
        for node in chain_of(u):
            if node not in copies:
                copies[node] = copied_node(graph, node, copies.__getitem__)
    graph.output(tuple(copies[u] for u in moved))
    gm = graph_module(graph, "Gather")
    inputs = [n.name for n in placeholders(gm)]
    return StepGraph(lowered(gm), inputs, [u.name for u in moved]), aliases


def reduce_graph(
    used: Mapping[Node, Node], available: Iterable[str | None], precision: Precision, added: bool, late: bool = False
) -> StepGraph | None:
    """R. ``available``: names of the gradients that exist (``grad:`` of used nodes). They have the dtype of the used
    values; those in ``added`` are accumulated over microbatches, in the dtype `added_in`. Results have the dtype
    `summed_in`. ``late``: leave the conversions in `late_links` to `late_reduce_graph`."""
    known = set(available)
    targets: dict[Node, list[Node]] = {}
    for u, parameter in used.items():
        if grad(u.name) in known:
            targets.setdefault(parameter, []).append(u)
    targets = {p: us for p, us in targets.items() if us != [p]}
    if not targets:
        return None
    graph, results, inputs = Graph(), [], []
    given: dict[Node, Node] = {}
    for u in (u for us in targets.values() for u in us):
        given[u] = add_placeholder(graph, f"grad_{u.name}")
        val, stored = u.meta["val"], used[u].meta["val"].dtype
        dtype = added_in(val.dtype, stored, precision) if added else val.dtype
        given[u].meta = {"val": val.new_empty(val.shape, dtype=dtype), "has_gradient": False}
        inputs.append(grad(u.name))
    end, left = graph.output(()), late_links(used) if late else {}
    for p, us in targets.items():
        total, dtype = None, summed_in(p.meta["val"].dtype, precision)
        for u in us:
            reduced = _transposed(end, given[u], _links(u)[len(left.get(p, ())) :], dtype)
            total = reduced if total is None else insert_call(end, torch.ops.aten.add.Tensor, (total, reduced))
        results.append(total)
    end.args = (tuple(results),)
    return _reduction(graph, inputs, [grad(p.name) for p in targets], added)


def _reduction(graph: Graph, inputs: list[str], made: list[str], alone: bool = True) -> StepGraph:
    """A graph of gradients, each of which has a storage of its own if the graph runs ``alone``."""
    gm = lowered(graph_module(graph, "Reduce"))
    gm.meta["owned"] = list(range(len(made)))
    if alone:
        clone_aliased_grads(gm)
    return StepGraph(gm, inputs, list(made))


def late_links(used: Mapping[Node, Node]) -> dict[Node, list[Node]]:
    """Parameter -> the conversions next to it whose transposes are all-reduces of the stored value: for a replicated
    parameter all of them, for a sharded one those over replicas. They commute with the accumulation over microbatches,
    which they do not make smaller."""
    found: dict[Node, list[Node]] = {}
    for u, p in used.items():
        links = list(itertools.takewhile(_sums_whole, _links(u)))
        known = found.get(p, links)
        same = (a for a, b in zip(known, links, strict=False) if a.args[1:] == b.args[1:])
        found[p] = list(itertools.islice(same, min(len(known), len(links))))
    return found


def _links(u: Node) -> list[Node]:
    return [n for n in chain_of(u) if is_conversion(n)]


def _sums_whole(link: Node) -> bool:
    """Whether the transpose of a conversion is an all-reduce."""
    _, src, dst = conversion_of(link)
    return conversion(dual(dst), dual(src)) == "all_reduce"


def late_reduce_graph(
    used: Mapping[Node, Node], available: Iterable[str | None], precision: Precision
) -> StepGraph | None:
    """R for gradients that each microbatch has reduced except for `late_links`: ``grad:`` of stored parameters,
    accumulated -> the same, reduced over these too."""
    known, graph = set(available), Graph()
    chains = {p: links for p, links in late_links(used).items() if links and grad(p.name) in known}
    if not chains:
        return None
    given: dict[Node, Node] = {}
    dtypes = {p: summed_in(p.meta["val"].dtype, precision) for p in chains}
    for p, dtype in dtypes.items():
        val = p.meta["val"]
        given[p] = add_placeholder(graph, f"grad_{p.name}")
        val = val.new_empty(val.shape, dtype=added_in(dtype, dtype, precision))
        given[p].meta = {"val": val, "has_gradient": False}
    end = graph.output(())
    end.args = (tuple(_transposed(end, given[p], chain, dtypes[p]) for p, chain in chains.items()),)
    names = [grad(p.name) for p in chains]
    return _reduction(graph, names, names)


def _transposed(end: Node, gradient: Node, chain: Sequence[Node], dtype: torch.dtype) -> Node:
    """The gradient through the transposes of a chain, last conversion first, in a dtype; new calls stand before
    ``end``."""
    if gradient.meta["val"].dtype != dtype:
        gradient = insert_call(end, torch.ops.aten._to_copy.default, (gradient,), {"dtype": dtype})
    for node in reversed(chain):
        _, axis, size, src, dst = node.args
        back = str(dual(parse_placement(str(dst)))), str(dual(parse_placement(str(src))))
        gradient = insert_call(end, exchange, (gradient, axis, size, *back))
    return gradient


def inline_reductions(step: StepGraph, reduce: StepGraph, last: bool = False) -> StepGraph:
    """A backward that reduces its own gradients over ranks as soon as they exist, by the calls of ``reduce``. ``last``:
    it is the last of a step, and first adds ``sum:``, the gradients accumulated so far. The graph is not changed."""
    gm, inputs = copy_graph(step.graph), list(step.inputs)
    given = dict(zip(reduce.inputs, placeholders(reduce.graph), strict=True))
    made = [(name, x, i in gm.meta.get("owned", ())) for i, (name, x) in enumerate(zip(step.outputs, outputs(gm)))]
    if last:
        graded = {i: (n, x) for i, (n, x, _) in enumerate(made) if n is not None and isinstance(x, Node)}
        added = [(n, x, given.get(n, x).meta["val"].dtype) for n, x in graded.values()]
        for (i, (n, _)), total in zip(graded.items(), add_earlier(gm, added), strict=True):
            made[i] = n, total, made[i][2]
            inputs.append(earlier_sum(of(n)))
    own_of = {name: x for name, x, _ in made}
    copies = {node: own_of[name] for name, node in given.items()}
    for node in reduce.graph.graph.nodes:
        if node.op == "call_function":
            with gm.graph.inserting_after(max(copies[x] for x in node.all_input_nodes)):
                copies[node] = copied_node(gm.graph, node, copies.__getitem__)
    made = [one for one in made if one[0] not in reduce.inputs]
    made += [(name, copies[x], True) for name, x in zip(reduce.outputs, outputs(reduce.graph), strict=True)]
    output_node(gm).args = (tuple(x for _, x, _ in made),)
    gm.meta["owned"] = [i for i, (_, _, owned) in enumerate(made) if owned]
    clone_aliased_grads(gm)
    return StepGraph(gm, inputs, [name for name, _, _ in made])


def with_gathers(forward: StepGraph, gather: StepGraph) -> StepGraph:
    """G and F in one graph, so that gathers overlap with compute; it returns the results of both. The graphs are not
    changed."""
    gm, inputs = copy_graph(forward.graph), list(forward.inputs)
    nodes = dict(zip(forward.inputs, placeholders(gm), strict=True))
    for name, node in zip(gather.outputs, outputs(gather.graph), strict=True):
        if name is not None and name not in nodes:
            nodes[name] = add_placeholder(gm.graph, name, placeholders(gm)[-1], like=node)
            inputs.append(name)
    names = [name for name in gather.outputs if name is not None]
    output_node(gm).args = ((*outputs(gm), *(nodes[name] for name in names)),)
    return inline_gathers(StepGraph(gm, inputs, [*forward.outputs, *names]), gather)


def inline_gathers(step: StepGraph, gather: StepGraph) -> StepGraph:
    """A step graph that gathers parameters itself, right before their first use, every time it runs."""
    sources = dict(zip(gather.outputs, gather.graph.graph.output_node().args[0], strict=True))  # type: ignore[arg-type]
    stored = dict(zip(placeholders(gather.graph), gather.inputs, strict=True))
    gm, inputs = step.graph, list(step.inputs)
    nodes = dict(zip(step.inputs, placeholders(gm), strict=True))
    for name, node in list(nodes.items()):
        if name not in sources:
            continue
        order = {n: i for i, n in enumerate(gm.graph.nodes)}
        first = min(node.users, key=order.__getitem__, default=None)
        if first is None:
            gm.graph.erase_node(node)
            del nodes[name]
            continue
        copies: dict[Node, Node] = {}
        new = _copied_before(gm, first, sources[name], stored, nodes, copies)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        del nodes[name]
    by_node = {n: name for name, n in nodes.items()}
    inputs = [by_node[n] for n in placeholders(gm)]
    gm.recompile()
    return StepGraph(gm, inputs, step.outputs)


def _copied_before(
    gm: GraphModule,
    before: Node,
    source: Node,
    stored: Mapping[Node, str],
    nodes: dict[str, Node],
    copies: dict[Node, Node],
) -> Node:
    if source in copies:
        return copies[source]
    if source in stored:
        name = stored[source]
        if name not in nodes:
            nodes[name] = add_placeholder(gm.graph, source.name, placeholders(gm)[-1], like=source)
        return nodes[name]
    for x in source.all_input_nodes:
        copies[x] = _copied_before(gm, before, x, stored, nodes, copies)
    with gm.graph.inserting_before(before):
        copies[source] = copied_node(gm.graph, source, lambda n: copies[n])
    return copies[source]
