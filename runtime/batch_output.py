"""Outputs that have the rows of the whole batch, and what is said when they meet a tensor of this rank's rows.

    functional.mse_loss(out.logits, batch["target"])       8 rows over all ranks, against the 4 of this rank's part

torch finds such sizes out before an operator runs, and tells nothing of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.adapters.dtensor import local_of, no_torch_function
from autopar.ir.mesh import DATA
from autopar.runtime.sharded_tensor import ShardedTensor
from autopar.runtime.whole_ops import leaves

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
