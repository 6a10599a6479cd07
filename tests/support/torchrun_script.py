"""Started by torchrun in tests/runtime/test_launch.py: our launcher, which runs on the rank that is there, and
without it a step on a mesh of whatever ranks there are.

python -m torch.distributed.run --nproc-per-node 2 tests/support/torchrun_script.py FOLDER
"""

from __future__ import annotations

import atexit
import copy
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.runtime.training.launch import launch

atexit.register(gc.freeze)  # a last look for garbage would take a second


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(torch.relu(self.first(x))) ** 2).mean()


def total(x: Tensor) -> tuple[int, float]:
    groups = Groups(init_mesh("cpu", dp=2))
    y = x * (groups.rank + 1)
    dist.all_reduce(y, group=groups.group("dp"))
    return groups.rank, y.item()


def main(folder: Path) -> None:
    ((rank, result),) = launch(total, 7, (torch.tensor(1.0),))
    assert result == 3
    (folder / f"fine{rank}").touch()
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(4, 4).double()
    expected = model(x)
    expected.backward()
    mesh = autopar.init_mesh("cpu", timeout=30, dp=2)
    part = x.chunk(2)[dist.get_rank()]
    parallel = autopar.parallelize(copy.deepcopy(model), mesh, example_batch={"x": part}, zero=3)
    loss = parallel.train_step(part)
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    for name, gradient in parallel.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=0, atol=1e-12)
    (folder / f"rank{dist.get_rank()}.ok").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
