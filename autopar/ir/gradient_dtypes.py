"""In which dtypes gradients are added up: over ranks (`summed_in`), and over microbatches (`added_in`).

Without a policy in that of their parameter. With one over ranks in the dtype that it names, over microbatches in
float32 at least.
"""

from __future__ import annotations

import torch

from autopar.ir.compute_dtypes import torch_dtype
from autopar.precision import Precision


def summed_in(stored: torch.dtype, precision: Precision) -> torch.dtype:
    """``stored``: the dtype of the parameter."""
    return torch_dtype(precision.reduce) if precision.reduce and stored.is_floating_point else stored


def added_in(own: torch.dtype, stored: torch.dtype, precision: Precision) -> torch.dtype:
    """``own``: that of one microbatch's gradient."""
    found = torch.promote_types(own, summed_in(stored, precision))
    return torch.promote_types(found, torch.float32) if precision.compute else found
