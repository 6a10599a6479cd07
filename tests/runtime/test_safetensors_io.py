"""HuggingFace checkpoints against transformers itself: load pieces, save, load with from_pretrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

import autopar
from autopar.ir.placement import Placement, Shard
from autopar.ir.signature import ParameterSpec
from autopar.runtime.checkpoint.hf_io import save_pretrained
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.runtime.params.parameters import local_piece, local_tensor, make_parameter
from tests.support.hf_loading import load_pretrained
from tests.support.ranks import run_ranks


def tiny(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    llama: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 32, "pad_token_id": 0,
    }  # fmt: skip
    if kind.startswith("llama"):
        return LlamaForCausalLM(LlamaConfig(**llama, tie_word_embeddings=kind == "llama_tied"))
    if kind == "phi3":
        return Phi3ForCausalLM(Phi3Config(**llama))
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=32, n_positions=16, eos_token_id=1))


BLOCKS: dict[str, Placement] = {
    "qkv_proj": Shard(0, (16, 8, 8)),  # 4 heads of 4, and 2 for each of k and v
    "gate_up_proj": Shard(0, (32, 32)),
    "c_attn.weight": Shard(1, (16, 16, 16)),
    "c_attn.bias": Shard(0, (16, 16, 16)),
    "o_proj": Shard(1),
    "down_proj": Shard(1),
}


def specs_of(model: nn.Module) -> list[ParameterSpec]:
    by_id: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(p), []).append(name)
    params, out = dict(model.named_parameters(remove_duplicate=False)), []
    for name, *aliases in by_id.values():
        p = params[name]
        placements: dict[str, Placement] = {}
        if p.dim() == 2 or "c_attn" in name:
            placements["tp"] = next((s for word, s in BLOCKS.items() if word in name), Shard(0))
        if p.dim() == 2 and "norm" not in name:
            placements["dp"] = Shard(1)
        out.append(ParameterSpec(name, tuple(p.shape), p.dtype, aliases=tuple(aliases), placements=placements))
    return out


def round_trip(kind: str, folder: str, limit: str) -> list[str]:
    model = tiny(kind)
    groups, specs = Groups(init_mesh(dp=2, tp=2)), specs_of(model)
    pieces = load_pretrained(f"{folder}/in", specs, groups, prefix=model.base_model_prefix)
    values = dict(model.named_parameters())
    for spec in specs:
        torch.testing.assert_close(pieces[spec.name], local_piece(values[spec.name], spec, groups), rtol=0, atol=0)
    with torch.no_grad():
        for piece in pieces.values():
            piece.mul_(2)
    parameters = {s.name: make_parameter(pieces[s.name], s, groups) for s in specs}
    configs = [model.config, model.generation_config]
    save_pretrained(f"{folder}/out", parameters, specs, groups, configs=configs, max_shard_size=limit)
    return sorted(p.name for p in Path(folder, "out").iterdir())


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "phi3", "gpt2"])
def test_round_trip_through_transformers(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    model.save_pretrained(tmp_path / "in", max_shard_size="4KB" if kind != "gpt2" else "5GB")
    files = run_ranks(4, round_trip, kind, str(tmp_path), "3KB")[0]
    assert "config.json" in files and "generation_config.json" in files and len(files) > 4
    back, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    for name, value in model.state_dict().items():
        torch.testing.assert_close(back.state_dict()[name], 2 * value, rtol=0, atol=0)
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    again = tmp_path / "theirs"
    back.save_pretrained(again, max_shard_size="3KB")
    theirs = json.loads((again / "model.safetensors.index.json").read_text())
    assert written["metadata"] == theirs["metadata"] and written["weight_map"].keys() == theirs["weight_map"].keys()


def errors(folder: str, kind: str) -> str:
    groups, specs = Groups(init_mesh(tp=2)), specs_of(tiny(kind))
    with pytest.raises(ValueError) as caught:
        load_pretrained(folder, specs, groups, prefix="model")
    return str(caught.value)


def test_missing_and_unexpected_tensors(tmp_path: Path) -> None:
    tiny("phi3").save_pretrained(tmp_path)
    message = run_ranks(2, errors, str(tmp_path), "llama")[1]
    assert "missing model.layers.0.self_attn.q_proj.weight" in message
    assert "unexpected model.layers.0.mlp.gate_up_proj.weight" in message
    assert "found neither" in run_ranks(2, errors, str(tmp_path / "nothing"), "llama")[0]


@pytest.mark.parametrize("limit", ["5GB", "4KB"])
def test_a_truncated_file(limit: str, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path, max_shard_size=limit)
    file = sorted(tmp_path.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-8])
    assert "truncated" in run_ranks(2, errors, str(tmp_path), "llama")[0]


def test_a_missing_file_and_a_wrong_shape(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "a", max_shard_size="4KB")
    sorted((tmp_path / "a").glob("*.safetensors"))[1].unlink()
    assert "missing, truncated" in run_ranks(2, errors, str(tmp_path / "a"), "llama")[0]
    LlamaForCausalLM(LlamaConfig(**{**tiny("llama").config.to_dict(), "vocab_size": 48})).save_pretrained(
        tmp_path / "b"
    )
    message = run_ranks(2, errors, str(tmp_path / "b"), "llama")[0]
    assert "has shape (48, 16) in the checkpoint, the model needs (32, 16)" in message


def refusals(folder: str) -> list[str]:
    """What each of the folders in a folder is refused for; "" for none."""
    groups, specs = Groups(init_mesh(dp=1)), specs_of(tiny("llama"))
    found = []
    for path in sorted(Path(folder).iterdir()):
        if (path / "config.json").exists():
            try:
                load_pretrained(path, specs, groups, prefix="model")
                found.append("")
            except ValueError as error:
                found.append(f"{path.name}: {error}")
    return found


def test_files_elsewhere_and_numbers_of_another_kind(tmp_path: Path) -> None:
    """An index may name files of its folder only; the links of the Hugging Face cache are its own."""
    model = tiny("llama")
    for name in ("a_absolute", "b_above", "c_linked_file", "d_linked_folder", "e_no_text", "f_beneath"):
        folder = tmp_path / name
        model.save_pretrained(folder, max_shard_size="4KB")
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        first = next(iter(content["weight_map"].values()))
        (folder / "sub").mkdir()
        elsewhere = tmp_path / f"{name}.safetensors"
        target = {"a_absolute": str(elsewhere), "b_above": f"../{elsewhere.name}", "c_linked_file": first,
                  "d_linked_folder": f"link/{first}", "e_no_text": 3, "f_beneath": f"sub/{first}"}[name]  # fmt: skip
        (folder / first).rename(folder / "sub" / first if name in ("f_beneath", "d_linked_folder") else elsewhere)
        if name == "c_linked_file":
            (folder / first).symlink_to(elsewhere)
        if name == "d_linked_folder":
            (folder / "link").symlink_to(folder / "sub")
        content["weight_map"] = {n: target if f == first else f for n, f in content["weight_map"].items()}
        index.write_text(json.dumps(content))
    for name, dtype in (("g_int8", torch.int8), ("h_bool", torch.bool), ("i_complex", torch.complex64),
                        ("j_bfloat16", torch.bfloat16)):  # fmt: skip
        model.save_pretrained(tmp_path / name)
        values = {n: v.to(dtype) if n == "model.norm.weight" else v for n, v in model.state_dict().items()}
        save_file(values, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    *paths, beneath, int8, bools, complexes, floats = run_ranks(1, refusals, str(tmp_path))[0]
    assert len(paths) == 5 and not beneath and not floats
    for text in paths:
        assert "outside of the folder or reached through a link; put the files into the folder" in text, text
    for text, kind in ((int8, "int8"), (bools, "bool"), (complexes, "complex64")):
        assert f"model.norm.weight is torch.{kind} in the checkpoint, the model needs torch.float32" in text, text


def test_the_hugging_face_cache_is_made_of_links(tmp_path: Path) -> None:
    model = tiny("llama")
    folder, blobs = tmp_path / "models--x" / "snapshots" / "0af1", tmp_path / "models--x" / "blobs"
    model.save_pretrained(folder, max_shard_size="4KB")
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..", "..", "blobs", str(number)))
    found = run_ranks(1, loaded, str(folder), "llama", False, "model")[0]
    for name, value in model.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=0)


def loaded(folder: str, kind: str, base: bool, prefix: str) -> dict[str, Tensor]:
    model = tiny(kind)
    chosen: nn.Module = getattr(model, prefix) if base else model
    return load_pretrained(folder, specs_of(chosen), Groups(init_mesh(dp=1)), prefix=prefix)


class Made(TorchDispatchMode):
    """Shapes of all that is made from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.clone):
            self.shapes.append(tuple(args[0].shape if isinstance(args[0], Tensor) else args[0]))
        return func(*args, **(kwargs or {}))


class Layers(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()  # type: ignore[no-any-return]


def loaded_in_place(folder: str, whole: dict[str, Tensor]) -> set[tuple[int, ...]]:
    """On a rank: what loading makes besides the parameters that are there."""
    batch = {"x": torch.ones(4, 6)}
    model = autopar.parallelize(Layers(nn.Linear(6, 8), nn.Linear(8, 4)), init_mesh(dp=2), example_batch=batch, zero=3)
    at = {name: local_tensor(p).data_ptr() for name, p in model.named_parameters()}
    with Made() as made:
        model.load_pretrained(folder)
    assert at == {name: local_tensor(p).data_ptr() for name, p in model.named_parameters()}
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=0)
    return {local_tensor(p).shape for p in model.parameters()} & set(made.shapes)


def test_a_rank_holds_its_pieces_once(tmp_path: Path) -> None:
    whole = {name: torch.rand(p.shape) for name, p in Layers(nn.Linear(6, 8), nn.Linear(8, 4)).named_parameters()}
    save_file(whole, tmp_path / "model.safetensors")
    assert run_ranks(2, loaded_in_place, str(tmp_path), whole) == [set(), set()]


@pytest.mark.parametrize(("kind", "prefix"), [("llama_tied", "model"), ("gpt2", "transformer")])
def test_base_model_and_head_load_from_each_other(kind: str, prefix: str, tmp_path: Path) -> None:
    model = tiny(kind)
    base = (LlamaModel if kind == "llama_tied" else GPT2Model)(model.config)
    base.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "head")
    into_head = run_ranks(1, loaded, str(tmp_path / "base"), kind, False, prefix)[0]
    for name, value in base.named_parameters():
        torch.testing.assert_close(into_head[f"{prefix}.{name}"], value.detach(), rtol=0, atol=0)
    into_base = run_ranks(1, loaded, str(tmp_path / "head"), kind, True, prefix)[0]
    for name, value in getattr(model, prefix).named_parameters():
        torch.testing.assert_close(into_base[name], value.detach(), rtol=0, atol=0)


def test_a_head_that_only_the_file_has_is_dropped_for_the_base_model(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    assert "lm_head.weight" not in run_ranks(1, loaded, str(tmp_path), "llama", True, "model")[0]
