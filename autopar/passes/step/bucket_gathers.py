"""bucket_gathers: gather small parameters, and reduce-scatter small gradients, in buckets.

Consumes    a step graph.
Guarantees  gathers of a layer's parameters that are `is_small` become one gather per dtype and set of axes, where the
            first of them was. Ranks agree on the magnitudes of those that are rounded to eight bits in one exchange.
            Reduce-scatters of such gradients become one per layer, of at most ``bucket_bytes``. Values sharded on both
            dp and cp take one collective per axis. A gather is unpacked right before its first use, so that it can
            still overlap with the layer before. Shards are added to those of earlier microbatches when
            they are waited for.
Leaves      large parameters, for which two copies would cost more than the latency saved, or whose bucket would arrive
            late; shards of dims other than the first; gathers of activations.

    w = all_gather(p, 0)                   packed = cat([view(p, [1, -1]), view(q, [1, -1])], 1)
    v = all_gather(q, 0)         -->       both = split(all_gather(packed, 0), 1)
                                           w, v = reshape(both[0]), reshape(both[1])
"""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.adapters.operators import OpOverload
from autopar.cost.hardware import Links
from autopar.ir.conversions import uncast, unrounded
from autopar.ir.graph import ancestors, arguments, insert_call, is_call, layer_of, nbytes, output_node, shape
from autopar.ir.meta import of_no_module
from autopar.ir.waits import WaitPlaces, is_started
from autopar.options import Options
from autopar.passes.step.bucket_gradients import ends_in_output, is_small, move_users_to_end
from autopar.rewrite.checks import gathers_by_layer, is_parameter_gather
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

aten = torch.ops.aten
GATHER = torch.ops.autopar.all_gather.default
REDUCE = torch.ops.autopar.all_reduce.default
SCATTER = torch.ops.autopar.reduce_scatter.default


class BucketGathers(Pass):
    """Buckets small gathers of parameters and small reduce-scatters of gradients."""

    name = "bucket_gathers"
    requires = ("step",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        options = ctx.plan.options if ctx.plan else Options()
        links = Links.of(options, ctx.mesh)
        for chains in _runs(gm, links):
            _join_gathers(gm, chains)
        for chains in _waves(gm, options.bucket_bytes, links):
            _join_scatters(gm, chains)
        _add_when_waited(gm)
        gm.recompile()
        return gm


# One collective per axis that the value is sharded on, in order of execution: [gather over dp, gather over cp].
Chain = list[Node]


def _runs(gm: GraphModule, links: Links) -> list[list[Chain]]:
    """Small parameters that one layer gathers."""
    found: list[list[Chain]] = []
    for layer in gathers_by_layer(gm):
        groups: dict[object, list[Chain]] = {}
        for node in layer:
            chain = _chain(node, GATHER)
            inner = any(is_call(user, GATHER) for user in node.users)
            if (
                not inner
                and uncast(unrounded(_source(chain))).op == "placeholder"
                and _is_small(chain, _source(chain), links)
            ):
                _add(found, groups, chain)
    return [chains for chains in found if len(chains) > 1]


def _waves(gm: GraphModule, limit: int, links: Links) -> list[list[Chain]]:
    """Small gradients of one layer that are reduce-scattered between two gathers of parameters. (The all-reduce over
    replicas comes after that.) At most ``limit`` bytes of unsharded gradients, which all live until the last of them is
    computed, and then a second time in the bucket."""
    found: list[list[Chain]] = []
    open_waves: dict[object, list[Chain]] = {}
    layer = None
    for node in gm.graph.nodes:
        if is_parameter_gather(node) or node.meta.get("bucket"):
            open_waves = {}
        elif is_call(node, SCATTER) and ends_in_output(node):
            chain = _chain(node, SCATTER)
            if _layer(_source(chain)) != layer:
                open_waves, layer = {}, _layer(_source(chain))
            if _is_small(chain, node, links):
                _add(found, open_waves, chain, limit)
    return [chains for chains in found if len(chains) > 1]


def _layer(gradient: Node) -> str:
    """The layer that computes a gradient: the cast to the dtype of the reduction belongs to no layer."""
    while not layer_of(gradient) and len(gradient.all_input_nodes) == 1:
        gradient = gradient.all_input_nodes[0]
    return layer_of(gradient)


def _chain(node: Node, op: OpOverload) -> Chain:
    """The chain of collectives that ends here; a value in between has no other use."""
    before = arguments(node)["x"]
    return [*(_chain(before, op) if is_call(before, op) and len(before.users) == 1 else []), node]


def _source(chain: Chain) -> Node:
    source: Node = arguments(chain[0])["x"]
    return source


def _add(found: list[list[Chain]], groups: dict[object, list[Chain]], chain: Chain, limit: float = math.inf) -> None:
    """Add a chain to the bucket of its axes and dtype, of at most ``limit`` bytes."""
    kind = (*map(_axis, chain), chain[-1].meta["val"].dtype)
    if kind not in groups or sum(nbytes(_source(c)) for c in [*groups[kind], chain]) > limit:
        groups[kind] = []
        found.append(groups[kind])
    groups[kind].append(chain)


def _axis(node: Node) -> tuple[str, int]:
    args = arguments(node)
    return args["axis"], args["size"]


def _is_small(chain: Chain, piece: Node, links: Links) -> bool:
    """Whether this rank's shard is small, and one contiguous slice of the first dim."""
    plain = (arguments(n) for n in chain)
    whole = all(args["dim"] == 0 and not args["blocks"] and not args["units"] for args in plain)
    return whole and all(is_small(node, nbytes(piece), links) for node in chain)


def _join_gathers(gm: GraphModule, chains: list[Chain]) -> None:
    graph, first = gm.graph, chains[0][0]
    order = {n: i for i, n in enumerate(graph.nodes)}
    sources = list(map(_source, chains))
    _bring(first, sources)
    whole = _through(first, _packed(first, sources, 1), GATHER, chains[0])
    uses = {chain[-1]: min(chain[-1].users, key=order.__getitem__) for chain in chains}
    sizes = [s.meta["val"].numel() for s in sources]
    parts = _split(min(uses.values(), key=order.__getitem__), whole, sizes, aten.split_with_sizes.default)
    for i, chain in enumerate(chains):
        _unpack(graph, uses[chain[-1]], parts, i, aten.reshape.default, chain)


def _bring(before: Node, sources: list[Node]) -> None:
    """Casts of parameters, and what scales and rounds them, come to here; ranks agree on all their magnitudes at
    once."""
    lead = sorted(_computed(sources))
    agreed = [n for n in lead if is_call(n, REDUCE)]
    first = _computed(agreed)
    for node in (n for n in lead if n in first):
        before.prepend(node)
    for axis in dict.fromkeys(arguments(n)["axis"] for n in agreed):
        _join_maxima(before, [n for n in agreed if arguments(n)["axis"] == axis])
    for node in (n for n in lead if n not in first):
        before.prepend(node)


def _computed(nodes: list[Node]) -> set[Node]:
    return {n for n in ancestors(nodes) if n.op != "placeholder"}


def _join_maxima(before: Node, maxima: list[Node]) -> None:
    """One all-reduce of several magnitudes [1, 1] over an axis, none of which is made of another."""
    own, axis = [arguments(n)["x"] for n in maxima], arguments(maxima[0])["axis"]
    if len(own) < 2 or not set(maxima).isdisjoint(ancestors(own)):
        return
    like = _like(own[0], (len(own), 1))
    packed = insert_call(before, aten.cat.default, (own, 0), val=like, name="magnitudes")
    agreed = insert_call(before, REDUCE, (packed, axis, "max"), val=like, name="bucket")
    of_no_module(packed)
    of_no_module(agreed)
    parts = insert_call(before, aten.split_with_sizes.default, (agreed, [1] * len(own), 0))
    of_no_module(parts)
    for i, node in enumerate(maxima):
        node.replace_all_uses_with(insert_call(before, operator.getitem, (parts, i), like=node))
        node.graph.erase_node(node)


def _join_scatters(gm: GraphModule, chains: list[Chain]) -> None:
    graph, last, end = gm.graph, chains[-1][-1], output_node(gm)
    rows = math.prod(_axis(n)[1] for n in chains[0])
    piece = _through(last, _packed(last, list(map(_source, chains)), rows), SCATTER, chains[0])
    sizes = [chain[-1].meta["val"].numel() for chain in chains]
    # copies: a view would keep the bucket alive and share storage with other gradients
    parts = _split(end, piece, sizes, aten.split_with_sizes_copy.default)
    for i, chain in enumerate(chains):
        move_users_to_end(_unpack(graph, end, parts, i, aten.view.default, chain), end)


def _add_when_waited(gm: GraphModule) -> None:
    """Sums with the gradients of earlier microbatches, where their reduce-scatters are waited for: at the end, and
    earlier where too many are in flight (`autopar.ir.waits`)."""
    end, waits = output_node(gm), WaitPlaces(gm)
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    leaving = {node: uses for node in calls if is_call(node, SCATTER) and (uses := _leaving(node, end))}
    for uses in leaving.values():
        for node in uses:
            end.prepend(node)
    for node in calls:
        waits.before(node)
        last = node
        for done in waits.started(node) if is_started(node) else ():
            for use in leaving.get(done, ()):
                last.append(use)
                last = use


def _leaving(node: Node, end: Node) -> list[Node]:
    """The calls between a value and the end of the graph, in order; none where one of them takes other values, or is
    a transfer itself."""
    found = {node: None}
    for user in (queue := [u for u in node.users if u is not end]):
        found[user] = None
        queue += [u for u in user.users if u is not end and u not in queue]
    uses = sorted([*found][1:])
    free = all(x in found or x.op == "placeholder" for use in uses for x in use.all_input_nodes)
    return uses if free and not any(map(is_started, uses)) else []


def _through(before: Node, packed: Node, op: OpOverload, chain: Chain) -> Node:
    """The collectives of a chain, applied to the bucket: they gather or shard its rows."""
    for axis, size in map(_axis, chain):
        rows, width = shape(packed)
        like = _like(before, (rows * size if op is GATHER else rows // size, width))
        packed = insert_call(before, op, (packed, 0, [], axis, size), val=like, name="bucket")
        packed.meta["bucket"] = True
        of_no_module(packed)
    return packed


def _unpack(graph: Graph, before: Node, parts: Node, i: int, op: OpOverload, chain: Chain) -> Node:
    """The i-th entry of the bucket, in the shape of the chain's result, replaces the chain."""
    last = chain[-1]
    part = insert_call(before, operator.getitem, (parts, i), like=last)
    new = insert_call(before, op, (part, list(shape(last))), like=last, val=last.meta["val"])
    last.replace_all_uses_with(new)
    for node in reversed(chain):
        graph.erase_node(node)
    return new


def _packed(before: Node, values: list[Node], rows: int) -> Node:
    """[rows, N]: all values concatenated, each split into rows along its first dim."""
    flat = [insert_call(before, aten.reshape.default, (v, [rows, -1]), like=v) for v in values]
    width = sum(f.meta["val"].shape[1] for f in flat)
    packed = insert_call(before, aten.cat.default, (flat, 1), val=_like(before, (rows, width)), name="packed")
    of_no_module(packed)
    return packed


def _split(before: Node, value: Node, sizes: list[int], op: OpOverload) -> Node:
    parts = insert_call(before, op, (value, sizes, 1))
    of_no_module(parts)
    return parts


def _like(node: Node, size: tuple[int, ...]) -> torch.Tensor:
    made: torch.Tensor = node.meta["val"].new_empty(size)
    return made
