"""Bytes that a rank holds of a Llama of 1B's shapes in few bits under LoRA of peft: what the memory plan says is the
formula of the format. Nothing is allocated: all tensors are on meta."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autopar.models.hf  # noqa: F401  (knows transformers' models)
from autopar.adapters.quantized_weights import with_plain_weights
from autopar.compile.model import compile_model
from autopar.cost.memory import memories
from autopar.ir.mesh import Mesh
from autopar.options import Options
from tests.module.test_quantized_weights import TABLE, Int8Tensor, Params4bit

peft = pytest.importorskip("peft")

HIDDEN, INNER, OF_KEYS, VOCAB, RANK, BLOCK = 2048, 8192, 512, 128256, 8, 64
SHAPES = [(HIDDEN, HIDDEN), (OF_KEYS, HIDDEN), (OF_KEYS, HIDDEN), (HIDDEN, HIDDEN)]
SHAPES += [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
LAYERS = "base_model.model.model.layers"


class Linear4bit(nn.Linear):
    """As in bitsandbytes."""

    compute_dtype, compute_type_is_set = torch.bfloat16, True


def in_few_bits(linear: nn.Linear, kind: str) -> nn.Linear:
    """The layer as its library loads it: nf4 of bitsandbytes, int8 of torchao with a scale for each output."""
    shape, count = linear.weight.shape, linear.weight.numel()
    if kind == "int8":
        weight: Any = Int8Tensor(linear.weight.detach(), requires_grad=False)
        codes, scale = torch.empty(shape, dtype=torch.int8), torch.empty(shape[0], 1, dtype=torch.bfloat16)
        vars(weight).update(qdata=codes, scale=scale, act_quant_kwargs=None)
    else:
        linear = Linear4bit(shape[1], shape[0], bias=False)
        weight = Params4bit(torch.empty(count // 2, 1, dtype=torch.uint8), requires_grad=False)
        scales = {"absmax": torch.empty(count // BLOCK), "code": TABLE, "blocksize": BLOCK, "nested": False}
        weight.quant_state = SimpleNamespace(**scales, shape=shape, dtype=torch.bfloat16)
    linear.weight = weight
    return linear


def adapted(kind: str, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=layers, head_dim=64,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        base: Any = LlamaForCausalLM(config).bfloat16()
        for module in list(base.model.layers.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, in_few_bits(child, kind))
    return with_plain_weights(peft.get_peft_model(base, peft.LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"])))


def held(kind: str, layers: int, axis: str) -> list[tuple[int, int]]:
    """Of each rank on pp, by the formula: bytes of all parameters, and of those that train (float32)."""
    codes = sum(out * into for out, into in SHAPES) // (2 if kind == "nf4" else 1)
    scales = 4 * (sum(out * into for out, into in SHAPES) // BLOCK if kind == "nf4" else sum(out for out, _ in SHAPES))
    first, second, norm = 4 * 2 * RANK * HIDDEN, 4 * RANK * (HIDDEN + OF_KEYS), 2 * HIDDEN
    words = 2 * VOCAB * HIDDEN
    if axis == "dp":  # norms are vectors, which are not sharded
        layer, trained = (codes + scales + first + second) // 2 + 2 * norm, (first + second) // 2
        ends = words // 2 + norm
    elif axis == "tp":  # norms and the first matrix of an adapter are whole; so are scales of products that are summed
        summed = sum(out for out, _ in (SHAPES[3], SHAPES[6])) if kind == "int8" else 0
        cut = (codes + scales - 4 * summed + second) // 2 + 4 * summed
        layer, trained, ends = cut + first + 2 * norm, first + second // 2, words // 2 + norm
    else:
        layer, trained, half = codes + scales + first + second + 2 * norm, first + second, layers // 2
        return [(half * layer + words + end, half * trained) for end in (0, norm)]
    return [(layers * layer + ends, layers * trained)]


CASES = {"dp": {"zero": 3}, "tp": {}, "pp": {"microbatches": 2}}
FEW = {("nf4", "dp"), ("int8", "tp"), ("nf4", "pp")}
ALL = [(kind, axis, 2) for kind in ("nf4", "int8") for axis in CASES]


@pytest.mark.parametrize(
    ("kind", "axis", "layers"),
    [pytest.param(*case, marks=() if case[:2] in FEW else pytest.mark.full) for case in ALL]
    + [pytest.param(kind, axis, 16, marks=pytest.mark.full) for kind, axis, _ in ALL],
)
def test_the_memory_plan_is_the_formula(kind: str, axis: str, layers: int) -> None:
    batch = {name: torch.zeros(4, 16, dtype=torch.long) for name in ("input_ids", "labels")}
    options: dict[str, Any] = {**CASES[axis], "split_points": (f"{LAYERS}.{layers // 2}",) if axis == "pp" else ()}
    made = compile_model(adapted(kind, layers), batch, Mesh.of(**{axis: 2}), Options(**options), outputs=())
    found = memories(made)
    assert [(m.parameters, m.gradients) for m in found] == held(kind, layers, axis)
    assert [m.optimizer for m in found] == [2 * m.gradients for m in found]
