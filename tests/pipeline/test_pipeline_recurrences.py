"""Recurrences over a sharded sequence in a pipeline: on real ranks the loss and gradients of one process.

The models of `tests/support/recurrent_models.py` with two layers, with every schedule kind that splits backwards or
does not, ZeRO-3, tp where heads divide, and recomputed activations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.recurrent_models import CONFIGS, recurrent
from tests.support.steps_on_ranks import step_on_rank

LIMIT = 1e-10
LAYERS: dict[str, dict[str, Any]] = {"mamba2": {"num_hidden_layers": 2}, "mamba": {"num_hidden_layers": 2}}
LAYERS["falcon_h1"] = {"num_hidden_layers": 2}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "1f1b": ({"pp": 2, "cp": 2}, {"schedule": "1f1b"}),
    "zb_h1": ({"pp": 2, "cp": 2}, {"schedule": "zb_h1"}),
    "selective": ({"pp": 2, "cp": 2}, {"schedule": "1f1b", "activation_checkpoint": "selective"}),
    "full": ({"pp": 2, "cp": 2}, {"schedule": "zb_h1", "activation_checkpoint": "full"}),
    "zero": ({"pp": 2, "cp": 2}, {"schedule": "1f1b", "zero": 3}),
    "cp=4": ({"cp": 4}, {"zero": 3, "activation_checkpoint": "selective"}),
    "tp": ({"cp": 2, "tp": 2}, {"zero": 3, "activation_checkpoint": "full"}),
}
FEW = {("qwen3_next", "zb_h1"), ("mamba2", "full"), ("rwkv", "zero")}


def stepped(name: str, sizes: dict[str, int], options: dict[str, Any]) -> tuple[float, float]:
    """On a rank: the largest error of the loss and the gradients, and the share of the FLOPs that cp shards."""
    given = {"cp_recurrences": "channels", "microbatches": 4 if "pp" in sizes else 1, **options}
    worst, parallel = step_on_rank(*recurrent(name, **LAYERS.get(name, {})), sizes, given)
    return worst, min(share.flops or 0.0 for share in parallel.plan.shares if share.axis == "cp")


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=() if (name, case) in FEW else pytest.mark.full)
        for name in CONFIGS
        for case in CASES
    ],
)
def test_steps_are_those_of_one_process(name: str, case: str) -> None:
    sizes, options = CASES[case]
    found = run_ranks(torch.Size(sizes.values()).numel(), stepped, name, sizes, options, timeout=240)
    assert max(worst for worst, _ in found) < LIMIT
    assert min(share for _, share in found) > 0.98
