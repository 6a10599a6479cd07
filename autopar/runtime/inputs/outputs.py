"""The outputs of a step: flat local values become DTensors and scalars in the user's structure.

    functional.mse_loss(out.logits, batch["target"])       8 rows of all ranks, against the 4 of this rank's shard

torch refuses such sizes before the operator runs, with an error that does not mention ranks. Outputs that are sharded
on the batch explain it. As an input of another model on the same mesh, such an output is passed as this rank's shard
(`parts_of_outputs`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.adapters.dtensor import local_of, no_torch_function
from autopar.ir.graph import outputs
from autopar.ir.mesh import DATA
from autopar.ir.placement import PARTIAL, Placement, Placements, Shard, without_padding
from autopar.ir.signature import ParameterSpec
from autopar.rules import result_placements
from autopar.runtime.mesh.process_groups import Groups, dp_rank_and_size
from autopar.runtime.params import parameters
from autopar.runtime.params.sharded_ops import leaves
from autopar.runtime.params.sharded_tensor import ShardedTensor
from autopar.steps.graphs import Compiled

_PAIRS = (torch.cdist,)  # operators on all pairs of rows: any two numbers of rows fit


class BatchOutput(ShardedTensor):
    """An output that is sharded on the batch, or a tensor computed from one.

    rows: of the global batch, and of this rank's shard.
    """

    rows: tuple[int, int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = leaves((args, kwargs or {}))
        rows = next((x.rows for x in operands if isinstance(x, BatchOutput)), None)
        try:
            if func in _PAIRS and rows and any(_has_part(x, *rows, operands) for x in operands):
                raise ValueError("rows of the global batch and of one rank in one operator")
            found = no_torch_function(func, types, args, kwargs or {})
        except (RuntimeError, ValueError, IndexError) as error:
            if rows and any(_has_part(x, *rows, operands) for x in operands):
                raise ValueError(
                    f"outputs: model(**batch) returns tensors of the global batch, here of {rows[0]} rows, found a "
                    f"tensor with the {rows[1]} rows of this rank's shard; compute the loss in the forward or in "
                    "parallelize(loss=fn), or pass the target of the global batch"
                ) from error
            raise
        for x in leaves(found) if rows else ():
            _explain(x, rows)
        return found


def batch_output(x: DTensor) -> DTensor:
    """The same tensor; if it is sharded on the batch, a `BatchOutput`, which explains mismatched sizes."""
    if isinstance(x, ShardedTensor):
        dims = {shard.dim for axis, shard in x.cuts if axis in DATA}
        for dim in dims:
            _explain(x, (x.shape[dim], local_of(x).shape[dim]))
    return x


def parts_of_outputs(batch: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Replace outputs of another model on the same mesh by what a user would pass: of an output that is sharded on the
    batch this rank's shard, unsharded in all other dims. Collective if an output is sharded on other axes. An output
    that requires a gradient, or whose batch dim is unknown, is left as it is and refused later.
    """
    if not any(isinstance(x, ShardedTensor) for x in batch.values()):
        return batch
    return {name: _plain_part(x, mesh) if isinstance(x, ShardedTensor) else x for name, x in batch.items()}


def _plain_part(x: ShardedTensor, mesh: DeviceMesh) -> Tensor:
    part, parts = dp_rank_and_size(mesh)
    dims = _batch_dims(x)
    wants_gradient = x.requires_grad and torch.is_grad_enabled()
    if x.device_mesh != mesh or wants_gradient or len(dims) != (parts > 1):
        return x
    if x.cuts and all(axis in DATA for axis, _ in x.cuts):
        return x.to_local().detach()
    whole = x.full_tensor().detach()
    return whole.chunk(parts, *dims)[part] if dims else whole


def _batch_dims(x: ShardedTensor) -> set[int]:
    """The dims that are sharded on batch axes, or that have the rows of the batch."""
    cut = {shard.dim for axis, shard in x.cuts if axis in DATA}
    rows = x.rows[0] if isinstance(x, BatchOutput) else None
    return cut or {d for d, size in enumerate(x.shape) if size == rows}


def _explain(x: Any, rows: tuple[int, int] | None) -> None:
    if type(x) is ShardedTensor:
        x.__class__ = BatchOutput
        x.rows = rows  # type: ignore[attr-defined]


def _has_part(x: Any, whole: int, mine: int, operands: list[Any]) -> bool:
    """Whether a plain tensor has this rank's rows where an operand has the rows of all ranks."""
    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        return False
    dims = {d for o in operands if isinstance(o, BatchOutput) for d, size in enumerate(o.shape) if size == whole}
    return any(d < x.dim() and x.shape[d] == mine for d in dims)


def rebuild_outputs(
    compiled: Compiled,
    values: list[Any],
    groups: Groups,
    watch: Callable[[str, Tensor], None] | None = None,
    whole: bool = False,
) -> Any:
    """Outputs in the user's structure: sharded DTensors through which gradients flow, and plain scalars. ``watch`` is
    called with each of them. ``whole``: plain tensors of the global batch instead; collective."""
    flat, names = [], []
    for i, (spec, value) in enumerate(zip(compiled.signature.outputs, values, strict=True)):
        if spec.kind == "output":
            flat.append(batch_output(_wrapped(compiled, i, value, groups)) if value.dim() else value)
            names.append(spec.name)
    if whole:
        flat = [x.full_tensor() if isinstance(x, DTensor) else x for x in flat]
    if watch is not None:
        for name, x in zip(names, flat, strict=True):
            watch(name, x)
    return compiled.signature.rebuild(flat)


def placements_of(compiled: Compiled, i: int) -> Placements:
    """The placements of output i."""
    node = _source(outputs(compiled.local)[i])
    return {a: result_placements(node, a)[0] for a in compiled.plan.mesh.cut_order}


def _wrapped(compiled: Compiled, i: int, value: Tensor, groups: Groups) -> DTensor:
    found, node = placements_of(compiled, i), _source(outputs(compiled.local)[i])
    assert PARTIAL not in found.values(), f"module: output {node.name} is {found}, which is partial"
    cuts: dict[str, Placement] = {a: p for a, p in found.items() if isinstance(p, Shard)}
    spec = ParameterSpec("output", tuple(node.meta["global_shape"]), value.dtype, False, (), cuts)
    value = without_padding(value, spec.shape, cuts, groups.mesh.cut_order, groups.coordinate)
    return parameters.wrap(value, spec, groups)


def _source(node: Any) -> Any:
    """The input of the detach that separates an output from the losses' graph, or the node itself."""
    while "global_shape" not in node.meta:
        node = node.args[0]
    return node
