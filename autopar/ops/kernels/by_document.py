"""Attention of packed documents: the kernels of this folder then need no mask for them.

    facts with segments   -->   [rows and columns of a document, of one example or of all, and facts without segments]
                          -->   offsets of all documents, for kernels that take them in one call

Pairs of different documents are not computed. Rows keep their positions, so dropout's random numbers are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autopar.ops.documents import Run, documents_of
from autopar.ops.kernels.kernel import NEVER, Grads, wide

if TYPE_CHECKING:
    from autopar.ops.mask_spec import MaskSpec


@dataclass(frozen=True)
class Part:
    """The rows and columns of a kernel call, and their facts. examples: which of the batch."""

    examples: slice
    rows: slice
    columns: slice
    facts: MaskSpec

    def of_rows(self, x: Tensor) -> Tensor:
        """The part of q, out or their gradients [B, H, Sq, *], or of lse [B, H, Sq]."""
        return x[self.examples, :, self.rows]

    def of_columns(self, x: Tensor) -> Tensor:
        """The part of k, v or their gradients [B, H, Sk, *]."""
        return x[self.examples, :, self.columns]

    def of_scores(self, x: Tensor) -> Tensor:
        """The part of a bias [B|1, H|1, Sq|1, Sk|1]."""
        return _part(_part(_part(x, 0, self.examples), 2, self.rows), 3, self.columns)


@dataclass(frozen=True)
class Offsets:
    """Where the documents of all examples begin, one example after the other, and the end: int32 [documents + 1].
    longest: tokens of the longest document."""

    starts: Tensor
    longest: int


def offsets(q: Tensor, k: Tensor, facts: MaskSpec) -> Offsets | None:
    """The documents of whole rows; None where they are not known, or no tokens side by side."""
    documents = documents_of(facts.segments)
    (batch, _, tokens, _), whole = q.shape, q.shape[2] == k.shape[2] and not facts.offset
    if documents is None or not whole or any(run.mixed for runs in documents.runs for run in runs):
        return None

    def made() -> Offsets:
        rows = documents.runs * (batch if len(documents.runs) == 1 else 1)
        starts = [row * tokens + run.start for row, runs in enumerate(rows) for run in runs]
        longest = max(len(run) for runs in documents.runs for run in runs)
        return Offsets(torch.tensor([*starts, batch * tokens], dtype=torch.int32, device=q.device), longest)

    return documents.once(("offsets", batch, q.device), made)


def parts(q: Tensor, k: Tensor, facts: MaskSpec) -> list[Part]:
    """The calls that compute the attention; none if it is to be computed as a whole: without documents, or with short
    ones alone. Chunks count from the first key of all, so they need the whole."""
    if facts.segments is None or facts.chunk or facts.lift is not None or facts.mask is not None:
        return []
    documents = documents_of(facts.segments)
    if documents is None or all(len(blocks) == 1 and blocks[0].mixed for blocks in documents.blocks):
        return []
    return [
        part
        for example, blocks in documents.by_example()
        for block in blocks
        for part in _part_of(q, k, facts, example, block)
    ]


def _part_of(q: Tensor, k: Tensor, facts: MaskSpec, example: int | None, block: Run) -> Iterator[Part]:
    """The call for a block of documents, if it has rows here."""
    start, stop = max(block.start, facts.offset), min(block.stop, facts.offset + q.shape[2])
    if start >= stop:
        return
    examples = slice(None) if example is None else slice(example, example + 1)
    rows = slice(start - facts.offset, stop - facts.offset)
    columns = slice(block.start, stop if facts.causal else block.stop)
    changes: dict[str, Any] = {"segments": None, "sinks": None, "offset": start - block.start}
    if facts.window >= len(block):
        changes["window"] = 0
    if block.mixed and facts.segments is not None:
        changes["segments"] = _part(facts.segments, 0, examples)[:, columns]
    if facts.key_mask is not None:
        changes["key_mask"] = _part(facts.key_mask, 0, examples)[:, columns]
    if facts.dropout:
        sizes = (*q.shape[:3], k.shape[2])
        index = list(facts.index) or [torch.arange(size, device=q.device) for size in sizes]
        changes["index"] = [index[0][examples], index[1], index[2][rows], index[3][columns]]
        changes["shape"] = list(facts.shape) or list(sizes)
    part = Part(examples, rows, columns, dataclasses.replace(facts, **changes))
    if facts.bias is not None:
        part = dataclasses.replace(part, facts=dataclasses.replace(part.facts, bias=part.of_scores(facts.bias)))
    yield part


def forward(
    q: Tensor, k: Tensor, v: Tensor, of: list[Part], run: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq, Dv] and lse [B, Hq, Sq] of the parts, each computed by ``run``, which returns its own two."""
    lse = q.new_full(q.shape[:3], NEVER, dtype=wide(q.dtype))
    out: Tensor | None = None
    for part in of:
        mine, part.of_rows(lse)[:] = run(part.of_rows(q), part.of_columns(k), part.of_columns(v), part.facts)
        out = mine.new_zeros(*q.shape[:3], v.shape[-1]) if out is None else out
        part.of_rows(out)[:] = mine
    return q.new_zeros(*q.shape[:3], v.shape[-1]) if out is None else out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    facts: MaskSpec,
    bias: bool,
    of: list[Part],
    run: Callable[..., Grads],
) -> Grads:
    """Gradients of q, k, v and of the bias if ``bias``, added up over the parts, each computed by ``run``."""
    to_q, to_k, to_v = (x.new_zeros(x.shape, dtype=wide(x.dtype)) for x in (q, k, v))
    to_bias = torch.zeros_like(facts.bias, dtype=wide(q.dtype)) if bias and facts.bias is not None else None
    for part in of:
        of_rows = [part.of_rows(x) for x in (grad, q)]
        of_columns = [part.of_columns(x) for x in (k, v)]
        found = run(*of_rows, *of_columns, part.of_rows(out), part.of_rows(lse), part.facts, bias)
        part.of_rows(to_q)[:] = found[0]
        part.of_columns(to_k)[:] = found[1]
        part.of_columns(to_v)[:] = found[2]
        if to_bias is not None and found[3] is not None:
            part.of_scores(to_bias).add_(found[3])
    return to_q, to_k, to_v, to_bias


def _part(x: Tensor, dim: int, which: slice) -> Tensor:
    """Some of a dim; all of one that is broadcast."""
    return x if x.shape[dim] == 1 else x[(slice(None),) * dim + (which,)]
