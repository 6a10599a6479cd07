"""`autopar::cached_attention`: attention of a step's tokens to the keys of their requests, which lie in pages.

Serving computes the tokens of several requests in one graph: whole prompts, chunks of prompts, and single tokens. The
operator writes the tokens' keys and values into the pools of its layer, and attends: token at position p sees the keys
at positions <= p of its own request. It has no backward.

Scores as in `autopar.ops.attention`. The first kernel of `autopar.ops.kernels.paged` that applies computes it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ops.declare import operator
from autopar.ops.kernels import paged

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor slots, Tensor table, Tensor starts, "
    "Tensor lengths, Tensor? bias, Tensor? sinks, SymInt window, SymInt chunk, float scale, float softcap, "
    "bool split_kv) -> Tensor"
)


@operator(_SCHEMA, writes=("keys", "values"))
def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, starts: Tensor,
    lengths: Tensor, bias: Tensor | None, sinks: Tensor | None, window: int, chunk: int, scale: float, softcap: float,
    split_kv: bool,
) -> Tensor:  # fmt: skip
    """q [1, Hq, T, D], k [1, Hk, T, D], v [1, Hk, T, Dv] -> out [1, Hq, T, Dv], stored as [1, T, Hq, Dv].

    keys, values   [pages, page, Hk, D] and [pages, page, Hk, Dv], contiguous: the pools of a layer; written to
    slots          int64 [T]: page * page size + offset, where a token's key is written
    table          int32 [R, P]: the pages of each request in order of position; 0 behind the last, and where a page
                   behind the window was given back
    starts         int32 [R + 1]: the tokens of request r are [starts[r], starts[r + 1]), at least one
    lengths        int32 [R]: number of keys of a request, those of this step included
    bias           [1, Hq|1, T|1, S]: additive, columns are positions of keys
    sinks          [Hq]: one logit per head that takes probability but has value zero
    window, chunk  0, or key j of query i only if i - j < window; i // chunk == j // chunk
    split_kv       False: the bits of a request's rows do not depend on the other requests of the step

    Tokens of a request whose last page is 0 are padding: its length can be any, and its rows mean nothing. Raises
    ValueError for shapes and numbers that do not fit.
    """
    if q.is_meta:
        return _result(q, k, v, keys, values, slots, table, starts, lengths, bias, sinks)
    _checked(
        q.shape, k.shape, v.shape, keys.shape, values.shape, slots.shape, table.shape, starts.shape, lengths.shape,
        None if bias is None else bias.shape, None if sinks is None else sinks.shape,
        (q.dtype, k.dtype, v.dtype, keys.dtype, values.dtype), keys.is_contiguous() and values.is_contiguous(),
    )  # fmt: skip
    keys.view(-1, *keys.shape[2:], 1).index_copy_(0, slots, k.permute(2, 1, 3, 0))
    values.view(-1, *values.shape[2:], 1).index_copy_(0, slots, v.permute(2, 1, 3, 0))
    given = paged.Paged(keys, values, table, starts, lengths, bias, sinks, window, chunk, scale, softcap, split_kv)
    return paged.forward(q, given)


Shape = Sequence[int]


def _check(
    q: Shape, k: Shape, v: Shape, keys: Shape, values: Shape, slots: Shape, table: Shape, starts: Shape, lengths: Shape,
    bias: Shape | None, sinks: Shape | None, dtypes: tuple[torch.dtype, ...], contiguous: bool,
) -> None:  # fmt: skip
    """Raises ValueError for shapes and dtypes that do not fit each other."""

    def need(fits: bool, what: str, found: str) -> None:
        if not fits:
            raise ValueError(f"cached_attention: needs {what}, found {found}")

    need(len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] == 1, "q, k and v [1, heads, tokens, width]",
         f"q {list(q)}, k {list(k)} and v {list(v)}")  # fmt: skip
    need(k[:3] == v[:3] and k[2] == q[2] and k[3] == q[3] and q[1] % k[1] == 0,
         "k [1, Hk, T, D] and v [1, Hk, T, Dv] for q [1, Hq, T, D], with Hq a multiple of Hk",
         f"q {list(q)}, k {list(k)} and v {list(v)}")  # fmt: skip
    pools = len(keys) == len(values) == 4 and keys[:2] == values[:2]
    need(pools and (*keys[2:], *values[2:]) == (k[1], k[3], v[1], v[3]),
         f"pools [pages, page, {k[1]}, {k[3]}] and [pages, page, {v[1]}, {v[3]}]",
         f"keys {list(keys)} and values {list(values)}")  # fmt: skip
    need(contiguous, "contiguous pools", "other strides")
    need(len(set(dtypes)) == 1, "one dtype of q, k, v, keys and values", ", ".join(map(str, dtypes)))
    need(len(slots) == 1 and slots[0] == q[2], f"slots [{q[2]}], one for each token", f"{list(slots)}")
    need(len(table) == 2 and len(lengths) == len(starts) == 1 and lengths[0] == table[0] == starts[0] - 1,
         "table [R, P], starts [R + 1] and lengths [R] for R requests",
         f"table {list(table)}, starts {list(starts)} and lengths {list(lengths)}")  # fmt: skip
    need(bias is None or (len(bias) == 4 and bias[0] == 1 and bias[1] in (1, q[1]) and bias[2] in (1, q[2])),
         f"a bias [1, {q[1]}, {q[2]}, S], or 1 for heads or tokens", f"{list(bias or ())}")  # fmt: skip
    need(sinks is None or tuple(sinks) == (q[1],), f"sinks [{q[1]}]", f"{list(sinks or ())}")


_checked = functools.lru_cache(maxsize=256)(_check)  # each layer asks again


@cached_attention.register_fake
def _result(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, starts: Tensor,
    lengths: Tensor, bias: Tensor | None, sinks: Tensor | None, *_: Any,
) -> Tensor:  # fmt: skip
    """Without data: the shapes are checked, and that of the result."""
    tensors = (q, k, v, keys, values, slots, table, starts, lengths)
    optional = (None if x is None else x.shape for x in (bias, sinks))
    dtypes = (q.dtype, k.dtype, v.dtype, keys.dtype, values.dtype)
    _check(*(x.shape for x in tensors), *optional, dtypes, keys.is_contiguous() and values.is_contiguous())  # type: ignore[call-arg,arg-type]
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
