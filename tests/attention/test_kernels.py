"""The kernels behind `autopar::attention` on this machine: each against plain products, and which of them is taken."""

from __future__ import annotations

import pytest
import torch

from autopar.ops import kernels
from autopar.ops.kernels import KERNELS
from tests.support.kernel_cases import CASES, CUDA, HQ, B, S, compare, facts, tensors


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [name for name in KERNELS if name not in (*CUDA, "triton_flash")])
def test_kernels_of_this_machine(name: str, case: str) -> None:
    applies = compare(name, case)
    refused = {"dropout"} | {x for x in CASES if "softcap" in x or "values" in x or " with " in x}
    assert applies == {"meta": False, "math": True, "cpu_flash": case not in refused}[name]


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
