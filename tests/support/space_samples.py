"""Sample calls of operators over space, for `tests/support/rule_samples.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from autopar.ops.token_windows import shift, token_conv1d
from autopar.testing.soundness import Sample, call
from tests.support.pointwise_samples import complex_, normal

aten = torch.ops.aten


def spatial() -> Iterator[Sample]:
    yield from _convolutions()
    yield from token_windows()
    yield from _norms()
    yield from _pools()
    yield from _resampled()
    yield from _windows()
    yield from _pixels()
    yield from _transforms()


def _convolutions() -> Iterator[Sample]:
    for groups in (1, 2, 6):
        yield call(aten.conv1d.default, normal(2, 12, 5), normal(12, 12 // groups, 3), None, [2], [1], [1], groups)
        weight = normal(12, 12 // groups, 3)
        yield call(aten.conv_transpose1d.default, normal(2, 12, 3), weight, None, [2], [1], [1], groups)
    yield call(aten.conv1d.default, normal(12, 5), normal(12, 12, 3), normal(12))
    yield call(aten.conv1d.default, normal(12, 5), normal(12, 6, 3), normal(12), [1], [0], [1], 2)
    yield call(aten.conv_transpose1d.default, normal(12, 5), normal(12, 6, 3), normal(12), [1], [0], [0], 2)
    yield call(aten.conv2d.default, normal(6, 4, 5, 4), normal(6, 4, 2, 2), normal(6))
    yield call(aten.conv2d.default, normal(2, 12, 4, 4), normal(12, 1, 3, 3), normal(12), [1, 1], [1, 1], [1, 1], 12)
    yield call(aten.conv3d.default, normal(2, 4, 3, 3, 3), normal(6, 4, 2, 2, 2))
    yield call(aten.conv_transpose2d.input, normal(6, 4, 3, 2), normal(4, 6, 2, 2), normal(6), [2, 2])
    yield call(aten.conv_transpose2d.input, normal(2, 4, 3, 2), normal(4, 6, 2, 2), normal(12), [1, 1], [0], [0], 2)
    yield call(aten.conv_transpose3d.input, normal(2, 4, 2, 2, 2), normal(4, 2, 2, 2, 2))


def token_windows() -> Iterator[Sample]:
    """What keeps the number of tokens. Reversals; shifts and convolutions: a halo within a chunk, as long as one,
    longer."""
    yield call(aten.flip.default, normal(2, 12, 3), [1])
    yield call(aten.flip.default, normal(2, 12, 3), [-2, 0])
    for by in (1, -2, 5, -7):
        yield call(shift, normal(2, 12, 3), 1, by, False)
    yield call(shift, normal(2, 12), 1, 2, True)
    yield call(shift, normal(2, 12), 1, -4, True)
    yield call(token_conv1d, normal(2, 4, 12), normal(4, 1, 4), normal(4), 3, 0, 1, 4)
    yield call(token_conv1d, normal(2, 4, 12), normal(6, 2, 3), None, 1, 1, 1, 2)
    yield call(token_conv1d, normal(2, 4, 12), normal(4, 1, 4), normal(4), 0, 9, 3, 4)
    yield call(token_conv1d, normal(2, 4, 12), normal(4, 4, 3), normal(4), 4, 0, 2, 1)


def scans() -> Iterator[Sample]:
    yield call(aten.cumsum.default, normal(2, 12, 3), 1)
    yield call(aten.cumsum.default, normal(12, 2), -2)
    yield call(aten.cumsum.default, torch.arange(24).view(2, 12), 1)
    yield call(aten.cumprod.default, normal(2, 12), 1)
    yield call(aten.cumprod.default, normal(2, 12) * (torch.arange(12) != 5), 1)
    yield call(aten.logcumsumexp.default, normal(2, 12), 1)


def _norms() -> Iterator[Sample]:
    yield call(aten.group_norm.default, normal(6, 4, 3), 2, normal(4), normal(4))
    yield call(aten.group_norm.default, normal(6, 12, 2, 2), 6, normal(12))
    yield call(aten.group_norm.default, normal(6, 6), 1)
    yield call(aten.prelu.default, normal(6, 6, 2), normal(6))
    yield call(aten.prelu.default, normal(6, 6), normal(1))
    yield call(aten.prelu.default, normal(6), normal(1))
    yield call(aten.prelu.default, normal(6, 6), normal())
    yield call(aten._prelu_kernel.default, normal(6, 6, 2), normal(1, 6, 1))


def _pools() -> Iterator[Sample]:
    for op in (aten.max_pool1d, aten.avg_pool1d, aten.max_pool1d_with_indices):
        yield call(op.default, normal(6, 2, 6), [2])
    for op in (aten.max_pool2d.default, aten.max_pool2d_with_indices.default, aten.avg_pool2d.default):
        yield call(op, normal(2, 6, 6, 6), [2, 2])
        yield call(op, normal(6, 6, 6), [2, 2])
    for op in (aten.max_pool3d, aten.max_pool3d_with_indices, aten.avg_pool3d):
        yield call(op.default, normal(2, 2, 2, 2, 2), [2, 1, 2])
    for op in (aten.adaptive_avg_pool1d, aten.adaptive_max_pool1d):
        yield call(op.default, normal(6, 2, 6), [6])
    for op in (aten.adaptive_avg_pool2d, aten._adaptive_avg_pool2d, aten.adaptive_max_pool2d):
        yield call(op.default, normal(2, 6, 6, 6), [2, 6])
    for op in (aten.adaptive_avg_pool3d, aten._adaptive_avg_pool3d, aten.adaptive_max_pool3d):
        yield call(op.default, normal(2, 2, 2, 2, 2), [1, 2, 1])


def _resampled() -> Iterator[Sample]:
    """(operator, dims of space, arguments between the size and the scales)"""
    kinds: list[tuple[Any, int, tuple[Any, ...]]] = [
        (aten.upsample_nearest1d, 1, ()),
        (aten.upsample_nearest2d, 2, ()),
        (aten.upsample_nearest3d, 3, ()),
        (aten._upsample_nearest_exact1d, 1, ()),
        (aten._upsample_nearest_exact2d, 2, ()),
        (aten._upsample_nearest_exact3d, 3, ()),
        (aten.upsample_linear1d, 1, (False,)),
        (aten.upsample_bilinear2d, 2, (True,)),
        (aten.upsample_trilinear3d, 3, (False,)),
        (aten.upsample_bicubic2d, 2, (False,)),
        (aten._upsample_bilinear2d_aa, 2, (False,)),
        (aten._upsample_bicubic2d_aa, 2, (False,)),
    ]
    for op, space, between in kinds:
        yield call(op.default, normal(2, 6, *[2] * space), [4] * space, *between)
        yield call(op.vec, normal(2, 6, *[2] * space), None, *between, [2.0] * space)


def _windows() -> Iterator[Sample]:
    for dim, size, step in ((1, 2, 2), (1, 3, 1), (-1, 2, 2), (0, 6, 1)):
        yield call(aten.unfold.default, normal(6, 6, 4), dim, size, step)
    how = ([1, 1], [0, 0], [2, 2])
    yield call(aten.im2col.default, normal(2, 6, 4, 4), [2, 2], *how)
    yield call(aten.im2col.default, normal(6, 4, 4), [2, 2], *how)
    yield call(aten.col2im.default, normal(2, 24, 4), [4, 4], [2, 2], *how)
    yield call(aten.col2im.default, normal(24, 4), [4, 4], [2, 2], *how)


def _pixels() -> Iterator[Sample]:
    yield call(aten.pixel_shuffle.default, normal(6, 8, 2, 3), 2)
    yield call(aten.pixel_shuffle.default, normal(8, 1, 6), 2)
    yield call(aten.pixel_unshuffle.default, normal(6, 2, 4, 6), 2)


def _transforms() -> Iterator[Sample]:
    yield call(aten._fft_r2c.default, normal(6, 2, 6), [2], 0, True)
    yield call(aten._fft_r2c.default, normal(6, 2, 6), [0, 2], 0, False)
    yield call(aten._fft_c2r.default, complex_(6, 4, 2), [1], 0, 6)
    yield call(aten._fft_c2c.default, complex_(6, 4, 2), [1], 0, True)
