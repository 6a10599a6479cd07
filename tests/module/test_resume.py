"""What resumes goes on as if it had not stopped: dropout masks are those of the next step, on all ways of the state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import autopar
from tests.support.ranks import run_ranks

WHOLE = StateDictOptions(full_state_dict=True)


class Dropped(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.head(self.drop(torch.relu(self.first(x)))), y)


def put(sizes: dict[str, int], seed: int) -> tuple[autopar.ParallelModule, dict[str, Tensor]]:
    torch.manual_seed(seed)
    model = Dropped().double()
    g = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(4, 8, generator=g).double(), "y": torch.randn(4, 4, generator=g).double()}
    options: dict[str, Any] = {"schedule": "1f1b"} if "pp" in sizes else {}
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)
    return autopar.parallelize(model, mesh, example_batch=batch, microbatches=2, **options), batch


def read_back(parallel: autopar.ParallelModule, folder: str) -> None:
    state = {"model": parallel.state_dict(), "steps": 0}
    dcp.load(state, checkpoint_id=folder)
    parallel.load_state_dict(state["model"])
    parallel.training_steps = state["steps"]


def resumed(sizes: dict[str, int], folder: str) -> list[str]:
    """Save after two steps in every way; each must give the third step's loss and gradients to the bit."""
    parallel, batch = put(sizes, seed=0)
    for _ in range(2):
        parallel.train_step(**batch)
    rank = dist.get_rank()
    parallel.save_pretrained(f"{folder}/hf", max_shard_size="300B")
    steps = parallel.training_steps  # which torch's ways for distributed states leave out
    dcp.save({"model": parallel.state_dict(), "steps": steps}, checkpoint_id=f"{folder}/dcp")
    dcp.save({"model": get_model_state_dict(parallel), "steps": steps}, checkpoint_id=f"{folder}/helpers")
    torch.save(parallel.full_state_dict(), f"{folder}/whole{rank}")
    torch.save(parallel.state_dict(), f"{folder}/pieces{rank}")
    kept = copy.deepcopy(parallel.state_dict())
    whole = {n: v.clone() for n, v in get_model_state_dict(parallel, options=WHOLE).items()} if "dp" in sizes else None
    plain = Dropped().double()
    plain.load_state_dict(parallel.state_dict())  # has its names, and no others
    plain.load_state_dict(torch.load(f"{folder}/pieces{rank}"), assign=True)
    parallel.zero_grad()
    expected = [float(parallel.train_step(**batch)), parallel.full_gradients()]

    def in_place() -> None:
        dcp.load({"model": again.state_dict()}, checkpoint_id=f"{folder}/dcp")
        again.training_steps = steps

    def set_whole() -> None:
        set_model_state_dict(again, dict(whole or {}), options=WHOLE)
        again.training_steps = steps

    ways: dict[str, Callable[[], None]] = {
        "files": lambda: again.load_pretrained(f"{folder}/hf"),
        "distributed": lambda: read_back(again, f"{folder}/dcp"),
        "in place": in_place,
        "helpers": lambda: read_back(again, f"{folder}/helpers"),
        "copied pieces": lambda: again.load_state_dict(kept),
        "filed pieces": lambda: again.load_state_dict(torch.load(f"{folder}/pieces{rank}")),
        "whole": lambda: again.load_state_dict(torch.load(f"{folder}/whole{rank}")),
    }
    if whole is not None:
        ways["set whole"] = set_whole
    again, _ = put(sizes, seed=1)
    wrong = []
    for name, way in ways.items():
        again.load_state_dict({n: torch.zeros_like(v) for n, v in again.full_state_dict().items()})
        again.training_steps = 0
        way()
        again.zero_grad()
        count = again.training_steps
        found = [float(again.train_step(**batch)), again.full_gradients()]
        same = found[0] == expected[0] and all(torch.equal(found[1][n], g) for n, g in expected[1].items())
        if not same or count != 2:
            wrong.append(f"{name}: steps {count}, loss {found[0]} against {expected[0]}")
    again.load_state_dict(kept)
    again.training_steps = 0
    assert float(again.train_step(**batch)) != expected[0], "the masks do not depend on the step"
    return wrong


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"pp": 2}], ids=str)
def test_masks_go_on(sizes: dict[str, int], tmp_path: Path) -> None:
    assert run_ranks(2, resumed, sizes, str(tmp_path)) == [[], []]


def mistakes() -> list[str]:
    parallel, batch = put({"dp": 2}, seed=0)
    parallel.training_steps = dist.get_rank()
    found = []
    state = parallel.full_state_dict()
    for broken in (state, parallel.state_dict()):
        changed = {n: v if n != "head.weight" else v.to(torch.int8) for n, v in broken.items()}
        with pytest.raises(ValueError) as refused:
            parallel.load_state_dict(changed)
        found.append(str(refused.value))
    with pytest.raises(ValueError) as differs:
        parallel.train_step(**batch)
    return [*found, str(differs.value)]


def test_integers_for_floats_and_steps_that_differ_are_refused() -> None:
    for whole, pieces, differs in run_ranks(2, mistakes):
        assert "head.weight is torch.int8, needs torch.float64" in whole
        assert "head.weight is torch.int8, needs torch.float64" in pieces
        assert "the number of the step: rank 1: 2; against rank 0: 1" in differs
