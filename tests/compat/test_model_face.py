"""What a model on a mesh shows of itself, and what it says where whole weights would be needed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.values import byte_rate, dtype_name
from tests.support.plain_models import Net, build, numbers
from tests.support.ranks import refusal, run_ranks


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)).double()


def shown() -> dict[str, Any]:
    mesh = autopar.init_mesh("cpu", pp=2, tp=2)
    model = autopar.parallelize(llama(), mesh, split_points=["model.layers.2"])
    whole = llama()
    ids = torch.zeros(2, 8, dtype=torch.int64)
    calls = {
        "submodule": lambda: model.model.layers[0](ids), "head": lambda: model.lm_head(ids),
        "generate": lambda: model.generate(ids, max_new_tokens=2), "resize": lambda: model.resize_token_embeddings(70),
        "push": lambda: model.push_to_hub("x"), "deepcopy": lambda: copy.deepcopy(model),
        "pickled": lambda: pickle.dumps(model),
        "averaged": lambda: AveragedModel(model), "wrapped": lambda: DistributedDataParallel(model),
        "missing": lambda: getattr(model, "merge_adapter", None),
    }  # fmt: skip
    return {
        "text": repr(model), "device": model.device, "dtype": model.dtype,
        "counts": [model.num_parameters(), model.num_parameters(exclude_embeddings=True)],
        "expected": [whole.num_parameters(), whole.num_parameters(exclude_embeddings=True)],
        "table": (type(model.get_input_embeddings()), repr(model.get_input_embeddings())),
        "told": [repr(m) for m in model.modules() if m is not model] == [repr(m) for m in whole.modules()][1:],
        "names": [name for name, _ in model.named_modules()] == [name for name, _ in whole.named_modules()],
        "types": [type(m) for m in model.model.modules()] == [type(m) for m in whole.model.modules()],
        "said": {name: refusal(call) for name, call in calls.items()},
        "loss": float(model.train_step(input_ids=ids, labels=ids)),
        "mlp": float(sum(p.numel() for p in model.model.layers[0].mlp.parameters())),
    }  # fmt: skip


def test_of_a_library() -> None:
    first, *_, last = run_ranks(4, shown, timeout=120)
    for found in (first, last):
        assert found["counts"] == found["expected"]
        assert found["device"] == torch.device("cpu") and found["dtype"] == torch.float64
        assert found["table"] == (nn.Embedding, "Embedding(64, 32)")
        assert found["names"] and found["types"] and found["told"]  # also of what only other stages hold
        assert found["text"].startswith(
            f"LlamaForCausalLM on pp=2,tp=2: {found['expected'][0]:,} parameters, this rank"
        )
        assert "(0-1): 2 x LlamaDecoderLayer\n" in found["text"] and "(2): LlamaDecoderLayer\n" in found["text"]
        assert "tied to model.embed_tokens.weight" in found["text"]
        said = found["said"]
        assert "a LlamaDecoderLayer at model.layers.0 holds only this rank's shards" in said["submodule"]
        assert "a Linear at lm_head" in said["head"] and "model(**batch)" in said["head"]
        assert said["generate"] == "no error"
        assert "before parallelize" in said["resize"] and "upload the folder" in said["push"]
        assert said["averaged"] == said["deepcopy"] == "no error" and "cannot be pickled" in said["pickled"]
        assert "DistributedDataParallel" in said["wrapped"] and "train_step" in said["wrapped"]
        assert said["missing"] == "no error"
    assert "weight [64, 32] tp: S(0), 1/2 here" in first["text"] and "on other stages" in first["text"]
    text = first["text"].splitlines()
    at = next(i for i, line in enumerate(text) if line.strip().startswith("(norm): LlamaRMSNorm"))
    assert text[at + 1].strip() == "weight [32] on other stages"
    assert first["loss"] == last["loss"]


def plain() -> tuple[str, str, int, float]:
    """A module of nobody's library, after a module of it was replaced."""
    mesh = autopar.init_mesh("cpu")
    model = autopar.parallelize(build(Net), mesh, example_batch=numbers())
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    said = refusal(model.get_submodule(names[0]), torch.zeros(1))
    new = nn.ReLU()
    model.other = new
    assert float(model.other(torch.tensor(2.0))) == 2.0  # holds no pieces, and may be called
    return repr(model), said, model.num_parameters(), float(model.train_step(**numbers()))


def test_of_nobody() -> None:
    text, said, count, loss = run_ranks(1, plain)[0]
    assert text.startswith(f"Net on dp=1: {count:,} parameters, this rank holds {count:,} (100 %)")
    assert "cannot be called by itself" in said and loss > 0


def weighted() -> list[Any]:
    mesh = autopar.init_mesh("cpu", dp=2)
    model = autopar.parallelize(build(Net).double(), mesh, example_batch=numbers())
    part = {name: x.chunk(2)[mesh.get_local_rank()] for name, x in numbers().items()}
    part = {name: x.double() if x.is_floating_point() else x for name, x in part.items()}
    gradients = []
    for weight in (1.0, 1 / 3):
        with model.loss_weight(weight):
            model.train_step(**part)
        gradients.append(model.full_gradients())
        model.zero_grad()
    worst = max(float((gradients[0][n] / 3 - g).abs().max()) for n, g in gradients[1].items())
    return [worst, refusal(model.loss_weight("half").__enter__)]


def test_a_weight_of_the_loss() -> None:
    for worst, said in run_ranks(2, weighted):
        assert worst < 1e-15 and "weight: expected a number" in said


@pytest.mark.parametrize(
    "text, expected", [("bf16", "bfloat16"), ("torch.float32", "float32"), ("FP64", "float64"), ("x", "x")]
)
def test_names_of_dtypes(text: str, expected: str) -> None:
    assert dtype_name(text) == expected


def test_rates() -> None:
    found = [byte_rate(text) for text in ("50e9", "50GB", "50 GB/s", "1GiB/s")]
    assert found == [50e9, 50e9, 50e9, 2.0**30]
    with pytest.raises(ValueError, match="a number of bytes"):
        byte_rate("50 apples")
