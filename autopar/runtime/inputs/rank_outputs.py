"""Outputs as `DistributedDataParallel` returns them: plain tensors, those of this rank's own examples.

    output [8 rows over dp=2, 64000 over tp=2]   -->   plain [4 rows, 64000]     on both ranks of tp

Each data-parallel rank computes its own loss from them, and gradients are those of the mean over data-parallel ranks,
as with DDP. Ranks that differ in tp, cp or pp compute the same loss. An output without a batch dim, such as the model's
own loss, is that of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Node

from autopar.capture.trace.export import flatten, unflatten
from autopar.ir.conversions import exchange
from autopar.ir.graph import ancestors
from autopar.ir.graph import outputs as graph_outputs
from autopar.ir.mesh import DATA
from autopar.ir.placement import Shard, parse_placement
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.params.sharded_tensor import ShardedTensor, from_local
from autopar.steps.graphs import Compiled

RANK = "rank"  # of the argument outputs_with_grad
COUNT = "num_items_in_batch"  # of transformers' Trainer: the targets of all ranks, which a rank's loss is divided by

Made = Callable[[list[Tensor]], list[Tensor]]


def of_rank(
    outputs: Any, groups: Groups, counted: bool = False, made: Made | None = None, others: Mapping[int, str] = {}
) -> Any:
    """Outputs in the user's structure, as plain tensors of this rank's examples. Collective over tp and cp.

    counted: scalars are sums over the global batch, divided by a count over it, of which a rank has its share. made:
    gives the plain tensors their gradients. others: see `outputs_of_others`.

    Raises ValueError for an output whose batch dim is also sharded on other axes.
    """
    leaves, spec = flatten(outputs)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    plain = [_plain(leaves[i]) for i in places]
    apart = [_batch_dims(leaves[i]) for i in places]
    plain = plain if made is None else made(plain)
    for i, x, dims in zip(places, plain, apart, strict=True):
        if counted and not x.dim() and x.is_floating_point():
            x = x / groups.mesh.data_size
        wanted = x.requires_grad and groups.mesh.data_size > 1
        leaves[i] = _MeanOverRanks.apply(x, groups, not dims) if wanted else x
    for i, why in others.items():
        leaves[i] = leaves[i].detach().as_subclass(OtherExamples)
        leaves[i].why = why
    return unflatten(leaves, spec)


class OtherExamples(Tensor):
    """An output that is computed from the examples of several ranks: any use of it raises ``why``, a ValueError."""

    why: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ValueError(next(x.why for x in flatten([args, kwargs])[0] if isinstance(x, OtherExamples)))


def outputs_of_others(compiled: Compiled) -> dict[int, str]:
    """Outputs, by their place among the leaves, that are computed from the examples of several ranks, such as the
    similarities of all pairs in a batch, where DDP has those of a rank's own examples: why they cannot be used.
    Statistics over the batch are as in SyncBatchNorm."""
    fed = {spec.node for spec in compiled.signature.inputs if spec.kind == "input"}
    specs, made, found = compiled.signature.outputs, graph_outputs(compiled.local), {}
    for leaf, place in enumerate(compiled.signature.leaves):
        if not isinstance(place, int) or not isinstance(made[place], Node) or not made[place].meta["val"].dim():
            continue
        for node in ancestors([made[place]]):
            if _gathers_examples(node) and any(x.name in fed for x in ancestors([node])):
                found[leaf] = (
                    f'outputs_with_grad="rank": {specs[place].name} is computed from the examples of all ranks '
                    f"({node.name} over {node.args[1]}), where DDP has those of each rank alone; compute the loss in "
                    "the model, pass it as loss=fn, or use a mesh without dp"
                )
    return found


def _gathers_examples(node: Node) -> bool:
    """Whether it turns a value that is sharded on a data-parallel axis into one that is whole, or sharded otherwise."""
    return node.target is exchange and node.args[1] in DATA and isinstance(parse_placement(str(node.args[3])), Shard)


def _batch_dims(x: Tensor) -> set[int]:
    return {shard.dim for axis, shard in x.cuts if axis in DATA} if isinstance(x, ShardedTensor) else set()


def _plain(x: Tensor) -> Tensor:
    if not isinstance(x, ShardedTensor):
        return x
    dims, others = _batch_dims(x), tuple((axis, shard) for axis, shard in x.cuts if axis not in DATA)
    if mixed := next((axis for axis, shard in others if shard.dim in dims), None):
        raise ValueError(
            f"outputs: needs examples that are sharded on data-parallel axes alone, found dim {min(dims)} of an "
            f"output of shape {list(x.shape)} sharded on {mixed} as well; return it as [examples, tokens, ...]"
        )
    local = x.to_local()
    shape = [local.shape[d] if d in dims else size for d, size in enumerate(x.shape)]
    return from_local(local, x.device_mesh, others, torch.Size(shape)).full_tensor()


class _MeanOverRanks(torch.autograd.Function):
    """The gradient of the mean of the ranks' losses. ``same``: all ranks have the same values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups, same: bool) -> Tensor:
        ctx.how = groups, same
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        groups, same = ctx.how
        return mean_over_ranks(grad, groups, same), None, None


def mean_over_ranks(grad: Tensor, groups: Groups, same: bool) -> Tensor:
    """This rank's share of the gradient of the mean of all losses; of an output that is the ``same`` on all ranks, the
    mean of their gradients. Collective in this case."""
    grad = grad / groups.mesh.data_size
    for axis in DATA if same else ():
        if groups.mesh.size(axis) > 1:
            dist.all_reduce(grad, group=groups.group(axis))
    return grad
