"""`torch.distributed.checkpoint.async_save` of a parallel model and its optimizer: what is written is the state of the
call, whatever the training does meanwhile."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import autopar
from autopar.runtime.params.chunks import StagedShard
from autopar.runtime.params.sharded_tensor import ShardedTensor
from tests.support.ranks import run_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))) * self.scale, y)


class Run:
    """A model with an optimizer; ``Stateful``, as torch calls what has a state_dict and takes it."""

    def __init__(self, sizes: dict[str, int]) -> None:
        mesh = autopar.init_mesh("cpu", 30.0, **sizes)
        part, parts = autopar.dp_rank_and_size(mesh)
        g = torch.Generator().manual_seed(0)
        self.batch = {
            name: torch.randn(8, n, generator=g).double().chunk(parts)[part] for name, n in (("x", 8), ("y", 4))
        }
        torch.manual_seed(0)
        options: dict[str, Any] = {"microbatches": 2} if "pp" in sizes else {"zero": 3}
        self.model = autopar.parallelize(Model().double(), mesh, example_batch=self.batch, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for _ in range(2):
            self.step()

    def step(self) -> float:
        loss = float(self.model.train_step(**self.batch))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def plain_state(self) -> dict[str, Any]:
        names = {id(p): name for name, p in self.model.named_parameters()}
        states = {f"{names[id(p)]}.{k}": x for p, state in self.optimizer.state.items() for k, x in state.items()}
        return {"model": self.model.state_dict(), "optimizer": states}

    def values(self) -> dict[str, Tensor]:
        state = self.plain_state()
        found = {f"{kind}.{name}": x for kind in state for name, x in state[kind].items()}
        return {name: (x.full_tensor() if isinstance(x, ShardedTensor) else x).clone() for name, x in found.items()}


def saved_and_loaded(run: Run, state: Callable[[], Any], folder: Path, **how: Any) -> None:
    before = run.values()
    found: Any = dcp.async_save(state(), checkpoint_id=folder, **how)
    if isinstance(found, AsyncSaveResponse):  # of a stager with a thread
        found.staging_completion.result()
        found = found.upload_completion
    loss = run.step()
    found.result()
    changed = run.values()
    assert not any(torch.equal(before[name], changed[name]) for name in before if "scale" not in name)
    target = state()
    dcp.load(target, checkpoint_id=folder)
    if "optimizer" in target and state == run.state_dict:
        run.load_state_dict(target)
    for name, x in run.values().items():
        assert torch.equal(before[name], x), name
    assert run.step() == loss


def stagers() -> dict[str, Any]:
    options = {"shared memory": (False, True, False, False), "a thread that copies": (False, False, True, False)}
    return {
        "torch's default": None,
        "blocking": BlockingAsyncStager(),
        **{name: DefaultStager(StagingOptions(*given)) for name, given in options.items()},
    }


def in_every_way(sizes: dict[str, int], folder: str) -> None:
    run = Run(sizes)
    for name, stager in stagers().items():
        states = (run.plain_state, run.state_dict, lambda: {"run": run})
        for i, state in enumerate(states if stager is None else states[:1]):
            saved_and_loaded(run, state, Path(folder, f"{name}-{i}"), async_stager=stager)
    writer = dcp.FileSystemWriter(Path(folder, "writer"))  # itself a stager
    saved_and_loaded(run, run.plain_state, Path(folder, "writer"), storage_writer=writer)


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_the_state_of_the_call_is_written(sizes: dict[str, int], tmp_path: Path) -> None:
    run_ranks(torch.Size(sizes.values()).numel(), in_every_way, sizes, str(tmp_path))


def pickled(folder: str) -> int:
    """What a process that writes gets."""
    run = Run({"dp": 2})
    staged = DefaultStager(StagingOptions(False, False, False, False)).stage(run.plain_state())
    assert not isinstance(staged, dict) or type(staged["model"]["up.weight"]) is StagedShard
    if dist.get_rank() == 0:  # alone: nothing is gathered
        staged = pickle.loads(pickle.dumps(staged))
    before = run.values()
    run.step()
    dcp.save(staged, checkpoint_id=folder)
    target = run.plain_state()
    dcp.load(target, checkpoint_id=folder)
    assert all(torch.equal(before[name], x) for name, x in run.values().items())
    assert isinstance(staged, dict)
    return int(staged["model"]["up.weight"].held().numel())


def test_what_is_staged_is_pickled_as_shards(tmp_path: Path) -> None:
    assert run_ranks(2, pickled, str(tmp_path)) == [64, 64]


def by_a_process(folder: str) -> None:
    run = Run({"dp": 2})
    for state in (run.plain_state, lambda: {"run": run}):
        how = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        saved_and_loaded(run, state, Path(folder, state.__name__.strip("<>")), **how)


@pytest.mark.full
def test_a_process_writes(tmp_path: Path) -> None:
    """Under torchrun: ranks of `autopar.launch` are daemons, which Python gives no processes of their own."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.runtime.test_async_distributed_checkpoints", str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    autopar.launch(by_a_process, nproc=2, args=[sys.argv[1]], device="cpu")
