"""The autopar:: operators: fakes like the real thing, gradients, and equality with plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

from autopar.ops.grouped_experts import _clear_tail

ops = torch.ops.autopar
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
B, HQ, HK, S, D = 2, 4, 2, 6, 8

PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6])
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "two-sided window": {"window": 2},
    "chunk": {"causal": True, "chunk": 4},
    "padding": {"causal": True, "key_mask": PADDED},
    "documents": {"causal": True, "segments": DOCUMENTS},
    "bias": {"bias": (1, HQ, S, S), "causal": True},
    "key bias": {"bias": (B, 1, 1, S)},
    "sinks": {"sinks": (HQ,), "causal": True, "window": 3},
    "softcap": {"softcap": 5.0, "causal": True},
    "all": {"bias": (1, 1, S, S), "sinks": (HQ,), "softcap": 3.0, "segments": DOCUMENTS, "key_mask": PADDED},
}
DEFAULTS = {
    "bias": None, "key_mask": None, "segments": None, "sinks": None, "seed": None, "causal": False, "window": 0,
    "chunk": 0, "offset": 0, "scale": 0.35, "softcap": 0.0, "dropout": 0.0, "site": 0, "index": [], "shape": [],
    "documents": [],
}  # fmt: skip


def qkv(dtype: torch.dtype = torch.float64, value_dim: int = D, keys: int = S) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (B, HQ, S, D), (B, HK, keys, D), (B, HK, keys, value_dim)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def facts(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    made = {k: torch.randn(v, dtype=dtype, requires_grad=True) if isinstance(v, tuple) else v for k, v in case.items()}
    return {**DEFAULTS, **made}


def reference(q: Tensor, k: Tensor, v: Tensor, known: dict[str, Any]) -> Tensor:
    """The definition, with everything expanded."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * known["scale"]
    if known["softcap"]:
        scores = torch.tanh(scores / known["softcap"]) * known["softcap"]
    if known["bias"] is not None:
        scores = scores + known["bias"]
    scores = scores.masked_fill(~allowed(q.shape[2], k.shape[2], known), float("-inf"))
    if known["sinks"] is not None:
        scores = torch.cat([scores, known["sinks"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights[..., : k.shape[2]] @ v


def allowed(queries: int, keys: int, known: dict[str, Any]) -> Tensor:
    out = torch.ones(B, 1, queries, keys, dtype=torch.bool)
    for b in range(B):
        for i in range(queries):
            for j in range(keys):
                out[b, 0, i, j] = (
                    (not known["causal"] or j <= i)
                    and (not known["window"] or abs(i - j) < known["window"])
                    and (not known["chunk"] or i // known["chunk"] == j // known["chunk"])
                    and (known["key_mask"] is None or bool(known["key_mask"][b, j]))
                    and (known["segments"] is None or known["segments"][b, i] == known["segments"][b, j])
                )
    return out


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_definition(name: str) -> None:
    tensors, known = qkv(), facts(CASES[name])
    inputs = [*tensors, *(known[n] for n in ("bias", "sinks") if known[n] is not None)]
    out, _ = ops.attention(*tensors, *known.values())
    grad = torch.randn_like(out)
    # the reference's softmax has no gradient in rows where nothing is allowed: they are left out of both sides
    alive = torch.ones(()) if known["sinks"] is not None else allowed(S, S, known).any(-1, keepdim=True)
    expected = reference(*tensors, known)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(out, inputs, grad)
    wanted = torch.autograd.grad(reference_alive(tensors, known, alive), inputs, grad * alive)
    for left, right in zip(found, wanted):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def reference_alive(tensors: Sequence[Tensor], known: dict[str, Any], alive: Tensor) -> Tensor:
    """The definition with dead rows attending to everything; their gradient is not asked for."""
    if alive.dim() == 0:
        return reference(*tensors, known)  # type: ignore[call-arg]
    opened = torch.where(alive, 0.0, float("nan")).isnan()
    q, k, v = tensors
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * known["scale"]
    if known["softcap"]:
        scores = torch.tanh(scores / known["softcap"]) * known["softcap"]
    if known["bias"] is not None:
        scores = scores + known["bias"]
    mask = allowed(q.shape[2], k.shape[2], known) | opened
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v


def gradcheck(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> bool:
    """Along random directions: number by number gradients are compared with those of the definition."""
    return torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_attention_gradcheck_and_fakes(name: str) -> None:
    tensors, known = qkv(), facts(CASES[name])
    assert gradcheck(lambda q, k, v: ops.attention(q, k, v, *known.values())[0], tensors)
    for key in ("bias", "sinks"):
        if known[key] is not None:

            def by_key(x: Tensor, key: str = key) -> Tensor:
                return ops.attention(*tensors, *{**known, key: x}.values())[0]

            assert gradcheck(by_key, [known[key]])
    opcheck(ops.attention.default, (*tensors, *known.values()), test_utils=CHECKS)


def test_attention_dropout() -> None:
    tensors, known = qkv(), facts({"dropout": 0.5, "seed": torch.tensor(3), "site": 2, "causal": True})
    assert gradcheck(lambda q, k, v: ops.attention(q, k, v, *known.values())[0], tensors)
    opcheck(ops.attention.default, (*tensors, *known.values()), test_utils=CHECKS)
    whole, _ = ops.attention(*tensors, *known.values())
    # the second half of the heads on its own, told its global indices
    index = [torch.arange(B), torch.arange(2, 4), torch.arange(S), torch.arange(S)]
    q, k, v = tensors
    part, _ = ops.attention(q[:, 2:], k[:, 1:], v[:, 1:], *{**known, "index": index, "shape": [B, HQ, S, S]}.values())
    torch.testing.assert_close(part, whole[:, 2:])
    with pytest.raises(ValueError, match="needs a seed"):
        ops.attention(*tensors, *{**known, "seed": None}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_other_dtypes(dtype: torch.dtype) -> None:
    known = facts({"causal": True})
    exact, _ = ops.attention(*qkv(), *known.values())
    out, lse = ops.attention(*(x.to(dtype) for x in qkv()), *known.values())
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=0.02, atol=0.02)


def test_attention_other_shapes() -> None:
    """A value dim of its own (no kernel), more keys than queries (kernel), and out ready for joining heads."""
    for tensors in (qkv(value_dim=4), qkv(keys=9)):
        known = facts({"causal": True})
        out, _ = ops.attention(*tensors, *known.values())
        torch.testing.assert_close(out, reference(*tensors, known))  # type: ignore[call-arg]
        assert out.transpose(1, 2).is_contiguous()
        opcheck(ops.attention.default, (*tensors, *known.values()), test_utils=CHECKS)


def test_attention_parts_merge() -> None:
    """Two halves of the keys, merged by their log-sum-exps; the backward of each half from the merged out and lse."""
    q, k, v = qkv()
    known = facts({})
    whole, lse = ops.attention(q, k, v, *known.values())
    halves = [ops.attention(q, k[:, :, s], v[:, :, s], *known.values()) for s in (slice(0, 3), slice(3, 6))]
    merged = torch.logsumexp(torch.stack([part for _, part in halves]), 0)
    out = sum(o * torch.exp(part - merged).unsqueeze(-1) for o, part in halves)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(merged, lse)
    grad = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, [q, k, v], grad)
    found = ops.attention_backward(grad, q, k[:, :, :3], v[:, :, :3], whole, lse, *known.values(), False)
    torch.testing.assert_close(found[1], expected[1][:, :, :3])
    torch.testing.assert_close(found[2], expected[2][:, :, :3])


@pytest.mark.parametrize("name", CASES)
def test_attention_of_some_queries(name: str) -> None:
    """Queries [2, 5) with their offset are rows of the whole; a causal one needs no later keys."""
    tensors, known = qkv(), facts(CASES[name])
    out, _ = ops.attention(*tensors, *known.values())
    grad = torch.randn(B, HQ, 3, D, dtype=torch.float64)
    wanted = torch.autograd.grad(out[:, :, 2:5], tensors, grad, retain_graph=True)
    keys = 5 if known["causal"] else S
    here = {**known, "offset": 2}
    here |= {n: known[n][:, :keys] for n in ("key_mask", "segments") if known[n] is not None}
    if known["bias"] is not None:
        rows = known["bias"] if known["bias"].shape[2] == 1 else known["bias"][:, :, 2:5]
        here["bias"] = rows if rows.shape[3] == 1 else rows[..., :keys]
    q, k, v = tensors
    part, _ = ops.attention(q[:, :, 2:5], k[:, :, :keys], v[:, :, :keys], *here.values())
    torch.testing.assert_close(part, out[:, :, 2:5], rtol=1e-12, atol=1e-12)
    for left, right in zip(torch.autograd.grad(part, tensors, grad), wanted):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_rows_without_keys() -> None:
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[1] = True
    tensors = qkv()
    for softcap in (0.0, 9.0):  # by kernel, by products
        out, lse = ops.attention(*tensors, *facts({"key_mask": mask, "softcap": softcap}).values())
        assert out[0].eq(0).all() and lse[0].eq(float("-inf")).all()
        grads = torch.autograd.grad(out.sum(), tensors)
        assert all(g.isfinite().all() and g[0].eq(0).all() for g in grads)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(smoothing: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 7, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 7, (12,))
    target[::3] = -100
    loss, lse = ops.cross_entropy(x, target, -100, smoothing)
    expected = F.cross_entropy(x, target, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch.logsumexp(x, -1))
    grad = torch.randn(12, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(loss, x, grad), torch.autograd.grad(expected, x, grad))
    assert torch.autograd.gradcheck(lambda x: ops.cross_entropy(x, target, -100, smoothing)[0], [x])
    opcheck(ops.cross_entropy.default, (x, target, -100, smoothing), test_utils=CHECKS)
    assert ops.cross_entropy(x.bfloat16(), target, -100, smoothing)[0].dtype == torch.float32


def mask_of(local: Sequence[int], seed: int, site: int, p: float = 0.5, **kwargs: Any) -> Tensor:
    out: Tensor = ops.dropout(
        torch.ones(tuple(local)), torch.tensor(seed), p, site, kwargs.get("index", []), kwargs.get("shape", [])
    )
    return out != 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_rate(p: float) -> None:
    """The share of kept elements is within 4 standard deviations: of all, per row, per column."""
    keep = mask_of((1000, 1000), 11, 0, p).double()
    for share, count in ((keep.mean(), 1e6), (keep.mean(0), 1e3), (keep.mean(1), 1e3)):
        deviations = (share - (1 - p)).abs() / (p * (1 - p) / count) ** 0.5
        assert deviations.max() < (4 if count == 1e6 else 5)


def test_dropout_masks_are_independent() -> None:
    """Between seeds, sites, neighbouring rows and columns, and on shifted copies: correlation as of coin flips."""
    base = mask_of((512, 512), 1, 0).double() * 2 - 1
    calls = ((2, 0), (1, 1), (1 << 40, 0), (-1, 0))
    others = [mask_of((512, 512), seed, site).double() * 2 - 1 for seed, site in calls]
    shifted = [base.roll(by, dim) for by in (1, 2, 16) for dim in (0, 1)]
    for other in (*others, *shifted, base.t()):
        assert (base * other).mean().abs() < 5 / 512


def test_dropout_is_independent_of_the_cut() -> None:
    whole = mask_of((6, 10, 8), 5, 3)
    index = [torch.tensor([1, 4]), torch.arange(10), torch.tensor([0, 3, 7])]
    part = mask_of((2, 10, 3), 5, 3, index=index, shape=[6, 10, 8])
    assert torch.equal(part, whole[[1, 4]][:, :, [0, 3, 7]])


def test_dropout_scales_and_differentiates() -> None:
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor(9)
    out = ops.dropout(x, seed, 0.25, 0, [], [])
    kept = out != 0
    torch.testing.assert_close(out[kept], x[kept] / 0.75)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], kept.double() / 0.75)
    assert ops.dropout(x, seed, 1.0, 0, [], []).eq(0).all()
    opcheck(ops.dropout.default, (x, seed, 0.25, 0, [], []), test_utils=CHECKS)
    index = [torch.arange(4), torch.arange(5)]
    opcheck(ops.dropout.default, (x, seed, 0.25, 0, index, [8, 5]), test_utils=CHECKS)


@pytest.mark.parametrize("transposed", [False, True])
def test_experts(transposed: bool) -> None:
    """Dispatch, products, biases and combine against a loop over experts; expert 2 gets no token."""
    torch.manual_seed(0)
    tokens, k, experts, width, inner = 7, 2, 4, 3, 5
    choice = torch.tensor([0, 1, 3])[torch.randint(0, 3, (tokens, k))]
    shape = (experts, width, inner) if transposed else (experts, inner, width)
    x, w, bias, weights = (
        torch.randn(s, dtype=torch.float64, requires_grad=True)
        for s in ((tokens, width), shape, (experts, inner), (tokens, k))
    )

    def ours(x: Tensor, w: Tensor, bias: Tensor, weights: Tensor) -> Tensor:
        rows, order, offsets = ops.moe_dispatch(x, choice, experts)
        hidden = ops.grouped_bias(ops.grouped_mm(rows, w, offsets, transposed), bias, offsets)
        out: Tensor = ops.moe_combine(hidden, order, weights)
        return out

    def loop(x: Tensor, w: Tensor, bias: Tensor, weights: Tensor) -> Tensor:
        matrix = w if transposed else w.transpose(1, 2)
        return torch.stack([
            sum(weights[t, i] * (x[t] @ matrix[choice[t, i]] + bias[choice[t, i]]) for i in range(k))  # type: ignore[misc]
            for t in range(tokens)
        ])  # fmt: skip

    inputs = [x, w, bias, weights]
    torch.testing.assert_close(ours(*inputs), loop(*inputs))
    assert torch.autograd.gradcheck(ours, inputs)
    rows, order, offsets = ops.moe_dispatch(x, choice, experts)
    assert offsets[1] == offsets[2] and offsets[-1] == tokens * k
    opcheck(ops.moe_dispatch.default, (x, choice, experts), test_utils=CHECKS)
    opcheck(ops.grouped_mm.default, (rows.detach().requires_grad_(), w, offsets, transposed), test_utils=CHECKS)
    hidden = torch.randn(tokens * k, inner, dtype=torch.float64, requires_grad=True)
    opcheck(ops.grouped_bias.default, (hidden, bias, offsets), test_utils=CHECKS)
    opcheck(ops.moe_combine.default, (hidden, order, weights), test_utils=CHECKS)


def test_rows_of_no_expert_are_zero() -> None:
    """Expert numbers beyond the last are sorted to the end and multiply to zero."""
    x, choice = torch.randn(3, 2), torch.tensor([[0], [9], [1]])
    rows, _, offsets = ops.moe_dispatch(x, choice, 2)
    assert offsets.tolist() == [1, 2]
    assert ops.grouped_mm(rows, torch.randn(2, 4, 2), offsets, False)[2].eq(0).all()
    assert _clear_tail(torch.full((3, 4), 6.8e34), offsets)[2].eq(0).all()
