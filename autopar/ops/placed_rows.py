"""`autopar::placed_rows`: the rows that one mask selects at the true entries of another, in order, and zeros elsewhere.

    rows [a, b, c], selected [1, 0, 1], places [[0, 1], [1, 0]]   -->   [[0, a], [c, 0]]

What a model writes as ``h.masked_scatter(places, rows[selected])`` or ``h[places] = rows[selected]``, in static shapes.
There are as many selected rows as places: another number is recorded (`autopar.ops.value_checks`), and reported after
the step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autopar.ops.declare import operator
from autopar.ops.value_checks import note


def _placed(rows: Tensor, selected: Tensor, places: Tensor) -> Tensor:
    """rows [n, ...], selected [n], places [*M] -> [*M, ...]"""
    count, flat, width = math.prod(selected.shape), places.flatten(), rows.shape[selected.dim() :]
    if not count:
        return rows.new_zeros(*places.shape, *width)
    chosen = selected.flatten()
    order = chosen.logical_not().to(torch.uint8).argsort(stable=True)  # the selected ones first
    number = flat.cumsum(0) - 1
    there = flat & (number < chosen.sum())
    made = rows.reshape(count, *width).index_select(0, order.index_select(0, number.clamp_(0, count - 1)))
    made.masked_fill_(there.logical_not().view(-1, *[1] * len(width)), 0)
    return made.view(*places.shape, *width)


@operator(
    "(Tensor rows, Tensor selected, Tensor places, str text) -> Tensor",
    lambda rows, selected, places, text: rows.new_empty(*places.shape, *rows.shape[1:]),
)
def placed_rows(rows: Tensor, selected: Tensor, places: Tensor, text: str) -> Tensor:
    """rows [n, ...], selected [n] bool, places [*M] bool -> [*M, ...]. ``text``: of the error, with {found} for how
    many rows there are more than places."""
    note(selected.sum() - places.sum(), 0, 0, text)
    return _placed(rows, selected, places)


@operator(
    "(Tensor grad, Tensor selected, Tensor places) -> Tensor",
    lambda grad, selected, places: grad.new_empty(*selected.shape, *grad.shape[places.dim() :]),
)
def placed_back(grad: Tensor, selected: Tensor, places: Tensor) -> Tensor:
    """grad [*M, ...] -> [n, ...]: of each selected row that of its place; zeros for the others."""
    return _placed(grad, places, selected)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, selected, places, _ = inputs
    ctx.save_for_backward(selected, places)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.autopar.placed_back(grad, *ctx.saved_tensors), None, None, None


placed_rows.register_autograd(_backward, setup_context=_setup)
