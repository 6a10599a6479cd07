"""`autopar::filled_rows`: rows at the true entries of a mask, in order, and zeros elsewhere.

    mask [[0, 1, 1], [1, 0, 0]], rows [a, b, c]   -->   [[0, a, b], [c, 0, 0]]

What a model writes as ``x[mask] = rows`` or ``x[mask] + rows``, in static shapes and with nothing that a device waits
for. There are as many rows as true entries: another number is recorded (`autopar.ops.value_checks`), and reported after
the step. A model that writes ``if mask.any(): x[mask] = rows`` may have rows for a mask without entries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.declare import operator
from autopar.ops.value_checks import note


@operator(
    "(Tensor rows, Tensor mask, str text, bool or_none=False) -> Tensor",
    lambda rows, mask, text, or_none=False: rows.new_empty(*mask.shape, *rows.shape[1:]),
)
def filled_rows(rows: Tensor, mask: Tensor, text: str, or_none: bool = False) -> Tensor:
    """rows [K, ...], mask [*M] bool -> [*M, ...]. ``text``: of the error, with {found} for the number of true entries
    and {rows} for K. ``or_none``: a mask without entries is right, too."""
    count, flat = rows.shape[0], mask.flatten()
    found = flat.sum()
    found = found.masked_fill_(found == 0, count) if or_none else found
    note(found, count, count, text.replace("{rows}", str(count)))
    if not count:
        return rows.new_zeros(*mask.shape, *rows.shape[1:])
    place = (flat.cumsum(0) - 1).clamp_(0, count - 1)
    made = rows.index_select(0, place).masked_fill_(_beside(flat, rows), 0)
    return made.view(*mask.shape, *rows.shape[1:])


def _beside(flat: Tensor, rows: Tensor) -> Tensor:
    """The entries without a row, viewed with the rank of the rows."""
    return flat.logical_not().view(-1, *[1] * (rows.dim() - 1))


@operator(
    "(Tensor grad, Tensor mask, int count) -> Tensor",
    lambda grad, mask, count: grad.new_empty(count, *grad.shape[mask.dim() :]),
)
def taken_rows(grad: Tensor, mask: Tensor, count: int) -> Tensor:
    """grad [*M, ...], mask [*M] bool -> [count, ...]: entries of the mask, in order; zeros if there are fewer."""
    flat, width = mask.flatten(), grad.shape[mask.dim() :]
    place = torch.where(flat, flat.cumsum(0) - 1, count).clamp_(max=count)
    made = grad.new_zeros(count + 1, *width)
    made.index_copy_(0, place, grad.reshape(-1, *width))  # entries beside the mask share the last row
    return made[:count].clone()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, mask, *_ = inputs
    ctx.count = rows.shape[0]
    ctx.save_for_backward(mask)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (mask,) = ctx.saved_tensors
    return torch.ops.autopar.taken_rows(grad, mask, ctx.count), None, None, None


filled_rows.register_autograd(_backward, setup_context=_setup)
