"""autopar: a parallelizing compiler for PyTorch models.

mesh  = autopar.init_mesh(dp=2, tp=2)
model = autopar.parallelize(model, mesh)
loss  = model.train_step(**batch)
"""

from autopar.api import parallelize
from autopar.options import Options
from autopar.plan import Plan
from autopar.runtime.failures import reporting
from autopar.runtime.groups import init_mesh
from autopar.runtime.launch import launch
from autopar.runtime.module import ParallelModule
from autopar.verify import verify

__version__ = "0.1.0"
__all__ = ["Options", "ParallelModule", "Plan", "init_mesh", "launch", "parallelize", "reporting", "verify"]
