"""Which GPU a rank takes, on machines that are not there: torch.cuda is a stand-in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend

import autopar
from autopar.runtime.mesh.devices import RANKS_SHARE_GPUS, choose_device
from tests.support.ranks import close_pools, run_ranks

BOTH = "cpu:gloo,cuda:nccl"


@dataclass
class Gpus:
    """What torch.cuda says on a machine that shows this process ``count`` GPUs."""

    count: int
    uuids: tuple[str, ...] = ()
    current: int = 0

    def set_device(self, index: int) -> None:
        assert 0 <= index < self.count, f"CUDA error: invalid device ordinal {index}"
        self.current = index

    @contextlib.contextmanager
    def shown(self, environment: dict[str, str]) -> Iterator[None]:
        says: dict[str, Any] = {
            "is_available": lambda: self.count > 0,
            "device_count": lambda: self.count,
            "current_device": lambda: self.current,
            "set_device": self.set_device,
            "get_device_properties": lambda device: SimpleNamespace(uuid=self.uuids[device.index]),
        }
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        with contextlib.ExitStack() as stack:
            for name, value in says.items():
                stack.enter_context(patch.object(torch.cuda, name, value))
            stack.enter_context(patch.dict(os.environ, kept | environment, clear=True))
            yield


def chosen(
    gpus: Gpus, device: Any = "cuda", backend: str | None = None, bound: torch.device | None = None, **environment: str
) -> torch.device:
    """The device of a rank; ``backend``: of the group that the user has made."""
    with gpus.shown(environment):
        if backend is None:
            return choose_device(device)
        dist.init_process_group("fake", rank=int(environment.get("RANK", "0")), world_size=8, store=dist.HashStore())
        try:
            with (
                patch.object(dist, "get_backend_config", lambda: backend),
                patch.object(dist.ProcessGroup, "bound_device_id", PropertyMock(return_value=bound)),
            ):
                return choose_device(device)
        finally:
            dist.destroy_process_group()


def cuda(index: int) -> torch.device:
    return torch.device("cuda", index)


def test_tests_see_no_gpu() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_rank_takes_its_own() -> None:
    assert chosen(Gpus(8), RANK="11", LOCAL_RANK="3") == cuda(3)
    assert chosen(Gpus(8), RANK="11") == cuda(3)  # a launcher that says no more
    assert chosen(Gpus(1), RANK="3", LOCAL_RANK="3") == cuda(0)  # one GPU for each task, a MIG slice
    assert chosen(Gpus(8)) == cuda(0)  # no launcher: a world of one
    gpus = Gpus(8)
    assert chosen(gpus, RANK="5", LOCAL_RANK="5") == cuda(gpus.current) == cuda(5)  # it is torch's current one now


def test_what_the_user_has_set_stays() -> None:
    assert chosen(Gpus(8, current=2), RANK="3", LOCAL_RANK="3") == cuda(2)
    assert chosen(Gpus(8, current=2)) == cuda(2)
    assert chosen(Gpus(8), "cuda:6") == cuda(6)
    assert chosen(Gpus(8), torch.device("cuda", 3), RANK="3", LOCAL_RANK="3") == cuda(3)
    with pytest.raises(ValueError, match="'cuda:2' needs 3 GPUs, torch sees 2; use 'cuda'"):
        chosen(Gpus(2), "cuda:2")


def test_the_users_group() -> None:
    assert chosen(Gpus(8), None, BOTH, RANK="3", LOCAL_RANK="3") == cuda(3)  # made without set_device
    assert chosen(Gpus(8), None, "cuda:nccl", RANK="3") == cuda(3)
    assert chosen(Gpus(8), None, "cuda:nccl", cuda(5), RANK="3", LOCAL_RANK="3") == cuda(5)  # made with device_id
    assert chosen(Gpus(8), None, "cpu:gloo,cuda:gloo", RANK="3", LOCAL_RANK="3") == torch.device("cpu")
    assert chosen(Gpus(8), None, "cpu:gloo", RANK="3", LOCAL_RANK="3") == torch.device("cpu")
    assert chosen(Gpus(8), "cpu", BOTH, RANK="3", LOCAL_RANK="3") == torch.device("cpu")
    with pytest.raises(ValueError, match="'cuda' needs a process group with nccl, found cpu:gloo,cuda:gloo; make it"):
        chosen(Gpus(8), "cuda", "cpu:gloo,cuda:gloo")
    with pytest.raises(ValueError, match="'cpu' needs a process group with gloo, found cuda:nccl; make it with"):
        chosen(Gpus(8), "cpu", "cuda:nccl")


def told(uuids: list[str], environment: dict[str, str] | None = None) -> str:
    """What init_mesh says to this rank, which sees one GPU."""
    rank = dist.get_rank()
    gpus = Gpus(1, (uuids[rank],))
    with (
        gpus.shown({"LOCAL_RANK": str(rank), **(environment or {})}),
        patch.object(dist, "get_backend_config", lambda: BOTH),
    ):
        try:
            return f"{autopar.init_mesh('cuda', tp=2).device_type}:{gpus.current}"
        except ValueError as error:
            return str(error)


def test_ranks_on_one_gpu_are_named() -> None:
    first, second = run_ranks(2, told, ["GPU-a", "GPU-a"])
    assert first == second
    assert first == (
        "init_mesh: each rank needs a GPU of its own, found ranks 0, 1 on one (GPU-a; torch sees 1); start as many "
        "ranks on a machine as it has GPUs, use the device 'cpu', or, to try things out with a NCCL that can connect "
        "them, set NCCL_MULTI_RANK_GPU_ENABLE=1"
    )
    close_pools()  # they have told each other
    assert run_ranks(2, told, ["GPU-a", "GPU-b"]) == ["cuda:0", "cuda:0"]
    close_pools()
    assert run_ranks(2, told, ["GPU-a", "GPU-a"], {RANKS_SHARE_GPUS: "1"}) == ["cuda:0", "cuda:0"]
    close_pools()
