"""Attention as three Triton kernels, for what the chip's own do not support: a softcap without the flash-attn package.

Scores are computed block by block and never stored: FlashAttention-2 (Dao 2023), algorithm 1 forward and 2 backward.
Masks by position, padding and documents follow from positions; blocks without allowed pairs are skipped, and those
between documents: each position knows where its document begins and ends. Key heads are not expanded. There are no
atomic adds, so results are deterministic:

    _forward        a block of rows over all columns        out, lse
    _to_queries     a block of rows over all columns        gradient of q
    _to_keys        a block of columns over all rows        gradients of k and v, summed over the heads of the group

Importing this file needs Triton, which comes with torch's builds for CUDA; with TRITON_INTERPRET=1 it runs on the CPU,
as long as it calls no Triton functions that are kernels themselves (cdiv, zeros, max, sum).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from autopar.ops.mask_spec import MaskSpec

# Width limit -> rows, columns, warps and stages of a program, forward and backward: the largest for which accumulators
# stay in registers (read off ptxas), and operands in the 99 KiB of shared memory that chips have from sm_80 on. With
# float32: half the rows and columns, 8 warps.
BLOCKS = {
    64: ((128, 64, 4, 3), (64, 64, 4, 3)),
    128: ((128, 32, 8, 3), (64, 32, 8, 3)),
    256: ((64, 32, 8, 2), (32, 32, 8, 2)),
}


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):  # type: ignore[no-untyped-def]
    return tl.minimum(a, b)


@triton.jit
def _plus(a, b):  # type: ignore[no-untyped-def]
    return a + b


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    square = x * x
    small = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))  # 1 - 2 / ... would cancel
    return tl.where(square < 0.06, small, 1 - 2 / (1 + tl.exp(2 * x)))


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    q, k, row, column, rows, columns, mask, mask_row, mask_column, documents, offset, scale,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of a block, -inf where nothing is allowed; and d score / d (q k' scale)."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    slope = 1.0
    if CAP > 0:
        tanh = _tanh(scores / CAP)
        scores, slope = tanh * CAP, 1 - tanh * tanh
    i, j = (row + offset)[:, None], column[None, :]
    allowed = (row < rows)[:, None] & (column < columns)[None, :]
    if CAUSAL:
        allowed = allowed & (j <= i)
    if WINDOW:
        allowed = allowed & (i - j < WINDOW) & (j - i < WINDOW)
    if CHUNK:
        allowed = allowed & (i // CHUNK == j // CHUNK)
    if mask is not None:
        at = row.to(tl.int64)[:, None] * mask_row + column.to(tl.int64)[None, :] * mask_column
        allowed = allowed & (tl.load(mask + at, mask=allowed, other=0) != 0)
    if documents is not None:
        at = row + offset
        mine = tl.load(documents + at, mask=(row < rows) & (at >= 0) & (at < columns), other=-1)
        allowed = allowed & (mine[:, None] == tl.load(documents + column, mask=column < columns, other=-1)[None, :])
    return tl.where(allowed, scores, float("-inf")), slope


@triton.jit
def _reach(first, last, low, high, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(begin, end) of the positions in [low, high) that may be paired with positions first to last. CAUSAL 1: rows that
    look back at columns; -1: columns at which rows look back."""
    if CAUSAL == 1:
        low = tl.maximum(low, first)
    if CAUSAL == -1:
        high = tl.minimum(high, last + 1)
    if WINDOW:
        low, high = tl.maximum(low, first - WINDOW + 1), tl.minimum(high, last + WINDOW)
    if CHUNK:
        low, high = tl.maximum(low, first // CHUNK * CHUNK), tl.minimum(high, (last // CHUNK + 1) * CHUNK)
    return low, high


@triton.jit
def _same_document(documents, at, known, columns, low, high):  # type: ignore[no-untyped-def]
    """(begin, end) of the positions in [low, high) that may share a document with positions ``at``, of which ``known``
    count."""
    known = known & (at >= 0) & (at < columns)
    first = tl.load(documents + at, mask=known, other=columns)
    behind = tl.load(documents + columns + at, mask=known, other=0)
    return tl.maximum(low, tl.reduce(first, 0, _smaller)), tl.minimum(high, tl.reduce(behind, 0, _larger))


@triton.jit
def _load(x, stride, row, rows, column, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of a matrix, zero outside of it."""
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(x + at, mask=(row < rows)[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def _store(x, stride, row, rows, column, width: tl.constexpr, value):  # type: ignore[no-untyped-def]
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty), mask=(row < rows)[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["offset"])
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, mask, documents, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_s,
    mask_b, mask_row, mask_column, heads, group, rows, columns, offset, scale,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    blocks = (rows + ROWS - 1) // ROWS
    start, which = tl.program_id(0) % blocks * ROWS, tl.program_id(0) // blocks
    batch, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    q, k, v = q + batch * q_b + head * q_h, k + batch * k_b + head // group * k_h, v + batch * v_b + head // group * v_h
    if mask is not None:
        mask = mask + batch * mask_b
    if documents is not None:
        documents = documents + batch * 2 * columns
    row, d, dv = start + tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, DV)
    queries = _load(q, q_s, row, rows, d, WIDTH)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    result = tl.full([ROWS, DV], 0.0, tl.float32)
    last = tl.minimum(start + ROWS, rows) - 1
    low, high = _reach(start + offset, last + offset, 0, columns, -CAUSAL, WINDOW, CHUNK)
    if documents is not None:
        low, high = _same_document(documents, row + offset, row < rows, columns, low, high)
    for at in range(low, high, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        keys = _load(k, k_s, column, columns, d, WIDTH)
        scores, _ = _scores(queries, keys, row, column, rows, columns, mask, mask_row, mask_column, documents, offset,
                            scale, CAP, CAUSAL, WINDOW, CHUNK, PRECISION)  # fmt: skip
        larger = tl.maximum(most, tl.reduce(scores, 1, _larger))
        safe = tl.where(larger == float("-inf"), 0.0, larger)  # no allowed key so far
        weights, shrink = tl.exp(scores - safe[:, None]), tl.exp(most - safe)
        values = _load(v, v_s, column, columns, dv, VALUE)
        total = total * shrink + tl.reduce(weights, 1, _plus)
        result = result * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        most = larger
    result = result / tl.where(total == 0, 1.0, total)[:, None]
    _store(out + batch * out_b + head * out_h, out_s, row, rows, dv, VALUE, result)
    tl.store(lse + which.to(tl.int64) * rows + row, most + tl.log(total), mask=row < rows)


@triton.jit
def _parts(scores, slope, lse, delta, grad, values, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Probabilities, and the gradient of q k' scale. lse and delta may include further columns."""
    weights = tl.exp(scores - tl.where(lse == float("-inf"), 0.0, lse)[:, None])
    to_weights = tl.dot(grad, tl.trans(values), input_precision=PRECISION)
    return weights, weights * (to_weights - delta[:, None]) * slope


@triton.jit(do_not_specialize=["offset"])
def _to_queries(  # type: ignore[no-untyped-def]
    q, k, v, grad, lse, delta, to_q, mask, documents, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_s,
    to_q_b, to_q_h, to_q_s, mask_b, mask_row, mask_column, heads, group, rows, columns, offset, scale,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    blocks = (rows + ROWS - 1) // ROWS
    start, which = tl.program_id(0) % blocks * ROWS, tl.program_id(0) // blocks
    batch, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    k, v = k + batch * k_b + head // group * k_h, v + batch * v_b + head // group * v_h
    if mask is not None:
        mask = mask + batch * mask_b
    if documents is not None:
        documents = documents + batch * 2 * columns
    row, d, dv = start + tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, DV)
    queries = _load(q + batch * q_b + head * q_h, q_s, row, rows, d, WIDTH)
    grads = _load(grad + batch * g_b + head * g_h, g_s, row, rows, dv, VALUE)
    of_row = which.to(tl.int64) * rows + row
    whole, sums = tl.load(lse + of_row, mask=row < rows, other=0.0), tl.load(delta + of_row, mask=row < rows, other=0.0)
    result = tl.full([ROWS, D], 0.0, tl.float32)
    last = tl.minimum(start + ROWS, rows) - 1
    low, high = _reach(start + offset, last + offset, 0, columns, -CAUSAL, WINDOW, CHUNK)
    if documents is not None:
        low, high = _same_document(documents, row + offset, row < rows, columns, low, high)
    for at in range(low, high, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        keys, values = _load(k, k_s, column, columns, d, WIDTH), _load(v, v_s, column, columns, dv, VALUE)
        scores, slope = _scores(queries, keys, row, column, rows, columns, mask, mask_row, mask_column, documents,
                                offset, scale, CAP, CAUSAL, WINDOW, CHUNK, PRECISION)  # fmt: skip
        _, to_scores = _parts(scores, slope, whole, sums, grads, values, PRECISION)
        result += tl.dot(to_scores.to(keys.dtype), keys, input_precision=PRECISION)
    _store(to_q + batch * to_q_b + head * to_q_h, to_q_s, row, rows, d, WIDTH, result * scale)


@triton.jit(do_not_specialize=["offset"])
def _to_keys(  # type: ignore[no-untyped-def]
    q, k, v, grad, lse, delta, to_k, to_v, mask, documents, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_s,
    to_k_b, to_k_h, to_k_s, to_v_b, to_v_h, to_v_s, mask_b, mask_row, mask_column, heads, group, rows, columns, offset,
    scale,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    blocks, key_heads = (columns + COLUMNS - 1) // COLUMNS, heads // group
    start, which = tl.program_id(0) % blocks * COLUMNS, tl.program_id(0) // blocks
    batch, key_head = (which // key_heads).to(tl.int64), (which % key_heads).to(tl.int64)
    if mask is not None:
        mask = mask + batch * mask_b
    if documents is not None:
        documents = documents + batch * 2 * columns
    column, d, dv = start + tl.arange(0, COLUMNS), tl.arange(0, D), tl.arange(0, DV)
    keys = _load(k + batch * k_b + key_head * k_h, k_s, column, columns, d, WIDTH)
    values = _load(v + batch * v_b + key_head * v_h, v_s, column, columns, dv, VALUE)
    of_keys, of_values = tl.full([COLUMNS, D], 0.0, tl.float32), tl.full([COLUMNS, DV], 0.0, tl.float32)
    last = tl.minimum(start + COLUMNS, columns) - 1
    low, high = _reach(start, last, offset, offset + rows, CAUSAL, WINDOW, CHUNK)
    if documents is not None:
        low, high = _same_document(documents, column, column < columns, columns, low, high)
    for head in range(key_head * group, (key_head + 1) * group):
        for at in range(low - offset, high - offset, ROWS):
            row = at + tl.arange(0, ROWS)
            queries = _load(q + batch * q_b + head * q_h, q_s, row, rows, d, WIDTH)
            grads = _load(grad + batch * g_b + head * g_h, g_s, row, rows, dv, VALUE)
            of_row = (batch * heads + head) * rows + row
            whole = tl.load(lse + of_row, mask=row < rows, other=0.0)
            sums = tl.load(delta + of_row, mask=row < rows, other=0.0)
            scores, slope = _scores(queries, keys, row, column, rows, columns, mask, mask_row, mask_column, documents,
                                    offset, scale, CAP, CAUSAL, WINDOW, CHUNK, PRECISION)  # fmt: skip
            weights, to_scores = _parts(scores, slope, whole, sums, grads, values, PRECISION)
            of_values += tl.dot(tl.trans(weights.to(grads.dtype)), grads, input_precision=PRECISION)
            of_keys += tl.dot(tl.trans(to_scores.to(queries.dtype)), queries, input_precision=PRECISION)
    _store(to_k + batch * to_k_b + key_head * to_k_h, to_k_s, column, columns, d, WIDTH, of_keys * scale)
    _store(to_v + batch * to_v_b + key_head * to_v_h, to_v_s, column, columns, dv, VALUE, of_values)


def attended(q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> tuple[Tensor, Tensor]:
    """q [B, Hq, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv] -> out [B, Hq, Sq, Dv] in q's dtype, lse [B, Hq, Sq]."""
    out, lse = _like(q, v.shape[-1]), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    mask, documents, *known = _known(q, k, v, facts)
    constants, how = _constants(q, v, facts, backward=False)
    with torch.cuda.device_of(q):
        _forward[(_programs(q, constants["ROWS"]),)](
            q, k, v, out, lse, mask, documents, *_strides(q, k, v, out), *known, **constants, **how
        )
    return out, lse


def differentiated(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, facts: MaskSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. ``lse`` and ``delta`` = rowsum(grad * out), [B, Hq, Sq] in float32, may be those of a
    larger attention."""
    to_q, to_k, to_v = _like(q, q.shape[-1]), _like(k, k.shape[-1]), _like(v, v.shape[-1])
    mask, documents, *known = _known(q, k, v, facts)
    constants, how = _constants(q, v, facts, backward=True)
    read = (q, k, v, grad, lse.contiguous(), delta.contiguous())
    with torch.cuda.device_of(q):
        _to_queries[(_programs(q, constants["ROWS"]),)](
            *read, to_q, mask, documents, *_strides(q, k, v, grad, to_q), *known, **constants, **how
        )
        _to_keys[(_programs(k, constants["COLUMNS"]),)](
            *read, to_k, to_v, mask, documents, *_strides(q, k, v, grad, to_k, to_v), *known, **constants,
            **how,
        )  # fmt: skip
    return to_q, to_k, to_v


def _like(x: Tensor, width: int) -> Tensor:
    """[B, H, S, width], stored with the heads inside."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], width).transpose(1, 2)


def _programs(x: Tensor, size: int) -> int:
    return int(x.shape[0] * x.shape[1] * triton.cdiv(x.shape[2], size))


def _strides(*tensors: Tensor) -> list[int]:
    """Strides of batch, heads and rows; rows are contiguous."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def document_ends(segments: Tensor) -> Tensor:
    """segments [B, S] -> int32 [B, 2, S]: of each position the first with its number, and the one behind the last.
    Nothing is read on the host, so a CUDA graph can record it."""
    numbers, order = segments.sort(dim=1, stable=True)
    place, begins = torch.arange(numbers.shape[1], device=numbers.device), torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    first = torch.where(begins, place, 0).cummax(1).values
    last = torch.where(begins.roll(-1, 1), place, len(place)).flip(1).cummin(1).values.flip(1)
    ends = torch.stack((order.gather(1, first), order.gather(1, last) + 1), 1)
    return torch.empty_like(ends).scatter_(2, order[:, None].expand_as(ends), ends).int()


def _known(q: Tensor, k: Tensor, v: Tensor, facts: MaskSpec) -> list[Any]:
    """mask [B, Sq, Sk] or None, documents or None, strides of the mask, heads, sizes, offset, scale."""
    size = (q.shape[0], 1, q.shape[2], k.shape[2])
    masks = [] if facts.key_mask is None else [facts.key_mask.bool()[:, None, None, :].expand(size)]
    masks += [] if facts.mask is None else [facts.mask.expand(size)]
    mask = None if not masks else (masks[0] if len(masks) == 1 else masks[0] & masks[1])[:, 0].view(torch.uint8)
    documents = None if facts.segments is None else document_ends(facts.segments.expand(q.shape[0], k.shape[2]))
    return [
        mask, documents, *((0, 0, 0) if mask is None else mask.stride()), q.shape[1], q.shape[1] // k.shape[1],
        q.shape[2], k.shape[2], facts.offset, facts.scale,
    ]  # fmt: skip


def _constants(q: Tensor, v: Tensor, facts: MaskSpec, backward: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """The constants that the kernel is compiled for, and its launch options."""
    width, single = max(q.shape[-1], v.shape[-1]), q.dtype == torch.float32
    rows, columns, warps, stages = next(sizes for most, sizes in BLOCKS.items() if width <= most)[backward]
    # with widths of 20 and 12 in blocks of 32 and 16, code of Triton 3.7 for sm_90 reads shared memory beyond its end
    whole = q.shape[-1] % 16 == 0 and v.shape[-1] % 16 == 0
    d, dv = (max(16, triton.next_power_of_2(w)) for w in ((q.shape[-1], v.shape[-1]) if whole else (width, width)))
    return {
        "WIDTH": q.shape[-1], "VALUE": v.shape[-1], "CAP": facts.softcap, "CAUSAL": int(facts.causal),
        "WINDOW": facts.window, "CHUNK": facts.chunk, "PRECISION": "ieee" if single else "tf32",
        "ROWS": rows // (1 + single), "COLUMNS": columns // (1 + single),
        "D": d, "DV": dv,
    }, {"num_warps": 8 if single else warps, "num_stages": stages}  # fmt: skip
