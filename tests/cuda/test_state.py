"""State in and out of fake GPUs: what is loaded lies on the device, in pieces; what is handed out lies on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar
from autopar.ir.mesh import Mesh
from autopar.runtime.checkpoint import hf_atomic_write
from autopar.runtime.checkpoint.tensor_storage import file_layout, pieces_of, written_here
from autopar.runtime.params.parameters import local_tensor
from autopar.runtime.training.save import parts_of_run
from tests.cuda.fake_gpu import FakeGpu, fake_gpu, module_on
from tests.cuda.loops import copies, in_type
from tests.support.subjects import tiny

CELLS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("llama", "dp=2,tp=2", 0, {"zero": 3}),
    ("llama", "dp=2,tp=2", 3, {"zero": 3}),
    ("gpt2", "tp=2", 1, {}),
    ("t5", "pp=2", 0, {"microbatches": 2}),
    ("gpt2", "pp=2,dp=2", 3, {"zero": 3, "microbatches": 2}),
]


@pytest.fixture(
    params=[pytest.param(cell, marks=() if i in (1, 2) else pytest.mark.full) for i, cell in enumerate(CELLS)], ids=str
)
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[FakeGpu, Any, Path]]:
    """A GPU, a model on it, and the folder in which transformers has saved it."""
    name, mesh, rank, options = request.param
    model, batch = in_type(*tiny(name, 2 if "pp" in mesh else 1), torch.bfloat16)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    sizes = Mesh.parse(mesh)
    with (
        fake_gpu(sizes.world_size, rank) as gpu,
        module_on(gpu, model, batch, autopar.init_mesh("cuda", **dict(sizes.axes)), **options) as parallel,
    ):
        gpu.may_wait = True
        yield gpu, parallel, tmp_path


def test_pieces_of_a_run(held: tuple[FakeGpu, Any, Path]) -> None:
    """What a save writes lies on the device until it is copied, piece by piece; finding that out moves nothing."""
    gpu, parallel, _ = held
    optimizer = torch.optim.AdamW(parallel.parameters())
    for p in parallel.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    copies(gpu)
    parts = parts_of_run(parallel.held(), [optimizer], [], 1, {})
    pieces = pieces_of(written_here(parts.entries, parallel.held().groups))
    there = [p for p in pieces if not p.key.endswith(".step")]
    assert {p.key.partition(".")[0] for p in there} == {"model", "optimizer"}
    assert on(p.values for p in there) == {parallel._groups.device}
    head, index = file_layout(pieces, "file")
    assert index["files"]["file"] == len(head) + sum(p.values.nbytes for p in pieces)
    assert not copies(gpu)


def test_saving_and_loading(held: tuple[FakeGpu, Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, parallel, folder = held
    whole = parallel.full_state_dict()
    assert on(whole.values()) == {torch.device("cpu")}
    with in_pieces(gpu, parallel):
        parallel.load_state_dict(whole)
    with in_pieces(gpu, parallel):
        parallel.load_state_dict(parallel.state_dict())
    with in_pieces(gpu, parallel):
        parallel.load_pretrained(folder)
    copies(gpu)
    others = parallel.full_state_dict(rank0_only=True)
    assert bool(others) == bool(copies(gpu)) == (parallel._groups.rank == 0)
    saved: list[Tensor] = []
    monkeypatch.setattr(hf_atomic_write, "save_file", lambda tensors, path, metadata: saved.extend(tensors.values()))
    monkeypatch.setattr(hf_atomic_write.AtomicFolder, "publish", lambda *_: None)
    parallel.save_pretrained(folder)
    assert on(saved) <= {torch.device("cpu")}


def test_distributed_checkpoint(held: tuple[FakeGpu, Any, Path]) -> None:
    """What torch's planners write is on the device, where its writer takes it from; what they read is copied there."""
    gpu, parallel, _ = held
    optimizer = torch.optim.AdamW(parallel.parameters())
    for p in parallel.parameters():
        p.grad = torch.zeros_like(p)
    assert on(parallel.full_gradients().values()) == {torch.device("cpu")}
    optimizer.step()
    state, of_optimizer = get_state_dict(parallel, optimizer)
    saves, loads = DefaultSavePlanner(), DefaultLoadPlanner()
    saves.set_up_planner(state, is_coordinator=True)
    plans, metadata = saves.create_global_plan([saves.create_local_plan()])
    found = [saves.resolve_data(item) for item in saves.finish_plan(plans[0]).items]
    assert on(x for x in found if isinstance(x, Tensor)) == {parallel._groups.device}
    with in_pieces(gpu, parallel):
        loads.set_up_planner(parallel.state_dict(), metadata, is_coordinator=True)
        for item in loads.create_global_plan([loads.create_local_plan()])[0].items:
            into = loads.resolve_tensor(item)
            loads.commit_tensor(item, into.copy_(torch.zeros(into.shape, dtype=into.dtype)))
    with in_pieces(gpu, parallel):
        set_state_dict(parallel, optimizer, model_state_dict=state, optim_state_dict=of_optimizer)
    moments = [local_tensor(m) for s in optimizer.state.values() for n, m in s.items() if n != "step"]
    assert moments and on(moments) == {parallel._groups.device}


@contextmanager
def in_pieces(gpu: FakeGpu, parallel: Any) -> Iterator[None]:
    """No whole tensor comes to the device, parameters and buffers stay there."""
    gpu.largest = 0
    yield
    pieces = [local_tensor(p) for p in (*parallel.parameters(), *parallel.buffers())]
    assert on(pieces) == {parallel._groups.device}
    assert gpu.largest <= max(x.numel() * max(x.element_size(), 8) for x in pieces)


def on(tensors: Any) -> set[torch.device]:
    return {x.device for x in tensors}
