"""`clip_grad_norm_` of a model on a mesh: torch's norms and gradients, with one collective."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from autopar.runtime.comm.collectives import all_reduce
from autopar.runtime.optim import grad_clipping
from autopar.runtime.optim.grad_clipping import clip_gradients
from autopar.runtime.params.sharded_tensor import ShardedTensor
from tests.runtime.test_state import gradients, make_specs, model_on, wholes
from tests.support.ranks import run_ranks


def clipped(sizes: dict[str, int], norm_type: float) -> tuple[list[Any], list[str]]:
    """On a rank: norms before and after, the gradients that are left, and the axes of every all-reduce."""
    groups, params = model_on(sizes)
    gradients(groups, params, 0)
    reduced: list[str] = []
    with patch.object(
        grad_clipping, "all_reduce", lambda g, n, axes, op: reduced.append(axes) or all_reduce(g, n, axes, op)
    ):
        specs = make_specs(sizes.get("tp", 1))
        norms = [float(clip_gradients(params, specs, groups, 0.5, norm_type)) for _ in range(2)]
    return [norms, {name: p.grad.full_tensor() for name, p in params.items()}], reduced  # type: ignore[union-attr]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 2.5, float("inf")])
def test_clipping_over_all_ranks_is_one_collective(norm_type: float) -> None:
    single = {name: nn.Parameter(value.clone()) for name, value in wholes(0).items()}
    for name, value in wholes(100).items():
        single[name].grad = value.clone()
    expected = [nn.utils.clip_grad_norm_(single.values(), 0.5, norm_type=norm_type).item() for _ in range(2)]
    for sizes, axes in (({"dp": 2, "tp": 2}, "dp,tp"), ({"tp": 2, "dp": 2}, "tp,dp"), ({"tp": 4}, "tp")):
        for (norms, left), reduced in run_ranks(4, clipped, sizes, norm_type):
            torch.testing.assert_close(norms, expected, rtol=1e-12, atol=0)
            assert reduced == [axes] * 2
            for name, parameter in single.items():
                torch.testing.assert_close(left[name], parameter.grad, rtol=1e-11, atol=0)


def with_whole_gradients() -> list[float]:
    groups, params = model_on({"tp": 2})
    gradients(groups, params, 0)
    found = [float(clip_gradients(params, make_specs(), groups, 0.5))]
    for name, p in params.items():
        p.grad = wholes(100)[name]
        assert isinstance(p.grad, ShardedTensor) and p.grad.cuts == p.cuts  # type: ignore[attr-defined]
    return [*found, float(clip_gradients(params, make_specs(), groups, 0.5))]


def test_whole_gradients_are_cut_where_they_are_set() -> None:
    for one, other in run_ranks(2, with_whole_gradients):
        assert one == pytest.approx(other, rel=1e-12)
