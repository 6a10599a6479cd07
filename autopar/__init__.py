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
    from autopar.ac_policies import AC_POLICIES
    from autopar.api import parallelize, serve
    from autopar.integrations.monitor import monitor
    from autopar.options import Options
    from autopar.plan import Plan
    from autopar.precision import Precision
    from autopar.runtime.exec.replay_check import BitsDiffer
    from autopar.runtime.fault.errors import error_context
    from autopar.runtime.inputs.padding import PaddingBuckets
    from autopar.runtime.mesh.process_groups import dp_rank_and_size, init_mesh
    from autopar.runtime.mesh.roles import init_roles
    from autopar.runtime.module.parallel_module import ParallelModule
    from autopar.runtime.optim.grad_scaler import GradScaler
    from autopar.runtime.replicas.replicas import Replicas
    from autopar.runtime.training.document_packer import packer
    from autopar.runtime.training.ema import ema
    from autopar.runtime.training.expert_bias import balance_experts
    from autopar.runtime.training.launch import launch
    from autopar.runtime.training.load import load
    from autopar.runtime.training.sampler import sampler
    from autopar.runtime.training.save import save
    from autopar.serving.sampling_params import Sampling
    from autopar.verification import verify

__version__ = VERSION
__all__ = [
    "PaddingBuckets",
    "AC_POLICIES",
    "BitsDiffer",
    "GradScaler",
    "Options",
    "ParallelModule",
    "Plan",
    "Precision",
    "Replicas",
    "Sampling",
    "balance_experts",
    "dp_rank_and_size",
    "ema",
    "init_mesh",
    "init_roles",
    "launch",
    "load",
    "monitor",
    "packer",
    "parallelize",
    "error_context",
    "sampler",
    "save",
    "serve",
    "verify",
]

_HOME = {
    "PaddingBuckets": "autopar.runtime.inputs.padding",
    "AC_POLICIES": "autopar.ac_policies",
    "BitsDiffer": "autopar.runtime.exec.replay_check",
    "GradScaler": "autopar.runtime.optim.grad_scaler",
    "Options": "autopar.options",
    "ParallelModule": "autopar.runtime.module.parallel_module",
    "Plan": "autopar.plan",
    "Precision": "autopar.precision",
    "Replicas": "autopar.runtime.replicas.replicas",
    "Sampling": "autopar.serving.sampling_params",
    "balance_experts": "autopar.runtime.training.expert_bias",
    "dp_rank_and_size": "autopar.runtime.mesh.process_groups",
    "ema": "autopar.runtime.training.ema",
    "init_mesh": "autopar.runtime.mesh.process_groups",
    "init_roles": "autopar.runtime.mesh.roles",
    "launch": "autopar.runtime.training.launch",
    "load": "autopar.runtime.training.load",
    "monitor": "autopar.integrations.monitor",
    "packer": "autopar.runtime.training.document_packer",
    "parallelize": "autopar.api",
    "error_context": "autopar.runtime.fault.errors",
    "sampler": "autopar.runtime.training.sampler",
    "save": "autopar.runtime.training.save",
    "serve": "autopar.api",
    "verify": "autopar.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
