"""The kernels behind `autopar::attention`: each against plain products, and which of them is taken.

Operators for CUDA are played by functions with their schema (arguments are bound by the schema of the real one) that
have their habits: where triangles begin, how long lse is, what stands in rows without keys.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.adapters import flash_attn
from autopar.ops import kernels
from autopar.ops.facts import Facts
from autopar.ops.kernels import KERNELS, cuda

B, HQ, HK, S, D = 2, 4, 2, 22, 8
CUDA = ("flash_attn", "cudnn", "cuda_flash", "cuda_efficient")
INF = float("inf")
aten = torch.ops.aten


def facts(**changes: Any) -> Facts:
    known: dict[str, Any] = {
        "bias": None, "key_mask": None, "segments": None, "sinks": None, "seed": None, "causal": False, "window": 0,
        "chunk": 0, "offset": 0, "scale": 0.35, "softcap": 0.0, "dropout": 0.0, "site": 0, "index": [], "shape": [],
    }  # fmt: skip
    return Facts(**{**known, **changes})


def tensors(keys: int = S, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    """q, k, v, grad."""
    torch.manual_seed(0)
    shapes = (B, HQ, S, D), (B, HK, keys, D), (B, HK, keys, D), (B, HQ, S, D)
    return [torch.randn(shape, dtype=dtype).to(device) for shape in shapes]


def some_mask() -> Tensor:
    mask = torch.rand(B, 1, S, S) < 0.5
    mask[0, :, 3] = False
    return mask


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"causal": True},
    "window": lambda: {"causal": True, "window": 5},
    "two-sided window": lambda: {"window": 3},
    "chunk": lambda: {"chunk": 4},
    "softcap": lambda: {"softcap": 2.0, "causal": True},
    "bias": lambda: {"bias": torch.randn(1, HQ, S, S, dtype=torch.float64)},
    "key bias": lambda: {"bias": torch.randn(S, dtype=torch.float64), "causal": True},
    "padding": lambda: {"key_mask": torch.rand(B, S) < 0.5},
    "documents": lambda: {"segments": torch.arange(S).expand(B, S) // 5, "causal": True},
    "mask": lambda: {"mask": some_mask()},
    "sinks": lambda: {"sinks": torch.randn(HQ, dtype=torch.float64), "causal": True},
    "dropout": lambda: {"dropout": 0.3, "seed": torch.tensor(5)},
    "more keys": lambda: {"causal": True, "keys": S + 9},
    "later queries": lambda: {"offset": 9, "causal": True, "keys": S + 9},
}


def both_ways(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, known: Facts) -> list[Tensor]:
    out, lse = kernels.forward(q, k, v, known)
    results = [out, lse, *kernels.backward(grad, q, k, v, out, lse, known, False)[:3]]
    return [x for x in results if x is not None]


def compare(name: str, case: str) -> bool:
    """Whether a kernel computes a case; if so, it must equal the plain products."""
    torch.manual_seed(1)
    made = CASES[case]()
    q, k, v, grad = tensors(made.pop("keys", S))
    known = facts(**made)
    with kernels.using("math"):
        expected = both_ways(q, k, v, grad, known)
    if not KERNELS[name].applies(q, k, v, known):
        with kernels.using(name), pytest.raises(ValueError, match=f"kernel '{name}' was asked for, but does not"):
            kernels.forward(q, k, v, known)
        return False
    with kernels.using(name):
        found = both_ways(q, k, v, grad, known)
    for left, right in zip(found, expected):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    return True


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [name for name in KERNELS if name not in CUDA])
def test_kernels_of_this_machine(name: str, case: str) -> None:
    applies = compare(name, case)
    assert applies == {"meta": False, "math": True, "cpu_flash": case not in ("softcap", "dropout")}[name]


def test_unknown_and_forced_names() -> None:
    with pytest.raises(ValueError, match=r"attention kernel: unknown name 'cudn'.*did you mean 'cudnn'"), \
            kernels.using("cudn"):  # fmt: skip
        pass
    q, k, v, grad = tensors()
    known = facts(bias=torch.zeros(1, 1, S, S))
    assert kernels.choose_kernel(q, k, v, known).name == "cpu_flash"
    assert kernels.choose_kernel(q, k, v, known, bias_gradient=True).name == "math"
    with kernels.using("math"):
        assert kernels.choose_kernel(q, k, v, known).name == "math"
        with kernels.using("cpu_flash"):
            assert kernels.choose_kernel(q, k, v, known).name == "cpu_flash"
            with pytest.raises(ValueError, match="and a gradient of the bias; leave the choice open or use 'math'"):
                kernels.backward(grad, q, k, v, q, q[..., 0], known, True)
        assert kernels.choose_kernel(q, k, v, known).name == "math"
    assert kernels.choose_kernel(q, k, v, known).name == "cpu_flash"


def test_the_operator_takes_its_kernel_from_the_table() -> None:
    q, k, v, grad = tensors()
    arguments = list(vars(facts()).values())[:-2]
    out, lse = torch.ops.autopar.attention(q, k, v, *arguments)
    with kernels.using("cudnn"):
        with pytest.raises(ValueError, match="'cudnn' was asked for"):
            torch.ops.autopar.attention(q, k, v, *arguments)
        with pytest.raises(ValueError, match="'cudnn' was asked for"):
            torch.ops.autopar.attention_backward(grad, q, k, v, out, lse, *arguments, False)


def test_gradient_of_a_bias() -> None:
    q, k, v, grad = tensors()
    for shape in ((1, HQ, S, S), (B, 1, 1, S), (S, S)):
        bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.35 + bias
        (expected,) = torch.autograd.grad(torch.softmax(scores, -1) @ v.repeat_interleave(2, 1), bias, grad)
        known = facts(bias=bias.detach())
        out, lse = kernels.forward(q, k, v, known)
        found = kernels.backward(grad, q, k, v, out, lse, known, True)[3]
        assert found is not None and found.shape == bias.shape
        torch.testing.assert_close(found, expected)


def test_meta_tensors() -> None:
    q, k, v, grad = tensors(dtype=torch.bfloat16, device="meta")
    known = facts(causal=True, bias=torch.zeros(1, HQ, S, S, device="meta"))
    assert kernels.choose_kernel(q, k, v, known, bias_gradient=True).name == "meta"
    out, lse = kernels.forward(q, k, v, known)
    assert out.shape == q.shape and (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    grads = kernels.backward(grad, q, k, v, out, lse, known, True)
    assert [g.shape for g in grads if g is not None] == [q.shape, k.shape, v.shape, (1, HQ, S, S)]


# --- CUDA ---------------------------------------------------------------------------------------------


def scores_of(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, last: bool, scale: float) -> Tensor:
    """With the triangle at the first key, or with its end at the ``last``."""
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        assert mask.shape == scores.shape and mask.stride(-2) % 16 == 0 and mask.stride(-1) == 1
        scores = scores + mask
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2] if last else 0)
    return scores.masked_fill(~allowed, -INF) if causal else scores


def forward_of(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Rows without keys are not a number, and have an infinite lse."""
    lse = torch.logsumexp(scores, -1)
    return torch.softmax(scores, -1) @ v, lse.masked_fill(lse == -INF, INF)


def backward_of(scores: Tensor, lse: Tensor, a: dict[str, Any], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights = torch.exp(scores - lse.unsqueeze(-1))
    delta = (grad * a["out"]).sum(-1, keepdim=True)
    to_scores = weights * (grad @ a["value"].transpose(-1, -2) - delta) * a["scale"]
    return to_scores @ a["key"], to_scores.transpose(-1, -2) @ a["query"], weights.transpose(-1, -2) @ grad


class Played:
    """`torch.ops.aten` with the CUDA operators on the CPU."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        schema = getattr(aten, name).default._schema
        last = "flash" in name

        def call(*args: Any, **kwargs: Any) -> Any:
            assert len(args) <= sum(not x.kwarg_only for x in schema.arguments)
            a = {x.name: x.default_value for x in schema.arguments if x.has_default_value()}
            a |= dict(zip((x.name for x in schema.arguments), args)) | kwargs
            assert set(a) == {x.name for x in schema.arguments} and not a["dropout_p"]
            assert a["query"].shape[1] == a["key"].shape[1] == a["value"].shape[1]
            scores = scores_of(a["query"], a["key"], a.get("attn_bias"), a["is_causal"], last, a["scale"])
            if name.endswith("_backward"):
                lse = a["logsumexp"]
                assert lse.is_contiguous() and not lse.isneginf().any()
                if "cudnn" in name:
                    assert lse.shape[3:] == (1,)
                    lse = lse.squeeze(-1)
                if "efficient" in name:
                    assert lse.shape[2] % 32 == 0 and a["grad_input_mask"] == [True, True, True, False]
                    assert lse[..., a["query"].shape[2] :].isposinf().all()
                    lse = lse[..., : a["query"].shape[2]]
                else:
                    assert (a["max_q"], a["max_k"]) == (a["query"].shape[2], a["key"].shape[2])
                grads = backward_of(scores, lse, a, a.get("grad_out", a.get("grad_out_")))
                return (*grads, None) if "efficient" in name else grads
            out, lse = forward_of(scores, a["value"])
            if "cudnn" in name:
                return out, lse.unsqueeze(-1), None
            if "efficient" in name:
                assert a["compute_log_sumexp"]
                lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=INF)
            return out, lse, None

        return call


def played_package() -> types.ModuleType:
    """flash_attn.flash_attn_interface: [B, S, H, D], fewer key heads, windows around a diagonal that ends last."""
    module = types.ModuleType("flash_attn.flash_attn_interface")

    def scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int, cap: float) -> Tensor:
        raw = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scale
        raw = torch.tanh(raw / cap) * cap if cap else raw
        i = torch.arange(q.shape[2]).unsqueeze(-1) + k.shape[2] - q.shape[2]
        j = torch.arange(k.shape[2])
        right = 0 if causal else right
        out = ((j < i - left) & (left >= 0)) | ((j > i + right) & (right >= 0))
        return raw.masked_fill(out, -INF)

    def forward(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
        window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        assert not dropout_p and alibi_slopes is None and not return_softmax
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


@pytest.fixture
def played_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU, in float64, pass for CUDA tensors in half."""
    monkeypatch.setattr(cuda, "_aten", Played())
    monkeypatch.setattr(cuda, "_on_cuda", lambda q: True)
    monkeypatch.setattr(cuda, "HALF", (torch.float64,))
    monkeypatch.setattr(cuda, "_modern", lambda q: True)
    monkeypatch.setattr(flash_attn, "installed", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", played_package())


COMPUTES = {
    "flash_attn": {"plain", "causal", "window", "two-sided window", "softcap", "sinks", "later queries"},
    "cudnn": {"plain", "causal", "sinks"},
    "cuda_flash": {"plain", "causal", "sinks", "later queries"},
    "cuda_efficient": set(CASES) - {"softcap", "dropout"},
}


@pytest.mark.usefixtures("played_cuda")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CUDA)
def test_cuda_kernels_as_played(name: str, case: str) -> None:
    assert compare(name, case) == (case in COMPUTES[name])


@pytest.mark.usefixtures("played_cuda")
def test_preference_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = tensors()
    taken = {
        case: kernels.choose_kernel(q, k, v, facts(**CASES[case]())).name
        for case in set(CASES) - {"later queries", "more keys"}
    }
    assert taken["causal"] == taken["window"] == taken["softcap"] == "flash_attn"
    assert taken["chunk"] == taken["bias"] == taken["documents"] == "cuda_efficient" and taken["dropout"] == "math"
    monkeypatch.setattr(flash_attn, "installed", lambda: False)
    assert kernels.choose_kernel(q, k, v, facts(causal=True)).name == "cudnn"
    assert kernels.choose_kernel(q, k, v, facts(causal=True, window=3)).name == "cuda_efficient"
    monkeypatch.setattr(cuda, "_modern", lambda q: False)
    assert kernels.choose_kernel(q, k, v, facts(causal=True)).name == "cuda_flash"
    assert kernels.choose_kernel(q[..., :6], k[..., :6], v[..., :6], facts()).name == "cpu_flash", "no multiple of 8"
    assert kernels.choose_kernel(q.float(), k.float(), v.float(), facts()).name == "cuda_efficient"


@pytest.mark.parametrize("case", ["plain", "causal", "padding", "bias"])
@pytest.mark.parametrize("name", CUDA[1:])
def test_cuda_operators_take_these_arguments(name: str, case: str) -> None:
    """The real operators, on meta tensors: arguments of the right kinds, results of the right shapes."""
    if case in ("padding", "bias") and name != "cuda_efficient":
        return
    q, k, v, grad = tensors(dtype=torch.bfloat16, device="meta")
    made = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in CASES[case]().items()}
    kernel = KERNELS[name]
    out, lse = kernel.forward(q, k, v, facts(**made))
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
    grads = kernel.backward(grad, q, k, v, out, lse, facts(**made), False)[:3]
    assert [g.shape for g in grads if g is not None] == [q.shape, k.shape, v.shape]


def test_masks_are_aligned() -> None:
    for keys in (16, 22):
        q, k, _, _ = tensors(keys)
        mask, causal = cuda._aligned_mask(q, k, facts(causal=True, key_mask=torch.ones(B, keys, dtype=torch.bool)))
        assert mask is not None and not causal
        assert mask.stride(2) == math.ceil(keys / 16) * 16 and mask.shape == (B, HQ, S, keys)
