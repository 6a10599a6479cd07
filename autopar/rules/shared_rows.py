"""Rows that ranks share: what every rank of an axis would compute alike of an input is sharded on a dim of it instead.

    pixels -> tower -> projector -> features ─┐
    ids ─────────────────────────-> embedding ┴-> layers        cp shards layers: the region is tower and projector

A region begins at an input. It is what parameters make of the input, as far as nothing that the axis shards already
enters (a sequence over cp, weights over tp), and as far as each entry of the dim (an image, a clip) is computed by
itself. Within it ranks have rows of their own; what leaves it is gathered, or summed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch.fx import GraphModule, Node

from autopar.ir.graph import getitem_index, reach, shape_on
from autopar.ir.mesh import Mesh
from autopar.ir.meta import input_specs, names_of_parameters
from autopar.ir.placement import Shard, scaled_blocks
from autopar.plan import Plan, Stream
from autopar.rules.sequence_parallel import spread_label, start_of


def sharded_already(gm: GraphModule, plan: Plan, axis: str, labels: Collection[Node]) -> set[Node]:
    """What an axis shards, and all that depends on it. ``labels``: the values of the axis' streams of tokens."""
    specs = input_specs(gm)

    def is_sharded(node: Node) -> bool:
        spec = specs.get(node.name) if node.op == "placeholder" else None
        if spec is None:
            return node.name in plan.weight_pieces and axis == "tp"
        placed = plan.inputs.get(spec.name, {}).get(axis)
        used = plan.parameter(spec.name, axis).used if spec.kind == "parameter" else placed
        return isinstance(used, Shard)

    return set(reach([*labels, *filter(is_sharded, gm.graph.nodes)], users_of))


def row_labels(gm: GraphModule, stream: Stream, mesh: Mesh, axis: str, barred: Collection[Node]) -> dict[Node, Shard]:
    """The values of a region, calls of several results among them, and the input at which it begins, each with the
    Shard on its rows. ``barred``: what `sharded_already` says."""
    start = start_of(stream, {n.name: n for n in gm.graph.nodes})
    blocks = scaled_blocks(stream.blocks, shape_on(start, axis, mesh)[stream.dim])
    spread = spread_label(start, Shard(stream.dim, blocks, units=stream.units), mesh, axis, barred=barred)
    weights = names_of_parameters(gm)
    made = set(reach((n for n in gm.graph.nodes if n.name in weights), users_of))
    own = set(reach([start], users_of))
    found = {node: label for node, label in spread.items() if node is start or (node in own and node in made)}
    several = {n.args[0]: label for n, label in found.items() if getitem_index(n) is not None}
    return found | several  # type: ignore[return-value]


def users_of(node: Node) -> Iterable[Node]:
    """For walks towards results."""
    return node.users
