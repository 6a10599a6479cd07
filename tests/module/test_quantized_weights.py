"""Frozen weights in few bits under LoRA, as bitsandbytes and torchao hold them: stand-ins for their classes, whose
numbers `tests/outside/test_quantized.py` compares with the libraries' own."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.adapters.quantized_weights import FourBitLinear, QuantizedLinear, with_plain_weights
from autopar.compile.model import compile_model
from autopar.cost.memory import memory
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.runtime.module.argument_checks import check_module
from tests.support.ranks import refusal, run_ranks

HIDDEN, INNER, BLOCK = 32, 48, 16
TABLE = torch.tensor([-1.0, -0.7, -0.5, -0.4, -0.3, -0.2, -0.1, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0])


def quantized(w: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(bytes, scales) of a weight, both flat."""
    blocks = F.pad(w.flatten(), (0, -w.numel() % block)).view(-1, block)
    scales = blocks.abs().amax(1).clamp(min=1e-9)
    codes = (blocks / scales[:, None]).unsqueeze(-1).sub(TABLE).abs().argmin(-1).to(torch.uint8).flatten()
    codes = F.pad(codes[: w.numel()], (0, w.numel() % 2))
    return codes[::2] << 4 | codes[1::2], scales.float()


class Params4bit(nn.Parameter):
    """As in bitsandbytes."""

    __module__ = "bitsandbytes.nn.modules"
    quant_state: Any = None


class Linear4bit(nn.Linear):
    """As in bitsandbytes."""

    compute_dtype, compute_type_is_set = None, True

    def __init__(self, *sizes: int, block: int = BLOCK, nested: bool = False) -> None:
        super().__init__(*sizes, bias=False, dtype=torch.float64)
        packed, scales = quantized(self.weight.detach(), block)
        self.weight = Params4bit(packed.view(-1, 1), requires_grad=False)
        self.weight.quant_state = SimpleNamespace(
            absmax=scales, code=TABLE, blocksize=block, shape=torch.Size(sizes[::-1]), dtype=torch.float64, nested=False
        )
        if nested:
            self.nest(self.weight.quant_state)

    def nest(self, state: Any) -> None:
        code, offset = torch.linspace(-1, 1, 256), state.absmax.mean()
        inner = (state.absmax - offset).view(-1).split(4)
        largest = torch.stack([x.abs().max() for x in inner])
        of_each = torch.cat([x / most for x, most in zip(inner, largest, strict=True)])
        state.absmax = (of_each[:, None] - code).abs().argmin(1).to(torch.uint8)
        state.nested, state.offset = True, offset
        state.state2 = SimpleNamespace(code=code, absmax=largest, blocksize=4)


class Layer(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.up, self.down = Linear4bit(HIDDEN, INNER, **how), Linear4bit(INNER, HIDDEN, **how)
        self.a = nn.Parameter(torch.randn(4, HIDDEN, dtype=torch.float64) / 8)
        self.b = nn.Parameter(torch.randn(INNER, 4, dtype=torch.float64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.linear(x, self.a), self.b)
        return x + self.down((self.up(x) + low).relu())


class Adapted(nn.Module):
    """Layers with LoRA on frozen weights; the last refers to the first by a plain attribute."""

    def __init__(self, layers: int = 2, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(**how) for _ in range(layers)])
        self.first = [self.layers[0]]
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (self.first[0].up(x) * self.scale).square().mean()


def reference(model: nn.Module) -> nn.Module:
    """The same with whole weights, dequantized by another route."""
    found = copy.deepcopy(with_plain_weights(model))
    for path, module in list(found.named_modules()):
        if isinstance(module, FourBitLinear):
            pairs = torch.stack([module.weight.flatten() >> 4, module.weight.flatten() & 15], 1).flatten().long()
            size = module.out_features * module.in_features
            w = TABLE[pairs[:size]] * module.scales.detach().flatten().repeat_interleave(module.block)[:size]
            plain = nn.Linear(module.in_features, module.out_features, bias=False, dtype=torch.float64)
            plain.weight = nn.Parameter(w.double().view(module.out_features, -1), requires_grad=False)
            parent, _, name = path.rpartition(".")
            setattr(found.get_submodule(parent), name, plain)
    found.first = [found.layers[0]]  # type: ignore[assignment, index]
    return found


def rows() -> Tensor:
    return torch.randn(8, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def trained(sizes: dict[str, int], how: dict[str, Any], options: dict[str, Any]) -> tuple[float, dict[str, float], int]:
    """Loss, how far gradients are from those of whole weights, and bytes of codes and scales that a rank holds."""
    model, mesh = Adapted(**how), autopar.init_mesh("cpu", **sizes)
    whole = reference(model)
    expected = whole(rows())
    expected.backward()
    parallel = autopar.parallelize(model, mesh, example_batch={"x": rows()}, **options)
    mine, of = autopar.dp_rank_and_size(mesh)
    loss = parallel.train_step(x=rows().chunk(of)[mine])
    assert "use autopar.save, or save the adapter" in refusal(parallel.save_pretrained, "unused")
    right, apart = dict(whole.named_parameters()), {}
    for name, p in parallel.named_parameters():
        if p.requires_grad:
            gradient = right[name].grad
            assert gradient is not None
            apart[name] = float((p.grad.full_tensor() - gradient).abs().max() / gradient.abs().max())
    held = sum(
        p.to_local().nbytes for name, p in parallel.named_parameters() if name.endswith(("weight", "scales"))
    )  # fmt: skip
    return abs(float(loss) - float(expected)), apart, held


BYTES = 2 * 2 * (HIDDEN * INNER // 2 + HIDDEN * INNER // BLOCK * 4)


@pytest.mark.parametrize(
    ("sizes", "how", "options", "shares"),
    [
        ({"dp": 2}, {}, {"zero": 3}, 2),
        ({"tp": 2}, {}, {}, 1),
        ({"tp": 2, "dp": 2}, {"nested": True}, {"zero": 3}, 2),
        ({"pp": 2}, {}, {"microbatches": 2}, 0),
        ({"dp": 4}, {"block": 64}, {"zero": 3}, 0),  # blocks go over the ends of rows
    ],
    ids=str,
)
def test_equals_whole_weights(sizes: dict[str, int], how: Any, options: Any, shares: int) -> None:
    found = run_ranks(torch.Size(sizes.values()).numel(), trained, sizes, how, options)
    for far, apart, held in found:
        assert far < 1e-12 and len(apart) == 5 and max(apart.values()) < 1e-12, apart
        assert not shares or held <= BYTES / shares


def test_gathers_are_of_bytes() -> None:
    """Not of dequantized weights: 8 bytes each here. Nor are these kept for the backward."""
    model = with_plain_weights(Adapted())
    whole = reference(model)
    sent, kept = [], []
    for one in (model, whole):
        made = compile_model(one, {"x": rows()}, Mesh.of(dp=2), Options(zero=3, activation_checkpoint="none"))
        gathers = [n for n in made.stage.forward.graph.graph.nodes if "all_gather" in str(n.target)]
        sent.append(sum(n.args[0].meta["val"].nbytes for n in gathers))
        kept.append(memory(made).saved)
    assert sent[0] < 0.2 * sent[1], sent
    assert kept[0] <= 1.05 * kept[1], kept


def test_half_precision_casts_no_scales() -> None:
    model = with_plain_weights(Adapted())
    made = compile_model(model, {"x": rows()}, Mesh.of(dp=1), Options(precision="bf16"))
    dtypes = {spec.name: spec.dtype for spec in made.parameters}
    scales = [name for name in dtypes if name.endswith("scales")]
    assert len(scales) == 4 and all(dtypes[name] is torch.float32 for name in scales)
    assert all(dtypes[name] is torch.uint8 for name in dtypes if name.endswith("weight"))


def test_the_model_itself_stays() -> None:
    model = Adapted()
    plain = with_plain_weights(model)
    assert plain is not model and type(model.layers[0].up) is Linear4bit  # type: ignore[union-attr]
    assert plain.first[0] is plain.layers[0] and plain.scale is model.scale, "references lead to the copy"
    assert with_plain_weights(plain) is plain


def test_tied_weights_stay_tied() -> None:
    model = Adapted()
    model.layers[1].up.weight = model.layers[0].up.weight  # type: ignore[union-attr]
    plain = with_plain_weights(model.eval())
    first, second = (layer.up for layer in plain.layers)
    assert first.weight is second.weight and first.scales is second.scales and first is not second
    assert not any(module.training for module in plain.modules())


class Embedding4bit(nn.Embedding):
    """As in bitsandbytes."""


@pytest.mark.parametrize("case", ["an embedding", "a forward of its own", "a hook", "a patched forward", "trained"])
def test_other_uses_stay_and_are_refused(case: str) -> None:
    model: Any = nn.Sequential(Linear4bit(HIDDEN, INNER))
    if case == "an embedding":
        weight, model = model[0].weight, nn.Sequential(Embedding4bit(4, 4))
        model[0].weight = weight
    elif case == "a forward of its own":
        model[0].__class__ = type("Doubled", (Linear4bit,), {"forward": doubled})
    elif case == "a hook":
        model[0].register_forward_hook(lambda *_: None)
    elif case == "a patched forward":
        model[0].forward = lambda x: 2 * x
    else:
        model[0].weight = Int8Tensor(torch.zeros(INNER, HIDDEN), requires_grad=True)
    assert with_plain_weights(model) is model
    assert "needs plain parameters and buffers, found parameter 0.weight" in refusal(check_module, model)


def doubled(self: Any, x: Tensor) -> Tensor:
    return 2 * x


class Int8Params(nn.Parameter):
    """As in bitsandbytes."""

    __module__ = "bitsandbytes.nn.modules"


class Int8Tensor(nn.Parameter):
    """As in torchao."""

    __module__ = "torchao.quantization"


def of_weight(weight: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(HIDDEN, INNER))
    model[0].weight = weight
    return model


def test_int8_weights_of_torchao() -> None:
    torch.manual_seed(0)
    weight, codes = (
        Int8Tensor(torch.zeros(INNER, HIDDEN), requires_grad=False),
        torch.randint(-127, 128, (INNER, HIDDEN)),
    )
    vars(weight).update(qdata=codes.to(torch.int8), scale=torch.rand(INNER, 1), act_quant_kwargs=None)
    plain = with_plain_weights(of_weight(weight))
    (linear,) = plain
    assert type(linear) is QuantizedLinear and linear.block == HIDDEN
    torch.testing.assert_close(linear.dequantized(), codes * weight.scale)  # type: ignore[attr-defined]
    weight.act_quant_kwargs = {}  # type: ignore[attr-defined]
    assert "use Int8WeightOnlyConfig()" in refusal(with_plain_weights, of_weight(weight))


class NF4Tensor(nn.Parameter):
    """As in torchao: scales of blocks are int8, times those of blocks of scales, beside their mean."""

    __module__ = "torchao.quantization"

    def dequantize_scalers(self, codes: Tensor, factor: Tensor, block: int) -> Tensor:
        return codes / factor.repeat_interleave(block) + self.scaler_mean  # type: ignore[attr-defined]


def test_nf4_weights_of_torchao() -> None:
    torch.manual_seed(0)
    weight, count = NF4Tensor(torch.zeros(INNER, HIDDEN), requires_grad=False), INNER * HIDDEN // BLOCK
    packed = torch.randint(0, 256, (INNER * HIDDEN // 2,), dtype=torch.uint8)
    scales, factor = torch.randint(-128, 128, (count,), dtype=torch.int8), torch.rand(count // 4) * 100 + 100
    vars(weight).update(
        quantized_data=packed, quantized_scalers=scales, quantization_factor=factor, scaler_block_size=4, nf4=TABLE,
        block_size=BLOCK, scaler_mean=torch.tensor(2.0),
    )  # fmt: skip
    (linear,) = with_plain_weights(of_weight(weight))
    pairs = torch.stack([packed >> 4, packed & 15], 1).flatten().long()
    expected = TABLE[pairs] * weight.dequantize_scalers(scales, factor, 4).repeat_interleave(BLOCK)
    torch.testing.assert_close(linear.dequantized(), expected.view(INNER, HIDDEN))


class Float8Tensor(nn.Parameter):
    """As in torchao."""

    __module__ = "torchao.quantization"


def test_other_formats_of_a_library_are_refused_with_its_way_out() -> None:
    said = refusal(check_module, of_weight(Float8Tensor(torch.zeros(INNER, HIDDEN))))
    assert "found parameter 0.weight, a Float8Tensor" in said and "pass the model before its conversion" in said
    model = nn.Sequential(Embedding4bit(4, 4))
    model[0].weight = Linear4bit(HIDDEN, INNER).weight
    assert "only linear layers keep frozen weights of bitsandbytes" in refusal(check_module, model)


def test_refused() -> None:
    assert "use 4 bits" in refusal(with_plain_weights, of_weight(Int8Params(torch.zeros(2, 2))))
    model = Adapted()
    model.layers[0].up.weight.quant_state.packing_format_for_cpu = True  # type: ignore[union-attr]
    assert "model.train() before the first forward" in refusal(with_plain_weights, model)
    model.layers[0].up.weight.quant_state = None  # type: ignore[union-attr]
    assert "found a Params4bit in full precision" in refusal(with_plain_weights, model)
