"""Residual streams: where sequence parallelism starts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import global_shape, is_call, module_path
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.plan import Stream
from autopar.rules.sequence_parallel import spread_label

SOURCES = (
    torch.ops.aten.linear.default,
    torch.ops.aten.embedding.default,
    torch.ops.autopar.moe_combine.default,
)


def find_streams(
    gm: GraphModule, contractions: list[Node], mesh: Mesh, axis: str, chunks: Mapping[Node, int]
) -> tuple[Stream, ...]:
    """One stream per residual stream: each pending sum (..., sequence, width) that no earlier stream reaches.

    ``chunks``: into how many pieces another axis cuts the sequence of a value; each of them is cut.

    Raises ValueError when a stream's sequence does not divide over the axis.
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    labels: dict[Node, Shard] = {}
    streams: list[Stream] = []
    for node in sorted(contractions, key=order.__getitem__):
        if not is_call(node, *SOURCES) or len(global_shape(node)) < 3 or node in labels:
            continue
        dim = len(global_shape(node)) - 2
        size, count = global_shape(node)[dim], chunks.get(node, 1)
        pieces = mesh.size(axis) * count
        if size % pieces:
            raise ValueError(
                f"sequence_parallel: sequence length {size} of the stream in {module_path(node) or node.name} does not "
                f"divide over axis {axis!r} of size {mesh.size(axis)}{f' in {count} chunks' if count > 1 else ''}; pad "
                f"to {-(-size // pieces) * pieces} or set sequence_parallel=False"
            )
        shard = Shard(dim, (size // count,) * count)
        reason = f"residual stream of {module_path(node) or node.name}"
        streams.append(Stream(node.name, dim, reason, axis, shard.blocks))
        labels |= spread_label(node, shard, mesh, axis)
    return tuple(streams)
