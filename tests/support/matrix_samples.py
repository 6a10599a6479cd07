"""Sample calls of products, and of operators over batches of matrices, for `tests/support/rule_samples.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from autopar.adapters.operators import packet_named
from autopar.testing.soundness import Sample, call
from tests.support.pointwise_samples import normal

aten = torch.ops.aten


def products() -> Iterator[Sample]:
    yield call(aten.linear.default, normal(2, 6, 12), normal(6, 12), None)
    yield call(aten.linear.default, normal(6, 12), normal(6, 12), normal(6))
    yield call(aten.linear.default, normal(12), normal(6, 12))
    for left, right in (
        ((6, 12), (12, 6)),
        ((6,), (6,)),
        ((6,), (6, 12)),
        ((12, 6), (6,)),
        ((2, 6, 4), (4, 6)),
        ((6, 2, 4), (6, 4, 2)),
        ((6, 1, 2, 4), (2, 4, 2)),
        ((1, 2, 4), (6, 4, 2)),
        ((6,), (2, 6, 4)),
        ((2, 4, 6), (6,)),
    ):
        yield call(aten.matmul.default, normal(*left), normal(*right))
    yield call(aten.mv.default, normal(6, 4), normal(4))
    eight = torch.float8_e4m3fn
    a, b = normal(6, 12).to(eight), normal(6, 12).to(eight).t()
    ones, scales = (torch.tensor(0.5), torch.tensor(2.0)), (torch.rand(6, 1) + 0.5, torch.rand(1, 6) + 0.5)
    for left, right in (ones, scales):
        yield call(aten._scaled_mm.default, a, b, left, right, None, None, torch.float32, gradients=False)
    offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
    yield call(torch.ops.autopar.grouped_mm_by_offsets.default, normal(6, 4), normal(3, 4, 6), offsets)
    for op in (aten.dot.default, aten.vdot.default):
        yield call(op, normal(6), normal(6))
    x = normal(2, 6, 4)
    for equation, operands in (
        ("bij,bjk->bik", (normal(2, 6, 4), normal(2, 4, 6))),
        ("...ij,kj", (normal(2, 6, 4), normal(6, 4))),
        ("b...i, b...i -> b...", (normal(2, 6, 4), normal(2, 6, 4))),
        ("bhn,hn,b->nb", (normal(2, 6, 4), normal(1, 4), normal(2))),
        ("bij,bkj->bik", (x, x)),
        ("bii->bi", (normal(2, 6, 6),)),
        ("ij->", (normal(2, 6),)),
    ):
        yield call(aten.einsum.default, equation, list(operands))


def matrices() -> Iterator[Sample]:
    a, spd = normal(6, 3, 3), _definite(6, 3)
    for op in (
        aten.linalg_inv,
        aten.inverse,
        aten.linalg_inv_ex,
        aten.linalg_qr,
        aten._linalg_svd,
        aten.linalg_matrix_exp,
        aten._linalg_det,
        aten._linalg_slogdet,
        aten.linalg_lu,
        aten.linalg_lu_factor,
        aten.linalg_lu_factor_ex,
    ):
        yield call(op.default, a)
    older = filter(None, [packet_named("aten", "cholesky")])
    for op in (aten.linalg_cholesky, *older, aten.linalg_cholesky_ex, aten._linalg_eigh, aten.cholesky_inverse):
        yield call(op.default, spd)
    for op in (aten.linalg_eig, aten._linalg_eigvals):  # the phase of an eigenvector is anybody's
        yield call(op.default, a, gradients=False)
    yield call(aten.linalg_pinv.atol_rtol_tensor, spd)
    for shape in ((6, 3, 2), (1, 3, 2), (6, 3), (2, 6, 3, 3)):
        yield call(aten.linalg_solve.default, a, normal(*shape))
    yield call(aten.linalg_solve.default, normal(6, 3, 3), normal(3, 3))
    yield call(aten.linalg_solve.default, normal(3, 3), normal(6, 3, 2))
    yield call(aten._linalg_solve_ex.default, a, normal(6, 2, 3), left=False)
    yield call(aten.linalg_solve_triangular.default, a, normal(2, 1, 3, 2), upper=True)
    yield call(aten.cholesky_solve.default, normal(6, 3, 2), spd)
    yield call(aten.triangular_solve.default, normal(6, 3, 2), a)
    lu, pivots = torch.linalg.lu_factor(a)
    yield call(aten.linalg_lu_solve.default, lu, pivots, normal(6, 3, 2))
    yield call(aten.lu_unpack.default, lu, pivots)
    yield call(aten.linalg_householder_product.default, a, normal(6, 2))
    yield call(aten.linalg_cross.default, normal(6, 3), normal(6, 3))
    yield call(aten.linalg_cross.default, normal(3, 6), normal(3, 1), dim=0)


def diagonals() -> Iterator[Sample]:
    """And distances, of which the diagonal is zero."""
    for op in (aten.diagonal.default, aten.diagonal_copy.default):
        yield call(op, normal(6, 4))
        yield call(op, normal(2, 6, 6), -1, 1, 2)
        yield call(op, normal(6, 2, 6), 1, 0, -1)
    yield call(aten.diag_embed.default, normal(6, 4))
    yield call(aten.diag_embed.default, normal(2, 6), 1, 0, -1)
    yield call(aten.diagonal_scatter.default, normal(2, 6, 6), normal(2, 5), -1, 1, 2)
    yield call(aten.diagonal_scatter.default, normal(6, 2, 6), normal(2, 6), 0, 0, 2)
    yield call(aten.trace.default, normal(6, 6))
    yield call(aten.block_diag.default, [normal(6, 2), normal(2, 6)])
    x = normal(6, 4)
    yield call(aten.cdist.default, x, x, 2.0, 2)
    yield call(aten.cdist.default, normal(2, 6, 4), normal(1, 12, 4), 1.0)
    yield call(aten.pdist.default, x)


def _definite(count: int, size: int) -> Tensor:
    x = normal(count, size, size)
    return x @ x.mT + torch.eye(size, dtype=torch.float64)
