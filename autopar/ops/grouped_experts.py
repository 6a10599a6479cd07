"""Mixture of experts as four operators: sort the tokens by expert, multiply group by group, combine them.

    rows, order, offsets = moe_dispatch(x, expert, E)        # rows sorted by expert, each token K times
    hidden = grouped_bias(grouped_mm(rows, w_up, offsets), b_up, offsets)
    out = moe_combine(grouped_mm(act(hidden), w_down, offsets), order, weights)

Expert e owns rows offsets[e-1] .. offsets[e]. Rows after the last offset (expert number >= E: experts of other ranks)
multiply to zero. An expert without tokens is fine. In the backward, the gradients of the rows and of the weights are
separate operators, so that they can be scheduled separately.

`autopar::ask_experts` is what a layer's experts make of tokens where other ranks hold them, the experts' role:
`autopar.runtime.exec.lowering` starts it where its node stands, and waits for the answer right before its first user
(`autopar.ir.waits`). It has no backward.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autopar.ops.declare import dense, operator
from autopar.ops.kernels.chips import chip_of
from autopar.ops.kernels.triton_module import module_that_runs


@operator("(Tensor x, Tensor expert, int num_experts) -> (Tensor rows, Tensor order, Tensor offsets)")
def moe_dispatch(x: Tensor, expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], expert [T, K] int -> rows [T*K, H] sorted by expert (stable), order [T*K] int64 with
    rows[i] = x[order[i] // K], offsets [E] int32, cumulative."""
    ranked, order = torch.sort(expert.reshape(-1), stable=True)
    return x.index_select(0, order // expert.shape[1]), order, _told(_ends(ranked, num_experts))


def _ends(ranked: Tensor, experts: int) -> Tensor:
    """Experts of rows, sorted -> where the rows of each of the first ``experts`` end."""
    bounds = torch.arange(experts, device=ranked.device, dtype=ranked.dtype)
    return torch.searchsorted(ranked, bounds, right=True).to(torch.int32)


_told_to = threading.local()


@contextlib.contextmanager
def ends_of_rows() -> Iterator[list[Tensor]]:
    """Within, on this thread: collects the offsets of every dispatch that runs."""
    outer, _told_to.found = getattr(_told_to, "found", None), []
    try:
        yield _told_to.found
    finally:
        _told_to.found = outer


def _told(ends: Tensor) -> Tensor:
    found = getattr(_told_to, "found", None)
    if found is not None:
        found.append(ends)
    return ends


@moe_dispatch.register_fake
def _(x: Tensor, expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.new_empty(expert.shape[0] * expert.shape[1], x.shape[1])
    return rows, x.new_empty(rows.shape[0], dtype=torch.int64), x.new_empty(num_experts, dtype=torch.int32)


@operator("(Tensor x, Tensor expert, int experts, SymInt rows) -> (Tensor rows, Tensor order, Tensor offsets)")
def moe_dispatch_own(x: Tensor, expert: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_dispatch` of the pairs whose expert is one of the first ``experts`` [0, experts); others have any number:
    rows [n, H], order [n], offsets [experts]. n is known at run time (the host waits for it); shapes assume ``rows``,
    an even share."""
    order, ends = pairs_by_expert(expert, experts)
    return x.index_select(0, order // expert.shape[1]), order, _told(ends)


def pairs_by_expert(expert: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """expert [T, K] -> order [n] int64, t * K + k of those pairs whose expert is in [0, experts), by expert and in
    their order; and where those of each expert end, [experts] int32. The host waits for n."""
    wanted = expert.reshape(-1)
    (pairs,) = ((wanted >= 0) & (wanted < experts)).nonzero(as_tuple=True)
    ranked, place = torch.sort(wanted.index_select(0, pairs), stable=True)
    return pairs.index_select(0, place), _ends(ranked, experts)


@moe_dispatch_own.register_fake
def _(x: Tensor, expert: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    order = x.new_empty(rows, dtype=torch.int64)
    return x.new_empty(rows, x.shape[1]), order, x.new_empty(experts, dtype=torch.int32)


DISPATCHED = (torch.ops.autopar.moe_dispatch.default, torch.ops.autopar.moe_dispatch_own.default)


def fused_for(x: Tensor) -> Any:
    """`autopar.ops.kernels.fused_expert_rows`, if the tensor has data and its device runs it; else None."""
    return _kernels(x.device) if x.is_cuda and type(x) in (Tensor, Parameter) else None


def _kernels(device: torch.device) -> Any:
    instead = "each row of an expert is read and written several times, with an equal result"
    return module_that_runs("autopar.ops.kernels.fused_expert_rows", device, _try, instead)


def _try(module: Any, device: torch.device) -> None:
    module.summed(torch.zeros(1, 1, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device), None)


def inverse(order: Tensor, size: int) -> Tensor:
    """order [n] int64 -> [size] int64, where each of 0 .. size - 1 is in it; -1 if nowhere."""
    made = order.new_empty(size) if order.shape[0] == size else order.new_full((size,), -1)
    return made.index_copy_(0, order, torch.arange(order.shape[0], device=order.device))


def sum_of_rows(rows: Tensor, order: Tensor, k: int, tokens: int, weights: Tensor | None = None) -> Tensor:
    """rows [n, H], order [n] int64 -> [tokens, H], the sum of each token's rows, those i with order[i] // k the token,
    by order[i], times ``weights`` [tokens, k] of their pairs. Reads each row once; deterministic."""
    if (fused := fused_for(rows)) is not None:
        out: Tensor = fused.summed(rows, inverse(order, tokens * k).view(tokens, k), weights)
        return out
    starts = torch.arange(0, tokens * k, k, device=rows.device)
    scale = None if weights is None else weights.reshape(-1)
    if rows.shape[0] == tokens * k:
        places = inverse(order, tokens * k)
    else:
        pairs, places = order.sort()
        starts = torch.searchsorted(pairs, starts)
        scale = None if scale is None else scale.index_select(0, pairs)
    wide = rows.dtype if scale is None else torch.promote_types(rows.dtype, scale.dtype)
    return sum_by_bag(rows.to(wide), places, starts, None if scale is None else scale.to(wide)).to(rows.dtype)


def sum_by_bag(rows: Tensor, places: Tensor, starts: Tensor, scale: Tensor | None = None) -> Tensor:
    """rows [n, H] -> [bags, H]: bag i sums the rows at places[starts[i]:starts[i + 1]], each times its ``scale``."""
    if not places.shape[0]:
        return rows.new_zeros(starts.shape[0], rows.shape[1])
    return torch.embedding_bag(rows.contiguous(), places, starts, False, 0, False, scale)[0]


@operator(
    "(Tensor grad, Tensor order, SymInt k, SymInt tokens) -> Tensor",
    lambda grad, order, k, tokens: grad.new_empty(tokens, grad.shape[1]),
)
def moe_dispatch_backward(grad: Tensor, order: Tensor, k: int, tokens: int) -> Tensor:
    """grad [n, H] of the rows -> gradient of x [T, H]. A sum of K terms in fixed order: deterministic."""
    return sum_of_rows(grad, order, k, tokens)


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.tokens, ctx.k = inputs[1].shape
    ctx.arguments = len(inputs)
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)


def _dispatch_backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Any, ...]:
    others = [None] * (ctx.arguments - 1)
    if grad is None:
        return None, *others
    return torch.ops.autopar.moe_dispatch_backward(grad, *ctx.saved_tensors, ctx.k, ctx.tokens), *others


moe_dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)
moe_dispatch_own.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)


def _groups(offsets: Tensor, empty: bool = False) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, last row + 1) of every expert that has rows, or of every one."""
    start = 0
    for expert, stop in enumerate(offsets.tolist()):
        if stop > start or empty:
            yield expert, start, stop
        start = stop


def _fused(left: Tensor, right: Tensor) -> bool:
    """Whether torch's grouped kernel supports these: bfloat16 and 16-byte rows on Hopper and Blackwell. Elsewhere torch
    loops over the groups, for which the host waits for the device."""
    if not left.is_cuda or left.dtype != torch.bfloat16 or any(n % 8 for n in (*left.shape[1:], *right.shape[1:])):
        return False
    chip = chip_of(left.device)
    return not chip.rocm and chip.capability[0] in (9, 10)


def _stay(rows: Tensor) -> bool:
    """Whether the host should not read offsets: it would wait for the device."""
    return rows.is_cuda


def expert_of_row(rows: Tensor, offsets: Tensor) -> Tensor:
    """The expert of each row, [N] int64; the number of experts for rows after the last offset."""
    return torch.searchsorted(offsets, torch.arange(rows.shape[0], device=rows.device, dtype=offsets.dtype), right=True)


def _clear_tail(out: Tensor, offsets: Tensor) -> Tensor:
    """The grouped kernel leaves rows after the last offset uninitialized (seen: 6.8e34)."""
    if (fused := fused_for(out)) is not None:
        cleared: Tensor = fused.clear_rows(out, offsets)
        return cleared
    tail = torch.arange(out.shape[0], device=out.device) >= offsets[-1]
    return out.masked_fill_(tail.unsqueeze(-1), 0.0)


def _clear_empty(out: Tensor, offsets: Tensor) -> Tensor:
    """The grouped kernel leaves the matrices of experts without rows uninitialized."""
    if (fused := fused_for(out)) is not None:
        cleared: Tensor = fused.clear_experts(out, offsets)
        return cleared
    empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0
    return out.masked_fill_(empty.view(-1, 1, 1), 0.0)


@operator(
    "(Tensor rows, Tensor weight, Tensor offsets, bool transposed) -> Tensor",
    lambda rows, weight, offsets, transposed: rows.new_empty(rows.shape[0], weight.shape[2 if transposed else 1]),
)
def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """rows [N, I] times each row's expert: weight [E, O, I], or [E, I, O] if ``transposed`` -> [N, O]."""
    matrices = weight if transposed else weight.transpose(1, 2)
    if _fused(rows, weight):
        return _clear_tail(torch.nn.functional.grouped_mm(rows.contiguous(), matrices, offs=offsets), offsets)
    if _stay(rows):
        return Tiles(offsets, rows.shape[0]).product(rows, matrices)
    out, end = rows.new_empty(rows.shape[0], matrices.shape[2]), 0
    for expert, start, end in _groups(offsets):
        torch.mm(rows[start:end], matrices[expert], out=out[start:end])
    out[end:].zero_()
    return out


@operator("(Tensor grad, Tensor rows, Tensor offsets, bool transposed) -> Tensor")
def grouped_mm_weight_grad(grad: Tensor, rows: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """grad [N, O], rows [N, I] -> gradient of the weight, [E, O, I] or [E, I, O] if ``transposed``."""
    left, right = (rows, grad) if transposed else (grad, rows)
    if _fused(left, right):
        return _clear_empty(torch.nn.functional.grouped_mm(left.t(), right, offs=offsets), offsets)
    if _stay(rows):
        return Tiles(offsets, rows.shape[0]).outer(left, right)
    out = grad.new_empty(offsets.shape[0], left.shape[1], right.shape[1])
    for expert, start, stop in _groups(offsets, empty=True):
        torch.mm(left[start:stop].t(), right[start:stop], out=out[expert])  # zeros if there are no rows
    return out


@grouped_mm_weight_grad.register_fake
def _(grad: Tensor, rows: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    left, right = (rows, grad) if transposed else (grad, rows)
    return grad.new_empty(offsets.shape[0], left.shape[1], right.shape[1])


def _mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, offsets, ctx.transposed = inputs
    ctx.save_for_backward(rows, weight, offsets)


def _mm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, weight, offsets = ctx.saved_tensors
    to_rows = to_weight = None
    if ctx.needs_input_grad[0]:
        to_rows = torch.ops.autopar.grouped_mm(grad, weight, offsets, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        to_weight = torch.ops.autopar.grouped_mm_weight_grad(grad, rows, offsets, ctx.transposed)
    return to_rows, to_weight, None, None


grouped_mm.register_autograd(_mm_backward, setup_context=_mm_setup)


@operator(
    "(Tensor rows, Tensor weight, Tensor offsets) -> Tensor",
    lambda rows, weight, offsets: rows.new_empty(rows.shape[0], weight.shape[2]),
)
def grouped_mm_by_offsets(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`torch.nn.functional.grouped_mm` of a model: rows [N, I], in any order, weight [E, I, O] -> [N, O]."""
    out: Tensor = torch.ops.autopar.grouped_mm(rows, weight, offsets.to(torch.int32), True)
    return out


def _offsets_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _offsets_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, weight, offsets = ctx.saved_tensors
    to_rows = to_weight = None
    if ctx.needs_input_grad[0]:
        to_rows = torch.ops.autopar.grouped_mm(grad, weight, offsets, False)
    if ctx.needs_input_grad[1]:
        to_weight = torch.ops.autopar.grouped_mm_weight_grad(grad, rows, offsets, True)
    return to_rows, to_weight, None


def grouped_call(mat_a: Tensor, mat_b: Tensor, *, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """`torch.nn.functional.grouped_mm` of rows and one matrix for each group, in any dtype; torch's own otherwise."""
    usual = mat_a.dim() == 2 and mat_b.dim() == 3 and offs is not None and bias is None
    if not usual or out_dtype not in (None, mat_a.dtype):
        return torch._grouped_mm(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
    out: Tensor = torch.ops.autopar.grouped_mm_by_offsets(mat_a, mat_b, offs)
    return out


GROUPED_CALLS: dict[Any, Any] = {torch.nn.functional.grouped_mm: grouped_call, torch._grouped_mm: grouped_call}
grouped_mm_by_offsets.register_autograd(_offsets_backward, setup_context=_offsets_setup)


@operator("(Tensor rows, Tensor bias, Tensor offsets) -> Tensor", dense)
def grouped_bias(rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """rows [N, O] + the bias [E, O] of each row's expert."""
    if _stay(rows):
        padded = torch.cat([bias, bias.new_zeros(1, bias.shape[1])])
        return rows + padded.index_select(0, expert_of_row(rows, offsets))
    out = rows.clone(memory_format=torch.contiguous_format)
    for expert, start, stop in _groups(offsets):
        out[start:stop] += bias[expert]
    return out


@operator(
    "(Tensor rows, Tensor offsets) -> Tensor", lambda rows, offsets: rows.new_empty(offsets.shape[0], rows.shape[1])
)
def grouped_sum(rows: Tensor, offsets: Tensor) -> Tensor:
    """rows [N, O] -> the sum over each expert's rows [E, O]; the transpose of `grouped_bias`."""
    if _stay(rows):
        sums = rows.new_zeros(offsets.shape[0] + 1, rows.shape[1])
        return sums.index_add_(0, expert_of_row(rows, offsets), rows)[:-1].clone()
    out = rows.new_zeros(offsets.shape[0], rows.shape[1])
    for expert, start, stop in _groups(offsets):
        out[expert] = rows[start:stop].sum(0)
    return out


def _bias_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _bias_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    to_bias = torch.ops.autopar.grouped_sum(grad, *ctx.saved_tensors) if ctx.needs_input_grad[1] else None
    return grad, to_bias, None


grouped_bias.register_autograd(_bias_backward, setup_context=_bias_setup)


@operator(
    "(Tensor rows, Tensor order, Tensor weights) -> Tensor",
    lambda rows, order, weights: rows.new_empty(weights.shape[0], rows.shape[1]),
)
def moe_combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """rows [n, H] sorted by expert, order from a dispatch, weights [T, K] -> [T, H]: each token's weighted sum over
    those of its K experts that have a row."""
    return sum_of_rows(rows, order, weights.shape[1], weights.shape[0], weights)


@operator(
    "(Tensor grad, Tensor rows, Tensor order, Tensor weights) -> (Tensor rows_grad, Tensor weights_grad)",
    lambda grad, rows, order, weights: (
        torch.empty_like(rows, memory_format=torch.contiguous_format),
        weights.new_empty(weights.shape),
    ),
)
def moe_combine_backward(grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """grad [T, H] -> gradients of the rows [n, H] and of the weights [T, K]: zero for pairs without a row."""
    if (fused := fused_for(rows)) is not None:
        out: tuple[Tensor, Tensor] = fused.spread(grad, rows, order, weights)
        return out
    token, scale = order // weights.shape[1], weights.reshape(-1).index_select(0, order).unsqueeze(1)
    rows_grad = torch.empty_like(rows, memory_format=torch.contiguous_format)
    found = weights.new_empty(order.shape)
    for part in _in_cache(rows):
        given = grad.index_select(0, token[part])
        torch.sum(given * rows[part], -1, dtype=weights.dtype, out=found[part])
        torch.mul(given, scale[part], out=rows_grad[part])
    return rows_grad, weights.new_zeros(weights.numel()).index_copy_(0, order, found).view(weights.shape)


def _in_cache(rows: Tensor) -> Iterator[slice]:
    """Parts of rows of which a core's cache holds some; a GPU takes them all at once."""
    few = max((1 << 19) // max(rows.shape[1] * rows.element_size(), 1), 1)
    if rows.device.type not in ("cpu", "meta"):
        few = len(rows)
    end = rows.shape[0] if rows.device.type != "meta" else 2 * few  # the workspace of CPUs: that of each part
    return (slice(start, start + few) for start in range(0, min(end, rows.shape[0]), few))


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    to_rows, to_weights = torch.ops.autopar.moe_combine_backward(grad, *ctx.saved_tensors)
    return to_rows, None, to_weights


moe_combine.register_autograd(_combine_backward, setup_context=_combine_setup)


LEAST = 64  # rows of a tile: smaller tiles do not fill a kernel


class Tiles:
    """Products of experts whose row counts are known on the device only: expert e owns rows offsets[e-1] .. offsets[e]
    of N; rows after the last offset belong to no expert.

    Any split of N rows on E experts fits on N // T + E tiles of T rows (and on N), so shapes are static. With
    T = N / 4E that is a quarter more rows. A tile's matrix is copied next to it, for a few tiles at a time: half of
    the matrices' memory.
    """

    def __init__(self, offsets: Tensor, rows: int) -> None:
        experts = offsets.shape[0]
        self.experts, self.height = experts, min(max(rows // (4 * experts), LEAST), max(rows, 1))
        self.count = min(rows // self.height + experts, rows)
        ends = offsets.long()
        starts = torch.cat([ends.new_zeros(1), ends])  # with one more expert, for rows without one
        tiles = ((ends - starts[:-1] + self.height - 1) // self.height).cumsum(0)  # last one of each expert, + 1
        at = torch.arange(rows, device=offsets.device)
        expert = torch.searchsorted(ends, at, right=True)
        first = torch.cat([tiles.new_zeros(1), tiles[:-1], tiles.new_full((1,), self.count)])
        behind = self.count * self.height  # rows without an expert share one place after all tiles
        place = first.index_select(0, expert) * self.height + at - starts.index_select(0, expert)
        self.place = place.clamp_(max=behind)
        numbers = torch.arange(self.count, device=offsets.device)
        self.expert = torch.searchsorted(tiles, numbers, right=True).clamp_(max=experts - 1)  # a spare tile is zeros

    def product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """rows [N, I], matrices [E, I, O] -> [N, O]; zeros for rows without an expert."""
        tiled = self._tiled(rows)
        out = rows.new_zeros(self.count * self.height + 1, matrices.shape[2])
        made = out[:-1].view(self.count, self.height, out.shape[1])
        for part in self._parts():
            torch.bmm(tiled[part], matrices.index_select(0, self.expert[part]), out=made[part])
        return out.index_select(0, self.place)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """left [N, I], right [N, O] -> [E, I, O]; half types accumulate in float32."""
        one, other = self._tiled(left), self._tiled(right)
        wide = torch.promote_types(left.dtype, torch.float32)
        out = torch.zeros(self.experts, left.shape[1], right.shape[1], dtype=wide, device=left.device)
        for part in self._parts():
            out.index_add_(0, self.expert[part], torch.bmm(one[part].transpose(1, 2), other[part]).to(wide))
        return out.to(left.dtype)

    def _tiled(self, rows: Tensor) -> Tensor:
        """[N, I] -> [tiles, height, I]."""
        padded = rows.new_zeros(self.count * self.height + 1, rows.shape[1]).index_copy_(0, self.place, rows)
        return padded[:-1].view(self.count, self.height, rows.shape[1])

    def _parts(self) -> Iterator[slice]:
        """A few tiles at a time."""
        few = max(self.experts // 2, 1)
        return (slice(start, start + few) for start in range(0, self.count, few))


@operator("(Tensor expert, int experts, int capacity) -> Tensor", dense, choice=True)
def within_capacity(expert: Tensor, experts: int, capacity: int) -> Tensor:
    """expert [T, K] int, of all tokens -> the same, with ``experts``, an invalid number, for choices beyond an expert's
    ``capacity``, counted in the order of tokens and of a token's choices."""
    ranked, order = torch.sort(expert.reshape(-1), stable=True)
    place = torch.arange(ranked.shape[0], device=ranked.device) - torch.searchsorted(ranked, ranked)
    kept = torch.where(place < capacity, ranked, torch.full_like(ranked, experts))
    return torch.empty_like(ranked).index_copy_(0, order, kept).view(expert.shape)


@operator(
    "(Tensor x, Tensor? expert, Tensor? weights, int layer) -> Tensor",
    lambda x, expert, weights, layer: x.new_empty(x.shape),
)
def ask_experts(x: Tensor, expert: Tensor | None, weights: Tensor | None, layer: int) -> Tensor:
    """x [T, H], expert [T, K] int, weights [T, K] -> [T, H]: each token's weighted sum over its experts.

    expert            numbers that are not those of experts choose none (some models have experts that do nothing)
    expert, weights   None: every token goes to every node of the experts' role, whose results are added
    layer             which of the layers that were cut, counted from 0
    """
    raise ValueError(
        f"ask_experts: layer {layer} is computed by the ranks that hold experts, found a call outside of a server; run "
        "it by autopar.serve(model, roles)"
    )
