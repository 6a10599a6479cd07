"""One training step of a small model of every family of transformers, on two real ranks beside one process."""

from __future__ import annotations

import functools
import math
import re
import sys
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autopar
from autopar.errors import is_refusal
from autopar.ir.batch import part_of_batch
from autopar.ir.mesh import Mesh
from autopar.runtime.module.parallel_module import step_seed
from autopar.testing.reference import LIMIT, compare_step, eager
from tests.outside import small_configs
from tests.outside.family_batches import batches
from tests.outside.family_facts import MORE
from tests.support.ranks import close_pools, run_ranks

SEED = step_seed(0, 1)  # of the first step
MESHES = {"dp=2": {"dp": 2}, "tp=2": {"tp": 2}}


class OwnLoss(nn.Module):
    """A model that makes no loss, with one of all that it returns."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.config = None

    def forward(self, **inputs: Any) -> Tensor:
        found = [x for x in pytree.tree_leaves(self.body(**inputs)) if isinstance(x, Tensor) and x.requires_grad]
        return torch.stack([(x * x).mean() for x in found if x.is_floating_point()]).sum()


@functools.lru_cache(1)
def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small model in float64 in train mode, and its batch. Raises what transformers raises where none runs."""
    kind, said = getattr(transformers, name), []
    for how in (small_configs.small, small_configs.scaled, small_configs.shallow):
        try:
            return _made(kind, how(kind.config_class, MORE.get(name)))
        except Exception as error:
            said.append(f"{how.__name__}: {type(error).__name__}: {error}")
    raise RuntimeError("; ".join(said))


MOST = 20e6


def _made(kind: Any, config: Any) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    assert count < MOST, f"{count:.1e} parameters"
    torch.manual_seed(0)
    model = kind(config).double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p), alpha=0.05)
    said = []
    for batch in batches(model):
        for whole in (model, OwnLoss(model)):
            try:
                assert math.isfinite(eager(whole, batch, SEED).loss), "the loss is no number"
                return whole, batch
            except Exception as error:
                said.append(f"{sorted(batch)}: {type(error).__name__}: {error}")
    raise RuntimeError("; ".join(said) or "no batch")


def on_rank(name: str, sizes: dict[str, int]) -> tuple[str, str]:
    """("exact", ""), ("refused", words), ("wrong", ...) or ("error", traceback)."""
    warnings.simplefilter("ignore")
    model, batch = made(name)
    mesh = Mesh.of(**sizes)
    at = mesh.dp_rank_and_size(mesh.coordinate(dist.get_rank()))
    part = part_of_batch(batch, dict.fromkeys(batch, 0), mesh.data_size, at, 1, 1)
    try:
        expected = eager(model, batch, SEED)
        groups = autopar.init_mesh("cpu", 60.0, **sizes)
        parallel = autopar.parallelize(model, groups, lift_to_float64=True, example_batch=part)
        loss = parallel.train_step(**part)
        found = parallel.full_gradients()
        total = sum(float(x) for x in (loss if isinstance(loss, tuple) else (loss,)))
        errors = compare_step(total, found, expected, parallel.parameter_specs, lambda spec, whole: whole)
    except Exception as error:
        return ("refused", str(error)) if is_refusal(error) else ("error", traceback.format_exc())
    largest = max([1.0, abs(expected.loss), *(float(g.abs().max()) for g in expected.gradients.values() if g is not None and g.numel())])
    return ("exact", "") if errors.worst < LIMIT * largest else ("wrong", str(errors))


def outcome(name: str, mesh: str) -> tuple[str, str]:
    try:
        found = run_ranks(2, on_rank, name, MESHES[mesh], timeout=200.0)
    except AssertionError as error:
        return "error", str(error)
    worst = next((x for x in found if x[0] != "exact"), found[0])
    if worst[0] == "error":
        close_pools()
    return worst
