"""What attentions of `torch.nn.attention` do while a model is captured: one `autopar::attention`, and no blocks.

    flex_attention(q, k, v, score_mod=f, block_mask=create_block_mask(g, ...))   -->   autopar.attention(q, k, v, ...)
    varlen_attn(q, k, v, offsets, offsets, ...)                                  -->   autopar.attention(q, k, v, ...)

g is read as arguments (`mask_arguments`), f as softcap and bias, offsets as documents. Models may have imported the
functions under any name, so their code is replaced.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from autopar.capture.flex.expressions import Expression, Unreadable, Variable, expression_of, value
from autopar.capture.flex.mask_arguments import BATCH, HEAD, KEY, QUERY, SCORE, Sizes, mask_arguments

_FLEX, _VARLEN = "torch.nn.attention.flex_attention", "torch.nn.attention.varlen"
_reasons: list[str] = []


def refuse_block_mask(name: str, x: Any) -> None:
    """Raises ValueError for an input of the batch that is a mask of `flex_attention`."""
    kind = getattr(sys.modules.get(_FLEX), "BlockMask", None)
    if kind is not None and isinstance(x, kind):
        raise ValueError(
            f"flex_attention: a mask is read from its function while the forward is captured, found input {name!r}, a "
            "BlockMask; pass the tensors that its function reads, and call create_block_mask in the forward"
        )


@contextmanager
def attentions_as_operators() -> Iterator[None]:
    """Context manager: within, the functions of `torch.nn.attention` that are loaded are replaced."""
    replaced = {
        (_FLEX, "flex_attention"): _flex_attention,
        (_FLEX, "create_block_mask"): _create_block_mask,
        (_VARLEN, "varlen_attn"): _varlen_attn,
    }
    loaded = {getattr(sys.modules[m], name): new for (m, name), new in replaced.items() if m in sys.modules}
    functions: list[Any] = list(loaded)
    codes = [function.__code__ for function in functions]
    for function, stand_in in loaded.items():
        function.__code__ = stand_in.__code__.replace(co_name=function.__name__)
    _reasons.clear()
    try:
        yield
    finally:
        for function, code in zip(functions, codes, strict=True):
            function.__code__ = code


def warn_of_whole_masks() -> None:
    """Warn of the masks that no argument says, once each."""
    for reason in dict.fromkeys(_reasons):
        warnings.warn(f"flex_attention: its mask is computed for all pairs of query and key: {reason}", stacklevel=2)


# Code objects run with the global names of the function that they stand in for.


def _flex_attention(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
    enable_gqa: Any = False, return_lse: Any = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    from autopar.capture.flex.stand_ins import attend

    return attend(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse or return_aux is not None)


def _create_block_mask(
    mask_mod: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any = None, BLOCK_SIZE: Any = 128,
    _compile: Any = False, separate_full_blocks: Any = True, compute_dq_write_order: Any = False,
    dq_kv_order: Any = True,
) -> Any:  # fmt: skip
    from autopar.capture.flex.stand_ins import MaskOnly

    return MaskOnly(mask_mod, (Q_LEN, KV_LEN))


def _varlen_attn(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any, *, return_aux: Any = None,
    scale: Any = None, window_size: Any = (-1, -1), enable_gqa: Any = False, seqused_k: Any = None,
    block_table: Any = None, num_splits: Any = None,
) -> Any:  # fmt: skip
    from autopar.capture.flex.stand_ins import attend_to_documents

    more = {"return_aux": return_aux, "seqused_k": seqused_k, "block_table": block_table}
    return attend_to_documents(query, key, value, cu_seq_q, cu_seq_k, scale, window_size, enable_gqa, more)


@dataclass(frozen=True)
class MaskOnly:
    """A block mask without its blocks."""

    mask_mod: Callable[..., Any]
    seq_lengths: tuple[int, int]

    def to(self, device: Any) -> MaskOnly:
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a block mask is captured by its mask_mod alone, found a use of {name!r} in the model; "
            "pass the block mask to flex_attention only"
        )


# --- the call ------------------------------------------------------------------------------------------------


def attend(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float | None, gqa: bool, more: bool
) -> Tensor:
    """`flex_attention` for q [B, Hq, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv] -> out [B, Hq, Sq, Dv].

    Raises ValueError for functions that cannot be read, and where more than the output is wanted.
    """
    sizes = Sizes(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if more:
        raise ValueError(
            "flex_attention: autopar differentiates its output only, found return_lse or return_aux; call it without"
        )
    if q.dim() != 4 or (not gqa and q.shape[1] != k.shape[1]) or q.shape[0] != k.shape[0]:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"flex_attention: needs q, k, v [B, H, S, D] with equal B, and equal H without enable_gqa, found {shapes}"
        )
    try:
        softcap, bias, factor, seen = _score_arguments(score_mod, sizes, q)
    except Unreadable as unreadable:
        raise _refusal("score_mod", unreadable) from None
    mask_mod = None if block_mask is None else block_mask.mask_mod
    if block_mask is not None and tuple(block_mask.seq_lengths) != (sizes.queries, sizes.keys):
        lengths = list(block_mask.seq_lengths)
        raise ValueError(
            f"flex_attention: the block mask was made for {lengths} queries and keys, found "
            f"{[sizes.queries, sizes.keys]}; make one for this length"
        )
    try:
        mask = True if mask_mod is None else expression_of(mask_mod, BATCH, HEAD, QUERY, KEY)
        found = mask_arguments([mask, *seen], sizes, q.device)
    except Unreadable as unreadable:
        raise _refusal("mask_mod", unreadable) from None
    _reasons.extend(found.reasons)
    if found.whole is not None:
        least = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~found.whole, -math.inf)
        bias = least if bias is None else bias + least
    width = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out: Tensor = torch.ops.autopar.attention(
        q, k, v, bias, found.key_mask, found.segments, None, None, found.causal, found.window, found.chunk, 0,
        float(width * factor), float(softcap), 0.0, 0, [], [], [],
    )[0]  # fmt: skip
    return out


def attend_to_documents(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, of_keys: Tensor | None, scale: float | None,
    window: tuple[int, int], gqa: bool, more: dict[str, Any],
) -> Tensor:  # fmt: skip
    """`varlen_attn` for q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv] and offsets [N + 1] -> out [T, Hq, Dv].

    Raises ValueError where keys have other offsets, for windows that open to one side only, for paged keys and where
    more than the output is wanted.
    """
    left, right = window
    asked = [name for name, x in more.items() if x is not None]
    if asked or (of_keys is not None and of_keys is not offsets) or k.shape[0] != q.shape[0]:
        found = ", ".join(asked) or "other offsets of the keys than of the queries"
        raise ValueError(
            f"varlen_attn: needs one tensor of offsets for queries and keys, and no pages, found {found}; pass the "
            "same tensor as cu_seq_q and cu_seq_k, and use scaled_dot_product_attention for other attentions"
        )
    if right not in (0, left) or (not gqa and q.shape[1] != k.shape[1]):
        raise ValueError(
            "varlen_attn: needs a window_size of (-1, -1), (n, 0) or (n, n), and equal heads without enable_gqa, "
            f"found {tuple(window)} and {q.shape[1]} and {k.shape[1]} heads; write the mask out"
        )
    tokens = torch.arange(q.shape[0], device=q.device)
    segments = (tokens.unsqueeze(-1) >= offsets).sum(-1).unsqueeze(0)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    width = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out: Tensor = torch.ops.autopar.attention(
        q, k, v, None, None, segments, None, None, right == 0, left + 1, 0, 0, float(width), 0.0, 0.0, 0, [],
        [], [],
    )[0]  # fmt: skip
    return out.squeeze(0).transpose(0, 1)


def _refusal(what: str, error: Unreadable) -> ValueError:
    return ValueError(
        f"flex_attention: a {what} needs operators that work entry by entry and lookups in tensors, found that "
        f"{error}; write it with comparisons, arithmetic, &, |, ~, torch.where and tensor[index]"
    )


def _score_arguments(score_mod: Any, sizes: Sizes, q: Tensor) -> tuple[float, Tensor | None, float, list[Expression]]:
    """softcap, bias [B|1, H|1, Sq, Sk], factor and masks with score_mod(score) = cap(score * factor) + bias where all
    masks hold, else -inf."""
    score = Variable(SCORE) if score_mod is None else expression_of(score_mod, SCORE, BATCH, HEAD, QUERY, KEY)
    softcap, factor, bias, seen = 0.0, 1.0, cast("Tensor | None", None), list[Expression]()
    variables = sizes.variables(q.device)
    while not isinstance(score, Variable):
        if isinstance(score, Expression) and not softcap and factor > 0 and (masked := _masked(score)):
            seen.append(masked[0])
            score = masked[1]
            continue
        if isinstance(score, Expression) and (split := _split(score)):
            inner, other = split
            if score.name in ("add", "sub"):
                added = torch.as_tensor(value(other, variables), device=q.device)
                added = (-added if score.name == "sub" else added).to(q.dtype)
                lead = added.shape[:2] if added.dim() == 4 else (1, 1)
                added = added.expand(*lead, sizes.queries, sizes.keys)
                if softcap or factor != 1.0:
                    raise _unsaid(score)
                bias, score = added if bias is None else bias + added, inner
                continue
            if score.name in ("mul", "multiply", "truediv", "div") and isinstance(other, (int, float)):
                factor, score = factor * (other if score.name.startswith("mul") else 1 / other), inner
                continue
        if isinstance(score, Expression) and score.name == "tanh" and not softcap:
            softcap, score = factor, score.args[0]
            factor = 1.0
            continue
        raise _unsaid(score)
    return softcap, bias, factor * softcap if softcap else factor, seen


def _masked(score: Expression) -> tuple[Expression, Any] | None:
    """(where a score counts, the score), for one that is -inf elsewhere."""
    if score.kwargs or len(score.args) != 3 or score.name not in ("where", "masked_fill"):
        return None
    condition, first, second = score.args if score.name == "where" else (score.args[i] for i in (1, 2, 0))
    if not isinstance(condition, Expression) or SCORE in condition.names:
        return None
    if _is_least(second):
        return condition, first
    return (~condition, second) if _is_least(first) else None  # type: ignore[operator]  # set for all operators


def _is_least(x: Any) -> bool:
    one = isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.dim() == 0 and not x.is_meta)
    return one and float(x) == -math.inf


def _split(score: Expression) -> tuple[Any, Any] | None:
    """(the argument with the score, the other one)."""
    if len(score.args) != 2 or score.kwargs:
        return None
    inside = [isinstance(x, Expression) and SCORE in x.names for x in score.args]
    if inside == [True, False]:
        return score.args[0], score.args[1]
    return (score.args[1], score.args[0]) if inside == [False, True] and score.name in ("add", "mul") else None


def _unsaid(score: Any) -> ValueError:
    return ValueError(
        "flex_attention: a score_mod needs the form cap * tanh(score / cap) + bias, or -inf where positions say so, "
        f"with numbers for cap and any bias of positions, found {score}; write the scores and their softmax out"
    )
