"""Configs of transformers models with something wrong in them: refused, or the model that they describe."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from autopar.models.hf_configs import build, load_config
from tests.malformed.judge import Case, broken, failures

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32, "head_dim": 8,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "float32", "tie_word_embeddings": False,
    "max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def model_of(file: Path) -> Any:
    return build(load_config(file), torch.float32)


def right(model: Any) -> bool:
    """On the meta device, with weights of the sizes that its config says (a default where the file left one out)."""
    config = model.config
    shape = tuple(model.get_input_embeddings().weight.shape)
    layers = len(model.base_model.layers) if config.model_type == "llama" else None
    same = shape == (config.vocab_size, config.hidden_size) and layers in (None, config.num_hidden_layers)
    return same and all(p.is_meta and p.numel() for p in model.parameters())


def texts() -> dict[str, str]:
    whole, rng = json.dumps(LLAMA), random.Random(3)
    out = {}
    for _ in range(70):
        what, data = broken(LLAMA, rng)
        out[what] = json.dumps(data)
    out |= {f"cut to {n}": whole[:n] for n in (0, 1, 20, len(whole) - 1)}
    out["a name twice"] = whole.replace("{", '{"vocab_size": 3, ', 1)
    for kind in (None, 3, [], "", "lama", "LLAMA", "llama ", "gpt-5", "x" * 1000, "auto", "../llama"):
        out[f"model_type {str(kind)[:20]!r}"] = json.dumps(LLAMA | {"model_type": kind})
    for names in (None, "LlamaForCausalLM", [], ["Llama"], [3], ["LlamaForCausalLM", "x"], ["GPT2LMHeadModel"], [None]):
        out[f"architectures {names}"] = json.dumps(LLAMA | {"architectures": names})
    return out | {"list": "[]", "text": '"llama"', "null": "null", "brackets": "[" * 5000}


def test_configs(tmp_path: Path) -> None:
    cases = []
    for i, (what, text) in enumerate(texts().items()):
        file = tmp_path / f"{i}.json"
        file.write_text(text)
        cases.append(Case(what, lambda file=file: model_of(file), right))  # type: ignore[misc]
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "cycle.json").symlink_to("cycle.json")
    for place in ("bytes.json", "folder", "cycle.json", "gone.json", "a" * 300, "a\0b"):
        cases.append(Case(place[:20], lambda place=place: model_of(tmp_path / place), right))  # type: ignore[misc]
    assert len(cases) >= 60
    found = failures(cases)
    assert not found, "\n".join(found)
