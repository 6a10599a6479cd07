"""Context parallelism of others, on CPU: torch's own, and packages that are installed.

    torch                   `_templated_ring_attention` of torch.distributed.tensor.experimental, causal with its
                            head-tail balance. Its dispatcher knows CUDA's operators only; it is given the CPU's.
    ring-flash-attn         zhuzilin's zigzag ring, its plain ring (full), and Llama 3's all-gather
    yunchang                Ulysses, and Ulysses inside of a zigzag ring (USP)

The last two are no dependencies. Where flash_attn is needed, `flash_attn_for_cpu` stands in with torch's CPU kernel:
the rings are theirs, line by line. Left out: ring-attention-pytorch 0.5.20. Without Triton its backward returns a pair
of gradients of keys and values as that of the keys, its forward does not run on half types, and `zig_zag_attn` drops
the gradients that other ranks have for one's keys.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from context import AXIS, Case, Missing, Side, differentiated, heads_first, positions_of, sdpa
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_context

from autopar.attention.layouts import CONTIGUOUS, ZIGZAG
from autopar.runtime.mesh.process_groups import Groups

_aten = torch.ops.aten
_forward = _aten._scaled_dot_product_flash_attention_for_cpu
_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward


# --- torch --------------------------------------------------------------------------------------------


class _TorchRing(torch.autograd.Function):
    """What torch's dispatcher does under `context_parallel`, with the operators of the CPU."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any, case: Case, method: str) -> Tensor:
        ctx.how = group, case, method
        _torch_options(case, method)
        op = partial(_forward, dropout_p=0.0, scale=case.scale)
        out, lse, *_ = torch_context._templated_ring_attention(group, 2, op, q, k, v, is_causal=case.causal)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        group, case, method = ctx.how
        _torch_options(case, method)
        op = partial(_backward, dropout_p=0.0, scale=case.scale)
        q, k, v, out, lse = ctx.saved_tensors
        found = torch_context._templated_ring_attention_backward(
            group, 2, op, grad, "grad_out", q, k, v, out, lse, is_causal=case.causal
        )
        return *found[:3], None, None, None


def _torch_options(case: Case, method: str) -> None:
    torch_context._cp_options.enable_load_balance = case.causal
    torch_context.set_rotate_method(method)


def torch_ring(case: Case, groups: Groups, method: str) -> Side:
    """``method``: "allgather" (the default of torch) or "alltoall"."""
    positions = positions_of(case, ZIGZAG if case.causal else CONTIGUOUS, groups.rank)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _TorchRing.apply(q, k, v, groups.group(AXIS), case, method)

    return differentiated(partial(heads_first, attend), case.own(positions), positions)


# --- a stand-in for flash_attn ------------------------------------------------------------------------


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, *_: Any, **__: Any
) -> tuple[Any, ...]:
    """[batch, positions, heads, width] -> out, and lse [batch, heads, positions]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = _forward(q, k, v, 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse.contiguous(), None, None


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, *_: Any, **__: Any,
) -> None:  # fmt: skip
    """Writes dq, dk, dv."""
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    found = _backward(dout, q, k, v, out, softmax_lse, 0.0, causal, scale=softmax_scale)
    for target, x in zip((dq, dk, dv), found):
        target.copy_(x.transpose(1, 2))


def _flash_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, *_: Any, **__: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """One sequence [positions, heads, width]; causal: the last query stands at the last key, so the keys ahead of the
    triangle are a second call, merged in float32."""
    ahead = len(k) - len(q) if causal else 0
    q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    out, lse, *_ = _flash_forward(q, k[:, ahead:], v[:, ahead:], 0.0, softmax_scale, causal)
    if ahead:
        first, first_lse, *_ = _flash_forward(q, k[:, :ahead], v[:, :ahead], 0.0, softmax_scale, False)
        weight = torch.sigmoid(first_lse - lse).transpose(1, 2).unsqueeze(-1)
        out, lse = torch.lerp(out.float(), first.float(), weight).to(q.dtype), torch.logaddexp(lse, first_lse)
    return out[0], lse[0], None, None


def _flash_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float,
    causal: bool, *_: Any, **__: Any,
) -> None:  # fmt: skip
    ahead = len(k) - len(q) if causal else 0
    dout, q, k, v, out, lse, dq, dk, dv = (x.unsqueeze(0) for x in (dout, q, k, v, out, softmax_lse, dq, dk, dv))

    def part(dq: Tensor, start: int, stop: int, causal: bool) -> None:
        keys = [x[:, start:stop] for x in (k, v)]
        to_keys = [x[:, start:stop] for x in (dk, dv)]
        _flash_backward(dout, q, *keys, out, lse, dq, *to_keys, 0.0, softmax_scale, causal)

    part(dq, ahead, k.shape[1], causal)
    if ahead:
        more = torch.empty_like(dq)
        part(more, 0, ahead, False)
        dq += more


def flash_attn_for_cpu() -> None:
    """Make `import flash_attn` find the functions above, if there is no such package."""
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn"):
        return
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None, is_package=True)
    package.__path__ = []
    package.__dict__.update(__version__="2.8.0", flash_attn_interface=interface, flash_attn_func=None)
    interface.__dict__.update(
        _flash_attn_forward=_flash_forward, _flash_attn_backward=_flash_backward,
        _flash_attn_varlen_forward=_flash_varlen_forward, _flash_attn_varlen_backward=_flash_varlen_backward,
    )  # fmt: skip
    sys.modules.update({"flash_attn": package, "flash_attn.flash_attn_interface": interface})


@cache
def _package(name: str) -> str:
    """Make a package importable and return its folder. Raises Missing."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise Missing("not installed")
    return found.submodule_search_locations[0]


@cache
def _ring_flash_attn(part: str) -> Any:
    """A module of ring-flash-attn, without its ``__init__``: that needs a transformers of its time."""
    folder = _package("ring_flash_attn")
    flash_attn_for_cpu()
    if "ring_flash_attn" not in sys.modules:
        bare = types.ModuleType("ring_flash_attn")
        bare.__path__ = [folder]
        sys.modules["ring_flash_attn"] = bare
    return importlib.import_module(f"ring_flash_attn.{part}")


# --- packages -----------------------------------------------------------------------------------------


def zhuzilin_ring(case: Case, groups: Groups) -> Side:
    """ring-flash-attn: `zigzag_ring_flash_attn_func`; of full attention `ring_flash_attn_func`."""
    _half(case)
    name = "zigzag_ring_flash_attn" if case.causal else "ring_flash_attn"
    ring = getattr(_ring_flash_attn(name), f"{name}_func")
    positions = positions_of(case, ZIGZAG if case.causal else CONTIGUOUS, groups.rank)
    attend = partial(ring, causal=case.causal, group=groups.group(AXIS))
    return differentiated(attend, case.own(positions), positions)


def _half(case: Case) -> None:
    """These rings add to buffers ``x.to(torch.float32)``, which for float32 are those that the kernel writes next."""
    if case.dtype == torch.float32:
        raise Missing("half types only")


def zhuzilin_llama3(case: Case, groups: Groups) -> Side:
    """ring-flash-attn: `llama3_flash_attn_varlen_func`, one key head at a time so that gathers overlap."""
    module = _ring_flash_attn("llama3_flash_attn_varlen")
    whole = torch.tensor([0, case.length], dtype=torch.int32)
    *lengths, keys = module.llama3_flash_attn_prepare_cu_seqlens(whole, case.causal, groups.rank, case.ranks)
    positions = positions_of(case, CONTIGUOUS, groups.rank)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module.llama3_flash_attn_varlen_func(
            q[0], k[0], v[0], *lengths, heads_k_stride=1, local_k_slice=keys, causal=case.causal,
            group=groups.group(AXIS),
        ).unsqueeze(0)  # fmt: skip

    return differentiated(attend, case.own(positions), positions)


def yunchang_ulysses(case: Case, groups: Groups) -> Side:
    """yunchang: `UlyssesAttention` around torch's attention."""
    if case.kv_heads % case.ranks:
        raise Missing(f"needs key heads that divide over {case.ranks} ranks")
    layer = _yunchang().UlyssesAttention(groups.group(AXIS), attn_type=_yunchang().kernels.AttnType.TORCH_MATH)
    layer.attn_fn = _sdpa
    positions = positions_of(case, CONTIGUOUS, groups.rank)
    return differentiated(partial(layer, causal=case.causal), case.own(positions), positions)


def yunchang_usp(case: Case, groups: Groups) -> Side:
    """yunchang: `LongContextAttention`, Ulysses over pairs inside of a zigzag ring."""
    heads, rings = 2, case.ranks // 2
    if rings < 2 or case.kv_heads % heads:
        raise Missing("needs four ranks and an even number of key heads")
    _half(case)
    package = _yunchang()
    package.set_seq_parallel_pg(heads, rings, groups.rank, case.ranks)
    layer = package.LongContextAttention(ring_impl_type="zigzag" if case.causal else "basic")
    blocks = ZIGZAG if case.causal else CONTIGUOUS
    outer = positions_of(Case(**{**vars(case), "ranks": rings}), blocks, groups.rank // heads)
    positions = outer.chunk(heads)[groups.rank % heads]
    return differentiated(partial(layer, causal=case.causal), case.own(positions), positions)


@cache
def _yunchang() -> Any:
    _package("yunchang")
    flash_attn_for_cpu()
    return importlib.import_module("yunchang")


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float, **_: Any) -> Tensor:
    return heads_first(partial(sdpa, causal, softmax_scale), q, k, v)


PEERS: dict[str, Callable[[Case, Groups], Side]] = {
    "torch allgather": partial(torch_ring, method="allgather"),
    "torch alltoall": partial(torch_ring, method="alltoall"),
    "ring-flash-attn ring": zhuzilin_ring,
    "ring-flash-attn llama3": zhuzilin_llama3,
    "yunchang ulysses": yunchang_ulysses,
    "yunchang usp": yunchang_usp,
}
