"""Frozen bases of bitsandbytes and torchao under LoRA of peft: losses and gradients of the libraries' own modules.

``-m full`` with the extra autopar[outside].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.full
FORMATS = ("nf4", "fp4", "nf4 nested", "int8", "nf4 of torchao")
MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {"zero": 3}), ({"tp": 2}, {}), ({"tp": 2, "dp": 2}, {"zero": 3}), ({"pp": 2}, {"microbatches": 2}),
]  # fmt: skip


def base(kind: str) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads))
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig(), lambda m, name: isinstance(m, nn.Linear) and name != "lm_head")
        return model
    if kind == "nf4 of torchao":
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        for linear in (m for m in model.model.modules() if isinstance(m, nn.Linear)):
            linear.weight = nn.Parameter(to_nf4(linear.weight.detach(), 64, 16), requires_grad=False)
        return model
    import bitsandbytes as bnb

    for module in list(model.model.modules()):
        for name, linear in list(module.named_children()):
            if type(linear) is nn.Linear:
                made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, False, torch.float32)
                made.weight = bnb.nn.Params4bit(
                    linear.weight.data, requires_grad=False, quant_type=kind[:3], compress_statistics="nested" in kind
                )
                setattr(module, name, made)
    return model.to("cpu")  # quantizes


def adapted(kind: str) -> Any:
    import peft

    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(base(kind), lora)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def trained(kind: str, sizes: dict[str, int], options: dict[str, Any], folder: str) -> tuple[float, float, int]:
    """How far the loss and the gradients are from the library's, and bytes of codes here. The adapter is saved."""
    whole, model, mesh = adapted(kind), adapted(kind), autopar.init_mesh("cpu", **sizes)
    loss = whole(**batch()).loss
    loss.backward()
    right = {name: p for name, p in whole.named_parameters() if p.grad is not None}
    parallel = autopar.parallelize(model, mesh, **options)
    mine, of = autopar.dp_rank_and_size(mesh)
    found = parallel.train_step(**{key: x.chunk(of)[mine] for key, x in batch().items()})
    trainable = {name: p for name, p in parallel.named_parameters() if p.requires_grad}
    assert trainable.keys() == right.keys()
    far = max(gap(p.grad.full_tensor(), right[name].grad) for name, p in trainable.items())
    held = sum(p.to_local().nbytes for p in parallel.parameters() if p.dtype in (torch.uint8, torch.int8))
    parallel.save_pretrained(folder)
    if mesh.get_rank() == 0:
        import peft

        loaded = dict(peft.PeftModel.from_pretrained(base(kind), folder).named_parameters())
        assert all(torch.equal(loaded[name], p) for name, p in right.items())
    return abs(float(found) - float(loss)), far, held


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("sizes", "options"), MESHES, ids=str)
def test_equals_the_library(kind: str, sizes: dict[str, int], options: dict[str, Any], tmp_path: Path) -> None:
    found = run_ranks(torch.Size(sizes.values()).numel(), trained, kind, sizes, options, str(tmp_path), timeout=240)
    whole = 2 * 64 * (64 + 32 + 32 + 64 + 3 * 128) // (1 if kind == "int8" else 2)
    for far, gradients, _ in found:
        assert far < 1e-5 and gradients < 1e-5
    held = sum(x[-1] for x in found)
    assert held == whole * (sizes.get("dp", 1) if "zero" not in options else 1), (held, whole)
