"""Runs a step graph on all ranks of a mesh in one process, node by node in lockstep.

Every rank's value of a node is computed before the next node; a collective sees the values of all ranks of its group.
So the numbers of any mesh can be checked without processes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.attention import operator
from autopar.ir.graph import arguments
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard, join, piece, scaled_blocks
from autopar.testing.thread_comm import ThreadComm, run

aten, ops = torch.ops.aten, torch.ops.autopar


def in_lockstep(gm: GraphModule, inputs: Sequence[Sequence[Any]], mesh: Mesh) -> list[tuple[Any, ...]]:
    """Outputs per rank, for inputs per rank (in placeholder order)."""
    world = range(mesh.world_size)
    env: list[dict[Node, Any]] = [{} for _ in world]
    fed = [iter(values) for values in inputs]
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            for rank in world:
                env[rank][node] = next(fed[rank])
        elif node.op == "output":
            return [values_of(node.args[0], env[rank]) for rank in world]
        elif node.target in CONTEXT:
            for rank, results in enumerate(_context(node, env, mesh)):
                env[rank][node] = results
        elif node.target in COLLECTIVE:
            for rank, value in enumerate(_collective(node, env, mesh)):
                env[rank][node] = value
        else:
            for rank in world:
                args, kwargs = values_of((node.args, node.kwargs), env[rank])
                target = aten.reshape.default if node.target is aten.view.default else node.target  # as in the runtime
                env[rank][node] = target(*args, **kwargs)
    raise AssertionError("a graph ends in an output")


def values_of(arguments: Any, env: dict[Node, Any]) -> Any:
    """Arguments of a call, each node replaced by its value."""
    return torch.fx.node.map_arg(arguments, env.__getitem__)


def group_of(mesh: Mesh, axis: str, rank: int) -> list[int]:
    """The ranks that share every coordinate with ``rank`` but that of ``axis`` (or a level), in axis order."""
    here = mesh.coordinate(rank)
    if "," in axis:
        return mesh.along(axis.split(","), rank)
    name, level, count = re.fullmatch(r"(\w+)([%/]?)(\d*)", axis).groups()  # type: ignore[union-attr]
    along = [r for r in range(mesh.world_size) if all(v == here[a] for a, v in mesh.coordinate(r).items() if a != name)]
    if not level:
        return along
    me, n = along.index(rank), int(count)
    return along[me // n * n : me // n * n + n] if level == "%" else along[me % n :: n]


def _collective(node: Node, env: list[dict[Node, Any]], mesh: Mesh) -> list[torch.Tensor]:
    x: Any = node.args[0]
    one_rank, axis_at = COLLECTIVE[node.target]
    axis = str(node.args[axis_at])
    out: list[torch.Tensor] = []
    for rank in range(mesh.world_size):
        group = group_of(mesh, axis, rank)
        given = [[env[r][a] for r in group] if isinstance(a, Node) else a for a in node.args[1:]]
        out.append(one_rank([env[r][x] for r in group], group.index(rank), *given))
    return out


def _context(node: Node, env: list[dict[Node, Any]], mesh: Mesh) -> list[tuple[torch.Tensor, ...]]:
    """Context-parallel attention, with a thread per rank of each group."""
    run_one, axis = CONTEXT[node.target], arguments(node)["axis"]
    out: dict[int, tuple[torch.Tensor, ...]] = {}
    for rank in range(mesh.world_size):
        group = group_of(mesh, axis, rank)
        if rank == group[0]:
            args = [values_of(node.args, env[r]) for r in group]
            found, _ = run(len(group), functools.partial(_of_rank, run_one, args))
            out |= dict(zip(group, found))
    return [out[rank] for rank in range(mesh.world_size)]


def _of_rank(run_one: Callable[..., Any], args: Sequence[Any], comm: ThreadComm) -> Any:
    return run_one(comm, *args[comm.rank])


def _all_reduce(xs: list[torch.Tensor], me: int, axis: str, op: str) -> torch.Tensor:
    stacked = torch.stack(xs)
    return stacked.sum(0) if op == "sum" else stacked.amax(0)


def _all_gather(
    xs: list[torch.Tensor], me: int, dim: int, blocks: list[int], axis: str, size: int, units: int = 0
) -> torch.Tensor:
    return join(xs, Shard(dim, tuple(blocks), units=units))


def _reduce_scatter(
    xs: list[torch.Tensor], me: int, dim: int, blocks: list[int], axis: str, size: int, units: int = 0
) -> torch.Tensor:
    return _shard_slice([torch.stack(xs).sum(0)] * size, me, dim, blocks, axis, size, units).clone()


def _all_to_all(
    xs: Any, me: int, src: int, src_blocks: Any, dst: int, dst_blocks: Any, axis: str, size: int,
    src_units: int = 0, dst_units: int = 0,
) -> Any:  # fmt: skip
    whole = join(xs, Shard(src, tuple(src_blocks), units=src_units))
    return _shard_slice([whole] * size, me, dst, dst_blocks, axis, size, dst_units)


def _all_to_all_rows(xs: Any, me: int, splits: Any, back: bool, axis: str, size: int, rows: int = 0) -> torch.Tensor:
    sent = [s.tolist()[1 if back else 0] for s in splits]
    assert [counts[me] for counts in sent] == splits[me].tolist()[0 if back else 1], "received rows that were not sent"
    assert [len(x) for x in xs] == [sum(counts) for counts in sent] or rows
    come = torch.cat([x[: sum(counts)].split(counts)[me] for x, counts in zip(xs, sent)])
    return torch.cat([come, come.new_zeros(rows - len(come), *come.shape[1:])]) if rows else come


def _shard_slice(
    xs: list[torch.Tensor], me: int, dim: int, blocks: list[int], axis: str, size: int, units: int = 0
) -> torch.Tensor:
    x = xs[me]
    return piece(x, Shard(dim, scaled_blocks(blocks, x.shape[dim]), units=units), size, me).contiguous()


def _shard_pad(
    xs: list[torch.Tensor], me: int, dim: int, blocks: list[int], axis: str, size: int, units: int = 0
) -> torch.Tensor:
    pieces = [xs[me] if r == me else torch.zeros_like(xs[me]) for r in range(size)]
    return join(pieces, Shard(dim, tuple(blocks), units=units)).contiguous()


CONTEXT: dict[Any, Callable[..., tuple[torch.Tensor, ...]]] = {
    ops.context_attention.default: operator.forward_over_ranks,
    ops.context_attention_backward.default: operator.backward_over_ranks,
}
COLLECTIVE: dict[Any, tuple[Callable[..., torch.Tensor], int]] = {
    ops.all_reduce.default: (_all_reduce, 1),
    ops.all_gather.default: (_all_gather, 3),
    ops.reduce_scatter.default: (_reduce_scatter, 3),
    ops.all_to_all.default: (_all_to_all, 5),
    ops.all_to_all_rows.default: (_all_to_all_rows, 3),
    ops.shard_slice.default: (_shard_slice, 3),
    ops.shard_pad.default: (_shard_pad, 3),
}
