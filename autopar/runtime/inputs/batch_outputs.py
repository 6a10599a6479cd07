"""Outputs that have the rows of the whole batch, and what is said when they meet a tensor of this rank's rows.

    functional.mse_loss(out.logits, batch["target"])       8 rows over all ranks, against the 4 of this rank's part

torch finds such sizes out before an operator runs, and tells nothing of ranks. As an input of another model on the same
mesh, such an output is this rank's part (`parts_of_outputs`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.adapters.dtensor import local_of, no_torch_function
from autopar.ir.mesh import DATA
from autopar.runtime.mesh.process_groups import dp_rank_and_size
from autopar.runtime.params.replicate_ops import leaves
from autopar.runtime.params.sharded_tensor import ShardedTensor

_PAIRS = (torch.cdist,)  # of rows, each with each: any number of them fits


class BatchOutput(ShardedTensor):
    """An output that is cut along the batch, or a tensor that has been computed of one.

    rows: of the whole batch, and of this rank's part.
    """

    rows: tuple[int, int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = leaves((args, kwargs or {}))
        rows = next((x.rows for x in operands if isinstance(x, BatchOutput)), None)
        try:
            if func in _PAIRS and rows and any(_has_part(x, *rows, operands) for x in operands):
                raise ValueError("the rows of all ranks meet those of one")
            found = no_torch_function(func, types, args, kwargs or {})
        except (RuntimeError, ValueError, IndexError) as error:
            if rows and any(_has_part(x, *rows, operands) for x in operands):
                raise ValueError(
                    f"outputs: model(**batch) gives tensors of the whole batch, here of {rows[0]} rows, found a tensor "
                    f"of the {rows[1]} of this rank's part; compute the loss in the forward or in "
                    "parallelize(loss=fn), or give the whole target"
                ) from error
            raise
        for x in leaves(found) if rows else ():
            _explain(x, rows)
        return found


def batch_output(x: DTensor) -> DTensor:
    """The same tensor, which from now on explains sizes, if it is one that is cut along the batch."""
    if isinstance(x, ShardedTensor):
        dims = {shard.dim for axis, shard in x.cuts if axis in DATA}
        for dim in dims:
            _explain(x, (x.shape[dim], local_of(x).shape[dim]))
    return x


def parts_of_outputs(batch: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """A batch in which outputs of another model on the same mesh are what a user would pass: this rank's part of those
    that are cut along the batch, whole in all else. Collective where there are any on axes that do not part the batch.
    An output that wants a gradient, or of which it is not known whose part it is, stays what it is, and is refused.
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
    """Those that ranks of the batch cut, or that have its rows."""
    cut = {shard.dim for axis, shard in x.cuts if axis in DATA}
    rows = x.rows[0] if isinstance(x, BatchOutput) else None
    return cut or {d for d, size in enumerate(x.shape) if size == rows}


def _explain(x: Any, rows: tuple[int, int] | None) -> None:
    if type(x) is ShardedTensor:
        x.__class__ = BatchOutput
        x.rows = rows  # type: ignore[attr-defined]


def _has_part(x: Any, whole: int, mine: int, operands: list[Any]) -> bool:
    """Whether a plain tensor has this rank's rows where an operand has all of them."""
    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        return False
    dims = {d for o in operands if isinstance(o, BatchOutput) for d, size in enumerate(o.shape) if size == whole}
    return any(d < x.dim() and x.shape[d] == mine for d in dims)
