"""Attentions with every kind of mask, and how to compute them block by block: for tests of blocks and of algorithms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.attention.attend import Attend, Gradients, KernelCall, Partials, positions
from autopar.attention.layouts import LAYOUTS
from autopar.attention.problem import Mask, Problem, Spans
from autopar.ops import kernels
from autopar.ops.mask_spec import MaskSpec

B, WIDTH, VALUES = 2, 8, 8
CPU = torch.device("cpu")

NO_FACTS = MaskSpec(
    bias=None, key_mask=None, segments=None, sinks=None, seed=None, causal=False, window=0, chunk=0, offset=0,
    scale=0.35, softcap=0.0, dropout=0.0, site=3, index=[], shape=[],
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 7},
    "two-sided window": {"window": 5},
    "chunk": {"causal": True, "chunk": 9},
    "chunk and window": {"chunk": 16, "window": 3},
    "bias of rows": {"causal": True, "bias": "rows"},
    "bias of columns": {"bias": "columns"},
    "documents": {"causal": True, "segments": True},
    "padding": {"causal": True, "key_mask": True},
    "softcap": {"causal": True, "softcap": 2.0},
    "dropout": {"causal": True, "dropout": 0.3},
    "all": {
        "causal": True, "window": 20, "chunk": 30, "bias": "rows", "segments": True, "key_mask": True, "softcap": 3.0,
        "dropout": 0.2,
    },
}  # fmt: skip


@dataclasses.dataclass
class Whole:
    """One attention with everything it needs, unsharded."""

    problem: Problem
    facts: MaskSpec
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor


def whole(
    case: dict[str, Any], heads: tuple[int, int], ranks: int, layout: str, size: int, dtype: torch.dtype = torch.float64
) -> Whole:
    torch.manual_seed(0)
    made = {name: value for name, value in case.items() if name not in ("bias", "segments", "key_mask")}
    if "bias" in case:
        shape = (1, heads[0], size, size) if case["bias"] == "rows" else (B, 1, 1, size)
        made["bias"] = torch.randn(shape, dtype=dtype)
    if "segments" in case:
        made["segments"] = torch.randint(0, 2, (B, size)).cumsum(1) // 3
    if "key_mask" in case:
        made["key_mask"] = torch.rand(B, size) < 0.7
    if "dropout" in case:
        made["seed"] = torch.tensor(1234567)
    facts = dataclasses.replace(NO_FACTS, **made)
    problem = Problem(
        B, *heads, size, size, WIDTH, VALUES, dtype, ranks, Mask(facts.causal, facts.window, facts.chunk),
        LAYOUTS[layout], LAYOUTS[layout], case.get("bias", ""), "bias" in case, "segments" in case, "key_mask" in case,
        False, facts.softcap, facts.dropout,
    )  # fmt: skip
    q, grad = (torch.randn(B, heads[0], size, WIDTH, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(B, heads[1], size, WIDTH, dtype=dtype) for _ in range(2))
    return Whole(problem, facts, q, k, v, grad)


def taken(x: Tensor, spans: Spans, dim: int = 2) -> Tensor:
    return x.index_select(dim, positions(spans, CPU))


def of_rank(it: Whole, rank: int, observe: Callable[[KernelCall], None] | None = None) -> Attend:
    bias = it.facts.bias
    if bias is not None and bias.shape[2] > 1:
        bias = taken(bias, it.problem.rows(rank))
    return Attend(it.problem, dataclasses.replace(it.facts, bias=bias), rank, observe)


def steps(it: Whole) -> Iterator[tuple[Attend, Spans, Spans]]:
    """Every rank's rows with every rank's columns, its own first."""
    ranks = it.problem.size
    for rank in range(ranks):
        attend = of_rank(it, rank)
        for step in range(ranks):
            yield attend, it.problem.rows(rank), it.problem.columns((rank - step) % ranks)


def forward(it: Whole) -> tuple[Tensor, Tensor]:
    """out and lse of all rows, block by block."""
    out, lse = torch.zeros_like(it.q, dtype=kernels.wide(it.q.dtype)), torch.zeros(it.q.shape[:3], dtype=torch.float64)
    found: dict[Spans, Partials] = {}
    for attend, rows, columns in steps(it):
        q = taken(it.q, rows)
        into = found.setdefault(rows, Partials.empty(q, VALUES))
        attend.forward(q, taken(it.k, columns), taken(it.v, columns), rows, columns, into)
    for rows, into in found.items():
        out.index_copy_(2, positions(rows, CPU), into.out)
        lse.index_copy_(2, positions(rows, CPU), into.lse.double())
    return out, lse


def backward(it: Whole, out: Tensor, lse: Tensor) -> Gradients:
    """Gradients of everything, block by block."""
    bias = torch.zeros_like(it.facts.bias) if it.facts.bias is not None else None
    total = Gradients(*(torch.zeros_like(x, dtype=out.dtype) for x in (it.q, it.k, it.v)), bias)
    for attend, rows, columns in steps(it):
        grad, q, my_out, my_lse = (taken(x, rows) for x in (it.grad, it.q, out, lse))
        k, v = taken(it.k, columns), taken(it.v, columns)
        own = attend.facts.bias
        zeros = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v))
        part = Gradients(*zeros, torch.zeros_like(own) if own is not None else None)
        attend.backward(grad, q, k, v, my_out, my_lse, rows, columns, part)
        total.q.index_add_(2, positions(rows, CPU), part.q)
        total.k.index_add_(2, positions(columns, CPU), part.k)
        total.v.index_add_(2, positions(columns, CPU), part.v)
        if bias is not None and part.bias is not None:
            bias += part.bias if bias.shape[2] == 1 else torch.zeros_like(bias).index_copy_(
                2, positions(rows, CPU), part.bias
            )  # fmt: skip
    return total


def arguments(facts: MaskSpec) -> list[Any]:
    """Those of the operator."""
    return [getattr(facts, f.name) for f in dataclasses.fields(facts) if f.name not in ("mask", "lift")]


def reference(it: Whole) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    out, lse = torch.ops.autopar.attention(it.q, it.k, it.v, *arguments(it.facts))
    has_bias = it.facts.bias is not None
    grads = torch.ops.autopar.attention_backward(it.grad, it.q, it.k, it.v, out, lse, *arguments(it.facts), has_bias)
    return out, lse, grads[: 4 if has_bias else 3]


def close(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, check_dtype=False)
