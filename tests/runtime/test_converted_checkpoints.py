"""Checkpoints whose files do not hold what the model has, against transformers itself, with real files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralForCausalLM, PreTrainedConfig, PreTrainedModel

import autopar
from autopar.models.hf_checkpoints import recipes_to_load
from autopar.runtime.checkpoint.hf_io import Files
from autopar.runtime.mesh.process_groups import init_mesh
from tests.hf import zoo
from tests.support.ranks import run_ranks

SIZES: dict[str, dict[str, int]] = {
    "mixtral": {"tp": 2},  # experts merged, gates and ups concatenated, the block renamed
    "qwen2_moe": {"dp": 2},
    "olmo_hybrid": {"dp": 2},  # a projection of several convolutions
    "granitemoe": {"pp": 2},  # names alone
    "hrm_text": {"dp": 2},  # projections split, layers renamed
}


def tiny(kind: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(zoo.config(kind))
    return model


def in_files(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def through(kind: str, folder: str) -> tuple[dict[str, Tensor], float]:
    """Loaded and saved on a mesh: the whole state, and the share of all stored numbers that this rank has read."""
    options: dict[str, Any] = {"zero": 3} if "dp" in SIZES[kind] else {"microbatches": 2} if "pp" in SIZES[kind] else {}
    model = autopar.parallelize(tiny(kind, 1), init_mesh(**SIZES[kind]), **options)
    read, stored = 0, Files.stored

    def counted(self: Files, source: Any, window: Any) -> Tensor:
        nonlocal read
        value = stored(self, source, window)
        read += value.numel()
        return value

    Files.stored = counted  # type: ignore[method-assign]
    try:
        model.load_pretrained(f"{folder}/in")
    finally:
        Files.stored = stored  # type: ignore[method-assign]
    whole = model.full_state_dict()
    model.save_pretrained(f"{folder}/out", max_shard_size="20KB")
    model.load_state_dict({name: torch.zeros_like(x) for name, x in whole.items()})
    model.load_pretrained(f"{folder}/out")
    for name, value in model.full_state_dict().items():
        assert torch.equal(value, whole[name]), name
    return whole, read / sum(x.numel() for x in in_files(Path(folder, "in")).values())


SLOW = ("olmo_hybrid", "hrm_text")  # to plan


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.full if k in SLOW else ()) for k in SIZES])
def test_as_transformers_loads_and_saves(kind: str, tmp_path: Path) -> None:
    model = tiny(kind, 0)
    model.save_pretrained(tmp_path / "in", max_shard_size="30KB")
    theirs = type(model).from_pretrained(tmp_path / "in").state_dict()
    stored = in_files(tmp_path / "in")
    assert stored.keys() != theirs.keys()  # else nothing is tested
    (whole, read), (other, _) = run_ranks(2, through, kind, str(tmp_path), timeout=60)
    assert whole.keys() == theirs.keys() == other.keys()
    for name, value in theirs.items():
        assert torch.equal(whole[name], value) and torch.equal(other[name], value), name
    assert read < (0.75 if kind != "granitemoe" else 1)  # a rank holds half of most tensors
    written = in_files(tmp_path / "out")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], value) for name, value in stored.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_parameters"] == sum(math.prod(x.shape) for x in stored.values())
    back, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(x, theirs[name]) for name, x in back.state_dict().items())


def refused(folder: str) -> list[str]:
    model = autopar.parallelize(tiny("mixtral", 1), init_mesh(dp=1))
    found = []
    for path in sorted(Path(folder).iterdir()):
        with pytest.raises(ValueError) as caught:
            model.load_pretrained(path)
        found.append(str(caught.value))
    return found


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    tiny("mixtral", 0).save_pretrained(tmp_path / "all")
    with safe_open(tmp_path / "all" / "model.safetensors", framework="pt") as file:
        whole = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    (tmp_path / "all" / "model.safetensors").unlink()
    (tmp_path / "all" / "config.json").unlink()
    experts = "model.layers.0.block_sparse_moe.experts"
    folders: dict[str, dict[str, Tensor]] = {
        "a": {n: x for n, x in whole.items() if n != f"{experts}.3.w1.weight"},
        "b": {n: x for n, x in whole.items() if not (n.startswith(f"{experts}.3") and "w2" in n)},
        "c": {n: x.to(torch.int8) if n == f"{experts}.1.w2.weight" else x for n, x in whole.items()},
        "d": {n: x for n, x in whole.items() if "layers.0.block_sparse_moe.experts" not in n},
        "e": whole | {"model.layers.0.mlp.gate.weight": whole["model.layers.0.block_sparse_moe.gate.weight"].clone()},
        "f": whole | {f"{experts}.0.w4.weight": torch.ones(2)},
    }
    for name, tensors in folders.items():
        (tmp_path / "cases" / name).mkdir(parents=True)
        save_file(tensors, tmp_path / "cases" / name / "model.safetensors")
    (tmp_path / "cases" / "g").mkdir()
    save_file(whole, tmp_path / "cases" / "g" / "model.safetensors")
    (tmp_path / "cases" / "g" / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    gate, down, int8, missing, twice, more, fp8 = run_ranks(1, refused, str(tmp_path / "cases"), timeout=60)[0]
    assert "model.layers.0.mlp.experts.gate_up_proj cannot be computed from" in gate
    assert f"{experts}.0.w1.weight" in gate and "by MergeModulelist(dim=0), Concatenate(dim=1):" in gate
    assert "down_proj has shape (3, 32, 64) in the checkpoint after MergeModulelist(dim=0) of" in down
    assert "down_proj is torch.int8 in the checkpoint, the model needs torch.float32" in int8
    assert "missing model.layers.0.mlp.experts.gate_up_proj, model.layers.0.mlp.experts.down_proj;" in missing
    assert "model.layers.0.mlp.gate.weight is in the files twice" in twice
    assert f"unexpected {experts}.0.w4.weight" in more.replace(".mlp.", ".block_sparse_moe.")
    assert "(quantization_config in config.json: 'fp8'), whose scales would not be applied; dequantize them" in fp8


class Normed(PreTrainedModel):
    """Its own name is one that transformers takes for an old one."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.weight_g = torch.nn.Parameter(torch.ones(3))


def test_names_that_are_the_model_s_own_stay() -> None:
    (recipe,) = recipes_to_load(Normed(PreTrainedConfig()), ["weight_g"])
    assert recipe.sources == ("weight_g",) and recipe.target == "weight_g" and recipe.make is None


def test_experts_are_merged_by_their_numbers() -> None:
    """The tenth stands behind the ninth, in whatever order the files have them."""
    model = MixtralForCausalLM(zoo.config("mixtral"))
    names = [f"model.layers.0.block_sparse_moe.experts.{i}.{w}.weight" for i in range(12) for w in ("w3", "w1")]
    (recipe,) = recipes_to_load(model, sorted(names))
    x = {name: torch.full((1, 2), float(i)) for i, name in enumerate(names)}
    assert recipe.make is not None
    (made,) = recipe.make([x[name] for name in recipe.sources]).values()
    assert made[:, 0, 0].tolist() == [2.0 * i + 1 for i in range(12)] and made[:, 1, 0].tolist() == [
        2.0 * i for i in range(12)
    ]


def test_a_model_of_the_base_alone() -> None:
    """Names are looked up in the model that is there, with its prefix or without."""
    model = tiny("mixtral", 0)
    names = ["model.layers.0.block_sparse_moe.gate.weight", "layers.0.block_sparse_moe.gate.weight", "lm_head.weight"]
    head = {r.sources[0]: r.target for r in recipes_to_load(model, names)}
    base = {r.sources[0]: r.target for r in recipes_to_load(model.model, names)}
    assert [head[n] for n in names] == ["model.layers.0.mlp.gate.weight"] * 2 + ["lm_head.weight"]
    assert [base[n] for n in names] == ["layers.0.mlp.gate.weight"] * 2 + ["lm_head.weight"]
