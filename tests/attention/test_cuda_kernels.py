"""Kernels of attention for CUDA, played on the CPU.

Operators are played by functions with their schema (arguments are bound by the schema of the real one) that have their
habits: where triangles begin, how long lse is, what stands in rows without keys, which widths and heads they take.
"""

from __future__ import annotations

import importlib.machinery
import math
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from autopar.adapters import flash_attn
from autopar.ops import kernels
from autopar.ops.kernels import KERNELS, cuda
from autopar.ops.kernels.chips import Chip
from tests.support.kernel_cases import CASES, CUDA, HK, HQ, SIZES, B, S, both_ways, case_of, compare, facts, tensors

INF = float("inf")
aten = torch.ops.aten


def scores_of(a: dict[str, Any], flash: bool) -> Tensor:
    """With the triangle at the first key; of flash attention with its end at the last, and windows around it."""
    q, k, mask = a["query"], a["key"], a.get("attn_bias")
    scores = q @ k.transpose(-1, -2) * a["scale"]
    if mask is not None:
        assert mask.shape == scores.shape and mask.stride(-2) % 16 == 0 and mask.stride(-1) == 1
        scores = scores + mask
    left, right = a.get("window_size_left", -1), 0 if a["is_causal"] else a.get("window_size_right", -1)
    return scores.masked_fill(outside(q.shape[2], k.shape[2], left, right, last=flash), -INF)


def outside(queries: int, keys: int, left: int, right: int, last: bool) -> Tensor:
    """What is too far from the diagonal, which ends at the ``last`` key or begins at the first; -1: nothing."""
    i = torch.arange(queries).unsqueeze(-1) + (keys - queries if last else 0)
    j = torch.arange(keys)
    return ((j < i - left) & (left >= 0)) | ((j > i + right) & (right >= 0))


def forward_of(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Rows without keys are not a number, and have an infinite lse."""
    lse = torch.logsumexp(scores, -1)
    return torch.softmax(scores, -1) @ v, lse.masked_fill(lse == -INF, INF)


def backward_of(scores: Tensor, lse: Tensor, a: dict[str, Any], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of queries, keys, values and scores."""
    weights = torch.exp(scores - lse.unsqueeze(-1))
    delta = (grad * a["out"]).sum(-1, keepdim=True)
    to_scores = weights * (grad @ a["value"].transpose(-1, -2) - delta)
    to_q, to_k = to_scores @ a["key"] * a["scale"], to_scores.transpose(-1, -2) @ a["query"] * a["scale"]
    return to_q, to_k, weights.transpose(-1, -2) @ grad, to_scores


class Played:
    """`torch.ops.aten` with the CUDA operators on the CPU."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        schema = getattr(aten, name).default._schema
        flash = "flash" in name

        def call(*args: Any, **kwargs: Any) -> Any:
            assert len(args) <= sum(not x.kwarg_only for x in schema.arguments)
            a = {x.name: x.default_value for x in schema.arguments if x.has_default_value()}
            a |= dict(zip((x.name for x in schema.arguments), args)) | kwargs
            assert set(a) == {x.name for x in schema.arguments} and not a["dropout_p"]
            for operand in ("query", "key", "value", "out", "grad_out") if flash else ():
                a |= {operand: a[operand].transpose(1, 2)} if operand in a else {}
            heads = a["key"].shape[1]
            check_operands(name, a["query"], a["key"], a["value"])
            a["key"], a["value"] = (x.repeat_interleave(HQ // x.shape[1], 1) for x in (a["key"], a["value"]))
            scores = scores_of(a, flash)
            if name.endswith("_backward"):
                lse = a["logsumexp"]
                assert lse.is_contiguous() and not lse.isneginf().any()
                if "cudnn" in name:
                    assert lse.shape[3:] == (1,)
                    lse = lse.squeeze(-1)
                if "efficient" in name:
                    assert a["out"].transpose(1, 2).is_contiguous(), "it reads no stride of its rows"
                    assert lse.shape[2] % 32 == 0 and a["grad_input_mask"][:3] == [True, True, True]
                    assert lse[..., a["query"].shape[2] :].isposinf().all()
                    lse = lse[..., : a["query"].shape[2]]
                else:
                    assert (a["max_q"], a["max_k"]) == (a["query"].shape[2], a["key"].shape[2])
                *grads, to_scores = backward_of(scores, lse, a, a.get("grad_out", a.get("grad_out_")))
                grads = (grads[0], *(x.unflatten(1, (heads, -1)).sum(2) for x in grads[1:]))
                grads = tuple(x.transpose(1, 2) for x in grads) if flash else grads
                return (*grads, to_scores if a["grad_input_mask"][3] else None) if "efficient" in name else grads
            out, lse = forward_of(scores, a["value"])
            if "cudnn" in name:
                return out, lse.unsqueeze(-1), None
            if "efficient" in name:
                assert a["compute_log_sumexp"]
                lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=INF)
            return out.transpose(1, 2) if flash else out, lse, None

        return call


def check_operands(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """What the operators demand. (Tensors of float64 pass for half ones: 16 bytes are two of them, eight of half.)"""
    widths = q.shape[-1], v.shape[-1]
    if "efficient" in name:
        assert q.shape[1] == k.shape[1] == v.shape[1], "a key head for each query head"
    else:
        assert k.shape[1] == v.shape[1] <= HK, "key heads are not expanded"
    if "cudnn" in name:
        assert max(widths) <= 128 or widths == (192, 128)
        assert k.shape[2] > 1
    elif "efficient" not in name:
        assert widths[0] == widths[1] <= 256 and not 192 < widths[0] <= 224
    for x in (q, k, v):
        assert x.shape[-1] % 8 == 0 and x.stride(-1) == 1
        assert all(place % 2 == 0 for place in (x.storage_offset(), *x.stride()[:-1]))


def played_package() -> types.ModuleType:
    """flash_attn.flash_attn_interface: [B, S, H, D], fewer key heads, windows around a diagonal that ends last."""
    module = types.ModuleType("flash_attn.flash_attn_interface")

    def scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int, cap: float) -> Tensor:
        raw = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scale
        raw = torch.tanh(raw / cap) * cap if cap else raw
        right = 0 if causal else right
        return raw.masked_fill(outside(q.shape[2], k.shape[2], left, right, last=True), -INF)

    def forward(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
        window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        assert not dropout_p and alibi_slopes is None and not return_softmax
        check_operands("package", *(x.transpose(1, 2) for x in (q, k, v)))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        s = scores(q, k, softmax_scale, causal, window_size_left, window_size_right, softcap)
        out, lse = forward_of(s, v.repeat_interleave(q.shape[1] // v.shape[1], 1))
        return out.transpose(1, 2), lse, q.new_empty(0), q.new_empty(2)

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
        window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert not dropout_p and alibi_slopes is None and softmax_lse.is_contiguous()
        inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            s = scores(*inputs[:2], softmax_scale, causal, window_size_left, window_size_right, softcap)
            weights = torch.exp(s - softmax_lse.unsqueeze(-1))
            result = weights @ inputs[2].repeat_interleave(s.shape[1] // inputs[2].shape[1], 1)
            delta = (dout * out).sum(-1).transpose(1, 2)
            loss = (result * dout.transpose(1, 2)).sum() - (weights.sum(-1) * delta).sum()
        for into, found in zip((dq, dk, dv), torch.autograd.grad(loss, inputs)):
            into.copy_(found.transpose(1, 2))
        return delta

    vars(module).update(_flash_attn_forward=forward, _flash_attn_backward=backward)
    return module


A10G, A100, H100 = Chip((8, 6), 92000), Chip((8, 0), 92000), Chip((9, 0), 92000)


def on_a(monkeypatch: pytest.MonkeyPatch, chip: Chip) -> None:
    for module in (cuda, kernels):
        monkeypatch.setattr(module, "chip_of", lambda device: chip)


@pytest.fixture
def played_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU, in float64, pass for CUDA tensors in half."""
    monkeypatch.setattr(cuda, "_aten", Played())
    monkeypatch.setattr(cuda, "_on_cuda", lambda q: True)
    monkeypatch.setattr(cuda, "HALF", (torch.float64,))
    for kernel in (cuda.FlashAttn, cuda.Cudnn, cuda.CudaFlash, cuda.CudaEfficient):
        monkeypatch.setattr(kernel, "dtypes", (torch.float64, torch.float32)[: 1 + (kernel is cuda.CudaEfficient)])
    on_a(monkeypatch, A10G)
    monkeypatch.setattr(flash_attn, "installed", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", played_package())


FLASH = {"plain", "causal", "sinks", "later queries", "odd width", "narrower values", "one key head", "one key"}
FLASH |= {"192 with 128", "between 192 and 224"}
COMPUTES = {
    "flash_attn": FLASH | {"window", "two-sided window", "softcap", "softcap of an odd width"},
    "cudnn": {"plain", "causal", "sinks", "odd width", "narrower values", "one key head"},
    "cuda_flash": FLASH | {"window", "two-sided window"},
    "cuda_efficient": set(CASES) - {"softcap", "dropout", "softcap of an odd width"},
}


# documents in one call: test_documents_in_one_call
PLAYED = [(name, case) for name in CUDA for case in CASES if case != "documents" or "flash" not in name]


@pytest.mark.usefixtures("played_cuda")
@pytest.mark.parametrize(("name", "case"), PLAYED)
def test_cuda_kernels_as_played(name: str, case: str) -> None:
    assert compare(name, case) == (case in COMPUTES[name])


@pytest.mark.usefixtures("played_cuda")
def test_cuda_kernels_on_other_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a(monkeypatch, H100)
    assert compare("cudnn", "192 with 128") and not compare("cudnn", "wide")
    on_a(monkeypatch, Chip((9, 0), 91500))
    assert not compare("cudnn", "causal"), "errs at lengths that are no multiple of 128"
    on_a(monkeypatch, Chip((7, 0), 92000))
    assert [name for name in CUDA if compare(name, "causal")] == ["cuda_efficient"], "forced or not"


@pytest.mark.usefixtures("played_cuda")
@pytest.mark.parametrize("shape", [(1, HQ, S, S), (B, 1, 1, S), (S, S), (S,)], ids=str)
def test_the_gradient_of_a_bias(shape: tuple[int, ...]) -> None:
    """Summed over the dims that the bias has once; rows of padding alone give none."""
    (q, k, v, grad), _ = case_of("odd width")
    key_mask = torch.arange(S).expand(B, S) < torch.tensor([[0], [17]])
    known = facts(bias=torch.randn(shape, dtype=torch.float64), causal=True, key_mask=key_mask)
    found = {}
    for name in ("math", "cuda_efficient"):
        with kernels.using(name):
            out, lse = kernels.forward(q, k, v, known)
            found[name] = kernels.backward(grad, q, k, v, out, lse, known, True)
    for left, right in zip(found["cuda_efficient"], found["math"]):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    q, k, v, grad = (x.to("meta", torch.bfloat16) for x in (q, k, v, grad))
    known = facts(bias=torch.empty(shape, device="meta", dtype=torch.bfloat16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_aten", aten)
        to_bias = KERNELS["cuda_efficient"].backward(grad, q, k, v, grad, q[..., 0].float(), known, True)[3]
    assert to_bias is not None and to_bias.shape == shape


@pytest.mark.usefixtures("played_cuda")
def test_operands_that_begin_anywhere() -> None:
    """Views whose rows are not at multiples of 16 bytes are copied first."""
    q, k, v, grad = (F.pad(x, (1, 8))[..., 1:9] for x in tensors())
    for name in CUDA:
        with kernels.using(name):
            found = both_ways(q, k, v, grad, facts(causal=True))
        with kernels.using("math"):
            expected = both_ways(q, k, v, grad, facts(causal=True))
        for left, right in zip(found, expected):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("played_cuda")
def test_preference_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """`choose_kernel` takes what is expected, of what is installed and on."""
    q, k, v, _ = tensors()
    monkeypatch.setattr(kernels, "_in_order", lambda device: [*map(KERNELS.__getitem__, H100.kernels), KERNELS["math"]])
    on_a(monkeypatch, H100)
    assert kernels.choose_kernel(q, k, v, facts(causal=True)).name == "cudnn"
    with torch.nn.attention.sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        assert kernels.choose_kernel(q, k, v, facts(causal=True)).name == "flash_attn"
        monkeypatch.setattr(flash_attn, "installed", lambda: False)
        assert kernels.choose_kernel(q, k, v, facts(causal=True)).name == "cuda_flash"
        assert kernels.choose_kernel(q, k, v, facts(chunk=4)).name == "math"
    with torch.nn.attention.sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        assert kernels.choose_kernel(q, k, v, facts(causal=True)).name == "cuda_efficient"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert kernels.choose_kernel(q, k, v, facts(causal=True)).name == "cuda_flash", "cuDNN sums in no fixed order"
    assert kernels.choose_kernel(q, k, v, facts(chunk=4)).name == "cuda_efficient"


def test_a_package_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package of that name, an old version, a build for another torch."""
    package = types.ModuleType("flash_attn")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    for version, interface, why in (
        (None, True, "AttributeError"), ("2.8.3", False, "halted"),
        ("2.6.3", True, "version 2.6.3, needs 2.7 or later"), ("2.8.3+cu12", True, ""),
    ):  # fmt: skip
        flash_attn.installed.cache_clear()
        flash_attn._interface.cache_clear()
        if version:
            package.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", played_package() if interface else None)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert flash_attn.installed() == (not why)
        assert [why in str(x.message) for x in said] == [True] * bool(why)
    flash_attn.installed.cache_clear()
    flash_attn._interface.cache_clear()


@pytest.mark.parametrize("case", ["plain", "causal", "padding", "bias", "narrower values", "one key head"])
@pytest.mark.parametrize("name", CUDA[1:])
def test_cuda_operators_take_these_arguments(name: str, case: str) -> None:
    """The real operators, on meta tensors: arguments of the right kinds, results of the right shapes, also with fewer
    key heads than query heads."""
    if case in ("padding", "bias") and name != "cuda_efficient":
        return
    made = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in CASES[case]().items()}
    sizes = {n: made.pop(n) for n in SIZES if n in made}
    q, k, v, grad = tensors(dtype=torch.bfloat16, device="meta", **sizes)
    kernel = KERNELS[name]
    out, lse = kernel.forward(q, k, v, facts(**made))
    assert out.shape == grad.shape and out.dtype == q.dtype
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    grads = kernel.backward(grad, q, k, v, out, lse, facts(**made), False)[:3]
    assert [g.shape for g in grads if g is not None] == [q.shape, k.shape, v.shape]


def test_masks_are_aligned() -> None:
    for keys in (16, 22):
        q, k, _, _ = tensors(keys)
        mask, causal = cuda._aligned_mask(q, k, facts(causal=True, key_mask=torch.ones(B, keys, dtype=torch.bool)))
        assert mask is not None and not causal
        assert mask.stride(2) == math.ceil(keys / 16) * 16 and mask.shape == (B, HQ, S, keys)
