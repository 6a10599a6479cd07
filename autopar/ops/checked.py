"""`autopar::checked`: a value of a factorisation, once its report says that there is one.

    inverse, info = linalg_inv_ex(a)
    inverse = checked(inverse, info, "linalg.inv", False)        raises torch.linalg.LinAlgError for a singular matrix

torch checks with an operator that has no result. Nobody would take it, so nothing would say where it belongs once a
graph is cut into forward and backward, or into parts; a value that went through its check does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.adapters.operators import check_factorisation


@torch.library.custom_op("autopar::checked", mutates_args=())
def checked(value: Tensor, info: Tensor, name: str, is_matrix: bool) -> Tensor:
    """value, unchanged. info: per matrix 0, or what is wrong with it. name: of the function, for the error's words;
    is_matrix: whether it was given one matrix and not a batch of them."""
    check_factorisation(info, name, is_matrix=is_matrix)
    return value.clone()


@checked.register_fake
def _(value: Tensor, info: Tensor, name: str, is_matrix: bool) -> Tensor:
    return torch.empty_like(value)


CHECKED = torch.ops.autopar.checked.default
