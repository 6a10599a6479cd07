"""autopar: a parallelizing compiler for PyTorch models.

mesh  = autopar.init_mesh(dp=2, tp=2)
model = autopar.parallelize(model, mesh)
loss  = model.train_step(**batch)

Names are loaded when they are first used, so that the command line can show its help without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autopar.version import VERSION

if TYPE_CHECKING:
    from autopar.api import parallelize
    from autopar.checkpoint_policies import CHECKPOINTS
    from autopar.options import Options
    from autopar.plan import Plan
    from autopar.precision import Precision
    from autopar.runtime.buckets import Buckets
    from autopar.runtime.ema import ema
    from autopar.runtime.failures import reporting
    from autopar.runtime.groups import data_part, init_mesh
    from autopar.runtime.launch import launch
    from autopar.runtime.loading import load
    from autopar.runtime.module import ParallelModule
    from autopar.runtime.router_bias import balance_experts
    from autopar.runtime.sampling import sampler
    from autopar.runtime.saving import save
    from autopar.runtime.scaler import GradScaler
    from autopar.runtime.simulated_start import simulate_start
    from autopar.verification import verify

__version__ = VERSION
__all__ = [
    "Buckets",
    "CHECKPOINTS",
    "GradScaler",
    "Options",
    "ParallelModule",
    "Plan",
    "Precision",
    "balance_experts",
    "data_part",
    "ema",
    "init_mesh",
    "launch",
    "load",
    "parallelize",
    "reporting",
    "sampler",
    "save",
    "simulate_start",
    "verify",
]

_HOME = {
    "Buckets": "autopar.runtime.buckets",
    "CHECKPOINTS": "autopar.checkpoint_policies",
    "GradScaler": "autopar.runtime.scaler",
    "Options": "autopar.options",
    "ParallelModule": "autopar.runtime.module",
    "Plan": "autopar.plan",
    "Precision": "autopar.precision",
    "balance_experts": "autopar.runtime.router_bias",
    "data_part": "autopar.runtime.groups",
    "ema": "autopar.runtime.ema",
    "init_mesh": "autopar.runtime.groups",
    "launch": "autopar.runtime.launch",
    "load": "autopar.runtime.loading",
    "parallelize": "autopar.api",
    "reporting": "autopar.runtime.failures",
    "sampler": "autopar.runtime.sampling",
    "save": "autopar.runtime.saving",
    "simulate_start": "autopar.runtime.simulated_start",
    "verify": "autopar.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
