"""accelerate's loop on a mesh: what it computes equals what one process computes; states move to other meshes."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import autopar
from autopar import integrations
from autopar.lift_to_float64 import LiftFloat32
from tests.integrations.loops import Sizes, as_started, llama, rows
from tests.support.ranks import refusal, run_ranks

EXACT = 1e-10


def loop(sizes: Sizes | None, folder: str, first: int, last: int, zero: int = 0) -> dict[str, Any]:
    """Steps of a loop as accelerate's users write it: the model's own loss, accumulated twice, clipped; saved."""
    with as_started(), LiftFloat32():
        same_order = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
        parts, how = 1, {"gradient_accumulation_steps": 2, "cpu": True, "dataloader_config": same_order}
        if sizes is None:
            accelerator: Any = accelerate.Accelerator(**how)
        else:
            mesh = autopar.init_mesh("cpu", **sizes)
            parts = autopar.dp_rank_and_size(mesh)[1]
            accelerator = integrations.Accelerator(mesh=mesh, options={"lift_to_float64": True, "zero": zero}, **how)
        torch.manual_seed(1)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (step / parts))
        loader = DataLoader(rows(32, 1), batch_size=8 // parts, shuffle=True)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        if first:
            accelerator.load_state(folder)
        losses, norms, rates = [], [], []
        for epoch in range(first, last):
            loader.set_epoch(epoch) if hasattr(loader, "set_epoch") else None
            for batch in loader:
                with accelerator.accumulate(model):
                    if sizes is not None and "pp" in sizes:
                        loss = accelerator.train_step(model, **batch)
                    else:
                        loss = model(**batch).loss
                        accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(float(loss))
                rates.append(schedule.get_last_lr()[0])
        accelerator.save_state(folder)
        numbers = torch.arange(autopar.dp_rank_and_size(mesh)[0], 8, parts) if sizes is not None else torch.arange(8)
        weights = accelerator.get_state_dict(model)
        how = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
        accelerator.unwrap_model(model).save_pretrained(f"{folder}/hf", state_dict=weights, **how)
        return {
            "losses": losses, "norms": norms, "rates": rates, "sum": accelerator.reduce(numbers.sum()),
            "mean": accelerator.reduce(torch.tensor(2.0), "mean"), "gathered": accelerator.gather(numbers),
            "objects": accelerator.gather_for_metrics([f"{int(n)}" for n in numbers]),
            "weights": {name: x.clone() for name, x in weights.items() if isinstance(x, Tensor) and x.dim()},
            "total": accelerator.num_processes,
        }  # fmt: skip


def same(found: dict[str, Any], expected: dict[str, Any], steps: slice = slice(None)) -> None:
    for name in ("losses", "norms", "rates"):
        assert found[name] == pytest.approx(expected[name][steps], abs=EXACT), name
    for name, x in expected["weights"].items():
        assert float((found["weights"][name] - x).abs().max()) < EXACT, name


ONE: list[tuple[Sizes, Sizes]] = [({"dp": 2}, {"pp": 2, "dp": 2})]
TWO = pytest.param({"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, marks=pytest.mark.full)


@pytest.mark.parametrize("before, then", [*ONE, TWO])
def test_a_loop_and_its_state(tmp_path: Path, before: Sizes, then: Sizes) -> None:
    """Two epochs on a mesh equal one process; and the second one on a pipeline, from the state of the first."""
    expected = loop(None, str(tmp_path / "one"), 0, 2)
    meshes: list[tuple[Sizes, int, int, int]] = [(before, 0, 1, 3), (then, 1, 2, 0)]
    for sizes, first, last, zero in meshes:
        count = math.prod(sizes.values())
        found = run_ranks(count, loop, sizes, str(tmp_path / "run"), first, last, zero, timeout=200)
        for rank in found:
            part = {**expected, "weights": {}} if last == 1 else expected
            for name, each in (("losses", 4), ("norms", 2), ("rates", 4)):
                part = {**part, name: expected[name][each * first : each * last]}
            same(rank, part)
            saved = type(llama()).from_pretrained(tmp_path / "run" / "hf", dtype="auto").state_dict()
            assert all(torch.equal(saved[name], x) for name, x in rank["weights"].items())
            assert rank["total"] == 2 and int(rank["sum"]) == 28 and float(rank["mean"]) == 2.0
            assert rank["gathered"].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
            assert rank["objects"] == ["0", "2", "4", "6", "1", "3", "5", "7"]


def refusals() -> list[str]:
    found = []
    with as_started():
        mesh = autopar.init_mesh("cpu", pp=2)
        found.append(refusal(integrations.Accelerator, mesh=mesh, cpu=True, mixed_precision="fp16"))
    with as_started():
        config = accelerate.DataLoaderConfiguration(dispatch_batches=True)
        found.append(refusal(integrations.Accelerator, mesh=mesh, cpu=True, dataloader_config=config))
    with as_started():
        accelerator = integrations.Accelerator(mesh=mesh, cpu=True)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters())
        model(**{name: x[None] for name, x in rows(1, 0)[0].items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(refusal(accelerator.prepare, model, optimizer))
        parallel = accelerator.prepare(model)
        accelerator.prepare(llama())
        found.append(refusal(accelerator.save_state, "nowhere"))
        other = {name: x + 1 for name, x in parallel.full_state_dict().items()}
        for how in ({"state_dict": other}, {"save_function": print}, {"push_to_hub": True}, {"widely": 1}):
            found.append(refusal(parallel.save_pretrained, "nowhere", **how))
        assert not Path("nowhere").exists()
    return found


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "found 'fp16'; use 'bf16'", "dispatch_batches=True.*remove it", "optimizer without state.*before its first",
        "one prepared model, found 2; call autopar.save",
        "a state_dict with another", "rank 0 writes the files itself", "push_to_hub=True", "does not support widely",
    ]  # fmt: skip
    for text, pattern in zip(run_ranks(2, refusals)[0], words, strict=True):
        assert re.search(pattern, text), text


def unseen() -> str:
    """accelerate has looked at the processes when there was one, or as if there were: without cpu=True."""
    with as_started():
        mesh = autopar.init_mesh("cpu", dp=2)
        accelerate.PartialState(cpu=True).num_processes = 1
        return refusal(integrations.Accelerator, mesh=mesh)


def test_processes_that_accelerate_does_not_see() -> None:
    assert "found 1 processes, but the mesh has 2 ranks; on the CPU pass cpu=True, without" in run_ranks(2, unseen)[0]


def in_few_bits() -> list[float]:
    """Losses of a model in bfloat16 and in float8, by accelerate's argument, by that of its launcher, and by ours."""
    losses = []
    with as_started():
        mesh, batch = autopar.init_mesh("cpu", dp=1), {name: x[None] for name, x in rows(1, 0)[0].items()}
        for argument, launched in (("bf16", ""), ("fp8", ""), (None, "fp8")):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ACCELERATE_MIXED_PRECISION", launched or "no")
                accelerator = integrations.Accelerator(mesh=mesh, cpu=True, mixed_precision=argument)
            torch.manual_seed(1)
            losses.append(float(accelerator.prepare(llama())(**batch).loss))
            accelerate.state.AcceleratorState._reset_state()
        torch.manual_seed(1)
        parallel = autopar.parallelize(llama(), mesh, precision="fp8", example_batch=batch)
        losses.append(float(parallel(**batch).loss))
    return losses


def test_mixed_precision_fp8() -> None:
    wide, *few, ours = run_ranks(1, in_few_bits)[0]
    assert few == [ours, ours] and ours != wide
