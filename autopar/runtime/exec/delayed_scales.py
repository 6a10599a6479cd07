"""The delayed scales of a model on a mesh (`autopar.ops.few_bits.delayed_scales`): how its ranks agree on them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.compute_dtypes import torch_dtype
from autopar.ops.few_bits.delayed_scales import DelayedScales
from autopar.plan import Plan
from autopar.runtime.comm.collectives import all_reduce, finish
from autopar.runtime.mesh.process_groups import Groups


def delayed_scales(plan: Plan, groups: Groups) -> DelayedScales | None:
    """Those that a plan asks for, if it does."""
    how, weights = plan.options.precision, [name for name, why in plan.products.items() if not why]
    if how.scaling != "delayed":
        return None

    def agree(x: Tensor, axis: str) -> Tensor:
        found: Tensor = finish(all_reduce(groups, "delayed_scale", axis, "max")(x))
        return found

    def share(x: Tensor) -> Tensor:
        if groups.mesh.world_size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x

    dtype = torch.float64 if torch_dtype(how.compute) == torch.float64 else torch.float32
    return DelayedScales(weights, how.history, how.amax, how.margin, dtype, groups.device, agree, share)
