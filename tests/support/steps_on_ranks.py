"""A training step as users call it, on a rank, beside one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

import autopar
from autopar.testing.reference import eager


def step_on_rank(
    model: nn.Module, batch: Mapping[str, Tensor], sizes: Mapping[str, int], options: Mapping[str, Any]
) -> tuple[float, autopar.ParallelModule]:
    """(largest error of the loss and the gradients, the parallel model). Each dp rank passes its own rows."""
    expected = eager(model, batch)
    mesh = autopar.init_mesh("cpu", 120.0, **sizes)
    at, parts = autopar.dp_rank_and_size(mesh)
    mine = {name: x.chunk(parts)[at] for name, x in batch.items()}
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True, example_batch=mine, **options)
    loss, found = float(parallel.train_step(**mine)), parallel.full_gradients()
    wanted = {n: g for n, g in expected.gradients.items() if g is not None}
    worst = max(abs(loss - expected.loss), *(float((found[n] - g).abs().max()) for n, g in wanted.items()))
    return worst, parallel
