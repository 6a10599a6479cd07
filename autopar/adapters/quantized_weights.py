"""Frozen weights in few bits, as bitsandbytes and torchao hold them: plain tensors that a forward dequantizes.

Their classes of tensors (Params4bit, Int8Tensor) have a behaviour that shards would not have. `with_plain_weights` puts
modules with the same numbers in place of the linear layers that hold them: the packed bytes and the scales of blocks
are frozen parameters of their own, which are sharded, gathered, cut and saved as they are, and the weight is computed
where it is used. What trains on top (LoRA) is left as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.adapters.copying.fake_deepcopy import rebuild


def with_plain_weights(model: Any) -> Any:
    """The model, if it has no such weights; else a copy that shares all other tensors. Raises ValueError for formats
    whose numbers depend on the batch or on the device."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    shared: dict[int, QuantizedLinear] = {}
    plain = {id(m): made for m in modules if (made := _plain(m, shared)) is not None}
    if not plain:
        return model
    own = (*model.parameters(), *model.buffers())
    return rebuild(model, {id(x): x for x in own} | plain, lambda x: x)


def check_whole_weights(model: nn.Module) -> None:
    """Raises ValueError for a model with such weights: its library could not read them."""
    found = next((path for path, m in model.named_modules() if isinstance(m, QuantizedLinear)), None)
    if found is not None:
        raise ValueError(
            f"save_pretrained: writes what the model's library reads, found weights in few bits at {found}; use "
            "autopar.save, or save the adapter of a peft model"
        )


class QuantizedLinear(nn.Module):
    """x [..., in] -> [..., out], as a linear layer with the weight codes times scales. ``rows``: the layout of both is
    [out, ...]; else blocks go over the ends of rows, and both are flat.

    scales: of blocks of ``block`` weights, float32, whatever the policy of precision. dtype: of the dequantized weight;
    compute: that x is cast to (None: its own).
    """

    def __init__(
        self, weight: Tensor, scales: Tensor, size: tuple[int, int], block: int, dtype: torch.dtype,
        bias: nn.Parameter | None, compute: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.out_features, self.in_features = size
        self.block, self.dtype, self.compute = block, dtype, compute
        self.rows = self.in_features % block == 0
        if self.rows:
            weight, scales = (x.reshape(self.out_features, -1) for x in (weight, scales))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales.float().contiguous(), requires_grad=False)
        self.bias = bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, block={self.block}"

    def codes(self) -> Tensor:
        """Each weight in units of its block's scale, float32, laid out as ``weight``."""
        return self.weight.float()

    def dequantized(self) -> Tensor:
        """[out, in]."""
        codes, scales = self.codes(), self.scales.unsqueeze(-1)
        if self.rows:
            found = (codes.unflatten(-1, (-1, self.block)) * scales).flatten(-2)
        else:
            size = self.out_features * self.in_features
            codes = F.pad(codes[:size], (0, scales.shape[0] * self.block - size))
            found = (codes.view(-1, self.block) * scales).flatten()[:size].view(self.out_features, self.in_features)
        return found.to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        given = x if self.compute is None else x.to(self.compute)
        bias = None if self.bias is None else self.bias.to(given.dtype)
        return F.linear(given, self.dequantized().to(given.dtype), bias).to(x.dtype)


class FourBitLinear(QuantizedLinear):
    """Two weights to a byte, the first in its upper half, each the number of an entry of ``table`` [16]: nf4 (Dettmers
    et al. 2023, "QLoRA", section 3) or fp4."""

    table: Tensor

    def __init__(self, table: Tensor, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("table", table.float().clone(), persistent=False)

    def codes(self) -> Tensor:
        pairs = torch.stack([self.weight >> 4, self.weight & 15], -1).flatten(-2)
        return self.table[pairs.to(torch.int32)]


def _plain(module: nn.Module, shared: dict[int, QuantizedLinear]) -> QuantizedLinear | None:
    """What takes the place of a module, None: it stays. shared: by weight, what others that have it are replaced by."""
    weight: Any = module._parameters.get("weight")
    kind, library = type(weight).__name__, type(weight).__module__.partition(".")[0]
    if library == "bitsandbytes" and kind == "Int8Params":
        raise ValueError(
            "parallelize: needs weights whose dequantized numbers are fixed, found LLM.int8 of bitsandbytes "
            f"({type(module).__name__}), which rounds the tokens of a batch together; use 4 bits "
            "(BitsAndBytesConfig(load_in_4bit=True)), or int8 weights of torchao"
        )
    make = _FORMATS.get((library, kind))
    if make is None or weight.requires_grad or not _is_linear(module):
        return None
    made = make(module, weight)
    if id(weight) in shared:
        made.weight, made.scales = shared[id(weight)].weight, shared[id(weight)].scales
    others = {name: x for name, x in vars(module).items() if name not in {*vars(made), "quant_state"}}
    vars(made).update(others)
    shared.setdefault(id(weight), made)
    return made.train(module.training)


def _is_linear(module: nn.Module) -> bool:
    """Whether a call is the product of its library, and nothing else."""
    home = type(module).forward.__module__
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    known = home.startswith(("torch.nn.", "bitsandbytes."))
    return isinstance(module, nn.Linear) and known and not any(hooks) and "forward" not in vars(module)


def _of_bitsandbytes(module: Any, weight: Any) -> QuantizedLinear:
    state = weight.quant_state if weight.quant_state is not None else getattr(module, "quant_state", None)
    if state is None:
        raise ValueError(
            "parallelize: needs 4-bit weights that are quantized, found a Params4bit in full precision; move the model "
            "to its device first (model.to(device)), which quantizes them"
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            "parallelize: found 4-bit weights in the layout of bitsandbytes for inference on a CPU; call "
            "model.train() before the first forward, or load them anew"
        )
    scales = state.absmax
    if state.nested:
        inner = state.state2
        scales = inner.code.float()[scales.int()] * inner.absmax.repeat_interleave(inner.blocksize)[: scales.numel()]
        scales = scales + state.offset
    return FourBitLinear(
        state.code, weight.data.view(torch.uint8).flatten(), scales.flatten(), tuple(state.shape), state.blocksize,
        state.dtype, module.bias, module.compute_dtype if module.compute_type_is_set else None,
    )  # fmt: skip


def _of_torchao(module: nn.Linear, weight: Any) -> QuantizedLinear:
    zero = getattr(weight, "zero_point", None)
    if getattr(weight, "act_quant_kwargs", None) is not None or (zero is not None and bool(zero.count_nonzero())):
        raise ValueError(
            "parallelize: needs int8 weights alone, found weights of torchao with quantized activations or zero points;"
            " use Int8WeightOnlyConfig()"
        )
    block = module.in_features // weight.scale.reshape(module.out_features, -1).shape[1]
    return QuantizedLinear(
        weight.qdata, weight.scale, (module.out_features, module.in_features), block, weight.dtype, module.bias, None
    )


def _of_nf4(module: nn.Linear, weight: Any) -> QuantizedLinear:
    scales = weight.dequantize_scalers(weight.quantized_scalers, weight.quantization_factor, weight.scaler_block_size)
    return FourBitLinear(
        weight.nf4, weight.quantized_data, scales, (module.out_features, module.in_features), weight.block_size,
        weight.dtype, module.bias, None,
    )  # fmt: skip


_FORMATS = {
    ("bitsandbytes", "Params4bit"): _of_bitsandbytes,
    ("torchao", "Int8Tensor"): _of_torchao,
    ("torchao", "NF4Tensor"): _of_nf4,
}
