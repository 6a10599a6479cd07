"""Packed documents in one call of a kernel that takes their offsets, played on the CPU: operators with offsets compute
document by document, with the operators of `test_cuda_kernels`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.adapters import flash_attn
from autopar.ops import kernels
from autopar.ops.kernels import KERNELS, by_document, cuda
from autopar.ops.mask_spec import MaskSpec
from tests.attention.test_cuda_kernels import Played, played_cuda, played_package  # noqa: F401  (a fixture)
from tests.support.kernel_cases import HQ, B, S, both_ways, facts, tensors

ROWS = [[3] * 5 + [1] * 6 + [4] * 11, [0] * 21 + [9]]  # segments of two examples of 22 tokens
LONGEST = 21


def documents(starts: Tensor, longest: int, tokens: int) -> Iterator[slice]:
    assert starts.dtype == torch.int32 and starts.is_contiguous()
    ends = starts.tolist()
    assert ends[0] == 0 and ends[-1] == tokens and longest == max(b - a for a, b in itertools.pairwise(ends))
    yield from itertools.starmap(slice, itertools.pairwise(ends))


class PlayedVarlen:
    """The operators with offsets."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        dense = getattr(Played(), name)

        def call(*args: Any, **known: Any) -> Any:
            self.calls.append(name)
            backward = name.endswith("_backward")
            count = 6 if backward else 3
            operands, (of_q, of_k, most_q, most_k, *rest) = args[:count], args[count:]
            if of_q is None:
                return dense(*args, **known)
            assert of_q is of_k and most_q == most_k and all(x.dim() == 3 for x in operands[: count - backward])
            found = []
            for part in documents(of_q, most_q, operands[0].shape[0]):
                mine = [x[part].unsqueeze(0) for x in operands[: count - backward]]
                mine += [operands[-1][:, part].unsqueeze(0).contiguous()] if backward else []
                size = part.stop - part.start
                found.append(dense(*mine, None, None, size, size, *rest, **known))
            if backward:
                return tuple(torch.cat([one[i].squeeze(0) for one in found]) for i in range(3))
            return torch.cat([f[0].squeeze(0) for f in found]), torch.cat([f[1].squeeze(0) for f in found], -1), None

        return call


def varlen_of(package: Any, calls: list[str]) -> None:
    """Add the functions with offsets to the played package."""

    def forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **how: Any) -> Any:
        calls.append("forward")
        assert cu_q is cu_k and max_q == max_k
        found = [
            package._flash_attn_forward(*(x[part].unsqueeze(0) for x in (q, k, v)), **how)
            for part in documents(cu_q, max_q, len(q))
        ]
        return torch.cat([f[0].squeeze(0) for f in found]), torch.cat([f[1].squeeze(0) for f in found], -1), None, None

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
        cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **how: Any,
    ) -> None:  # fmt: skip
        calls.append("backward")
        assert cu_q is cu_k and max_q == max_k and lse.shape == (HQ, len(q))
        for part in documents(cu_q, max_q, len(q)):
            ins, into = ([x[part].unsqueeze(0) for x in group] for group in ((dout, q, k, v, out), (dq, dk, dv)))
            package._flash_attn_backward(*ins, lse[:, part].unsqueeze(0).contiguous(), *into, **how)

    vars(package).update(_flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=backward)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, played_cuda: None) -> dict[str, list[str]]:  # noqa: F811
    """Name of a kernel -> its calls."""
    operators, package = PlayedVarlen(), played_package()
    calls: dict[str, list[str]] = {"cuda_flash": operators.calls, "flash_attn": []}
    varlen_of(package, calls["flash_attn"])
    monkeypatch.setattr(cuda, "_aten", operators)
    monkeypatch.setattr(flash_attn, "_interface", lambda: package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", package)
    return calls


CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": 4},
    "two-sided window": {"window": 3},
    "sinks": {"causal": True, "sinks": torch.linspace(-1, 1, HQ).double()},
    "softcap": {"causal": True, "softcap": 2.0},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["flash_attn", "cuda_flash"])
@pytest.mark.parametrize("width", [8, 6])
def test_equal_to_a_mask(played: dict[str, list[str]], name: str, case: str, width: int) -> None:
    """In one call forward and one backward; torch's operator has no softcap, which is refused."""
    q, k, v, grad = tensors(width=width)
    known = facts(segments=torch.tensor(ROWS), **CASES[case])
    with pytest.MonkeyPatch.context() as patch, kernels.using("math"):
        patch.setattr(by_document, "documents_of", lambda segments: None)
        expected = both_ways(q, k, v, grad, known)
    if name == "cuda_flash" and case == "softcap":
        with kernels.using(name), pytest.raises(ValueError, match="but does not support"):
            kernels.forward(q, k, v, known)
        return
    with kernels.using(name):
        found = both_ways(q, k, v, grad, known)
    assert len(played[name]) == 2
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_offsets_are_made_once(played: dict[str, list[str]]) -> None:
    """For the layers of a step; of examples that are alike, too."""
    q, k, *_ = tensors()
    one = facts(segments=torch.tensor(ROWS[0]).expand(B, S), causal=True)
    found = by_document.offsets(q, k, one)
    assert found is not None and by_document.offsets(q, k, one) is found
    assert found.starts.tolist() == [0, 5, 11, 22, 27, 33, 44] and found.longest == 11


OTHERS: dict[str, Callable[[], MaskSpec]] = {
    "padding": lambda: facts(segments=torch.tensor(ROWS), causal=True, key_mask=torch.ones(B, S, dtype=torch.bool)),
    "bias": lambda: facts(segments=torch.tensor(ROWS), bias=torch.zeros(S).double()),
    "numbers that come back": lambda: facts(segments=torch.tensor([[0, 1, 0] + [2] * 19] * 2), causal=True),
    "no documents": lambda: facts(causal=True),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("name", ["flash_attn", "cuda_flash"])
def test_what_is_left_to_separate_calls(played: dict[str, list[str]], name: str, case: str) -> None:
    q, k, v, _ = tensors()
    assert not KERNELS[name].takes_documents(q, k, v, OTHERS[case]())


def test_queries_of_a_token_slice_are_left_to_separate_calls(played: dict[str, list[str]]) -> None:
    q, k, v, _ = tensors(S + 9)
    known = facts(segments=torch.tensor([[0] * 20 + [1] * 11] * 2), causal=True, offset=9)
    assert not KERNELS["cuda_flash"].takes_documents(q, k, v, known)


def test_the_real_operator_takes_these_arguments() -> None:
    """On meta tensors; the documents are read beside them."""
    q, k, v, grad = tensors(dtype=torch.bfloat16, device="meta")
    known = facts(segments=torch.tensor(ROWS), causal=True)
    kernel = KERNELS["cuda_flash"]
    out, lse = kernel.forward(q, k, v, known)
    assert out.shape == grad.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    assert [g.shape for g in kernel.backward(grad, q, k, v, out, lse, known, False)[:3] if g is not None] == [
        q.shape, k.shape, v.shape
    ]  # fmt: skip
