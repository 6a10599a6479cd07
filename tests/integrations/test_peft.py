"""LoRA by peft on a mesh: trained as in one process, saved as an adapter folder that peft loads."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.lift_to_float64 import LiftFloat32
from tests.integrations.loops import Sizes, llama, rows, trained
from tests.support.ranks import refusal, run_ranks

pytest.importorskip("peft")

EXACT = 1e-10


def lora(**changes: Any) -> Any:
    """Low ranks beside two weights of each layer, and a head that is trained whole."""
    import peft

    base = llama()
    torch.manual_seed(3)
    config = {
        "r": 4,
        "target_modules": ["q_proj", "v_proj"],
        "init_lora_weights": False,
        "modules_to_save": ["lm_head"],
    }
    return peft.get_peft_model(base, peft.LoraConfig(**config | changes))


def batch() -> dict[str, torch.Tensor]:
    data = rows(8, 1)
    return {name: torch.stack([row[name] for row in data]) for name in data[0]}


def tuned(sizes: Sizes, folder: str) -> list[float]:
    """Three steps, saved; what is loaded from there is what was saved."""
    mesh = autopar.init_mesh("cpu", **sizes)
    part, parts = autopar.dp_rank_and_size(mesh)
    model = autopar.parallelize(lora(), mesh, lift_to_float64=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    mine, losses = {name: x.chunk(parts)[part] for name, x in batch().items()}, []
    for _ in range(3):
        losses.append(float(model.train_step(**mine)))
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    other = autopar.parallelize(lora(), mesh, lift_to_float64=True)
    other.load_pretrained(folder)
    found, expected = other.full_state_dict(), model.full_state_dict()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    wrong = autopar.parallelize(lora(target_modules=["k_proj"]), mesh)
    assert "does not fit the model's adapter 'default'" in refusal(wrong.load_pretrained, folder)
    assert "found none in" in refusal(wrong.load_pretrained, f"{folder}/nowhere")
    return losses


@pytest.mark.full
def test_an_adapter_folder(tmp_path: Path) -> None:
    import peft

    model, expected = lora(), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with LiftFloat32():
        for _ in range(3):
            loss = model(**batch()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(float(loss.detach()))
    for n, sizes in ((4, {"dp": 2, "tp": 2}), (2, {"pp": 2})):
        folder = tmp_path / str(n)
        for losses in run_ranks(n, tuned, sizes, str(folder), timeout=200):
            assert losses == pytest.approx(expected, abs=EXACT)
        assert (folder / "adapter_config.json").exists() and not (folder / "model.safetensors").exists()
        loaded = peft.PeftModel.from_pretrained(llama(), str(folder)).state_dict()
        assert all(float((loaded[name] - x).abs().max()) < EXACT for name, x in model.state_dict().items())


def without_adapter(sizes: Sizes) -> tuple[list[float], list[float]]:
    """Losses with, without and with the adapter, before and after a step."""
    mesh = autopar.init_mesh("cpu", **sizes) if sizes else None
    model = lora()
    mine = batch()
    if mesh is not None:
        part, parts = autopar.dp_rank_and_size(mesh)
        model = autopar.parallelize(model, mesh, lift_to_float64=True, outputs_with_grad="rank")
        mine = {name: x.chunk(parts)[part] for name, x in mine.items()}
    optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01), []

    def reference() -> float:
        with torch.no_grad(), model.disable_adapter():
            return float(model(**mine).loss)

    with LiftFloat32() if mesh is None else contextlib.nullcontext():
        for _ in range(2):
            losses.append(reference())
            loss = model(**mine).loss
            losses.append(float(loss))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, reference()], [float(model(**mine).loss)]


@pytest.mark.parametrize("sizes", [{"tp": 2}, pytest.param({"dp": 2}, marks=pytest.mark.full)])
def test_a_reference_without_the_adapter(sizes: Sizes) -> None:
    expected, after = without_adapter({})
    for losses, last in run_ranks(2, without_adapter, sizes, timeout=200):
        assert losses + last == pytest.approx(expected + after, abs=EXACT)


def refused_without_adapter() -> str:
    return refusal(without_adapter, {"pp": 2})


@pytest.mark.full
def test_a_module_that_only_the_reference_uses_has_no_stage() -> None:
    """The head of `modules_to_save` has an original beside it, which no forward with the adapter uses."""
    for words in run_ranks(2, refused_without_adapter, timeout=200):
        assert "lm_head.original_module.weight (rank 0), which no stage at this point holds" in words


def by_trainer(folder: str) -> list[dict[str, float]]:
    return trained({"dp": 2}, folder, lora, max_steps=2, save_steps=2, eval_strategy="no", save_only_model=True)


def test_a_trainer_saves_the_adapter(tmp_path: Path) -> None:
    expected = trained(None, str(tmp_path / "one"), lora, max_steps=2, save_strategy="no", eval_strategy="no")
    found = run_ranks(2, by_trainer, str(tmp_path / "two"), timeout=200)[0]
    assert [log.get("loss") for log in found] == pytest.approx([log.get("loss") for log in expected], abs=EXACT)
    assert (tmp_path / "two" / "checkpoint-2" / "adapter_model.safetensors").exists()
