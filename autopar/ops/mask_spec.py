"""The mask of `autopar::attention`, as arguments instead of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ops.dropout import keep_mask

FACTS = (
    "Tensor? bias, Tensor? key_mask, Tensor? segments, Tensor? sinks, Tensor? seed, bool causal, SymInt window, "
    "SymInt chunk, SymInt offset, float scale, float softcap, float dropout, int site, Tensor[] index, SymInt[] shape, "
    "int[] documents"
)


@dataclass(frozen=True)
class MaskSpec:
    """The arguments of `autopar::attention` after q, k, v, in the order of its schema.

    bias      additive, float, differentiable, broadcastable to [B, Hq, Sq, Sk]
    key_mask  bool [B, Sk], True = may be attended (padding)
    segments  int [B, Sk]: packed documents; attend within equal numbers only (query i is in that of key i + offset)
    sinks     [Hq]: one logit per head that takes probability but has value zero
    seed, dropout, site, index, shape   of the dropout on the probabilities, as in `autopar::dropout`
    causal    key j <= query i
    window    0, or |i - j| < window
    chunk     0, or i // chunk == j // chunk
    offset    position of the queries among the keys: row r is query i = r + offset (0: top-left aligned)
    softcap   0, or the cap
    documents lengths of the documents of a row that estimates assume, () if unknown; computes nothing

    mask and lift are not arguments of the operator: a further mask for a block of a larger attention, and a number that
    is subtracted from the scores of each row to keep them finite (`autopar.attention.operator`).
    """

    bias: Tensor | None
    key_mask: Tensor | None
    segments: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None
    causal: bool
    window: int
    chunk: int
    offset: int
    scale: float
    softcap: float
    dropout: float
    site: int
    index: Sequence[Tensor]
    shape: Sequence[int]
    documents: Sequence[int] = ()
    mask: Tensor | None = None  # bool [B|1, 1, Sq, Sk], True = attend
    lift: Tensor | None = None  # [B|1, Hq|1, Sq|1, 1]

    def allowed(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Bool mask [B|1, 1, Sq, Sk], True = attend; None if everything is allowed."""
        i = torch.arange(self.offset, self.offset + queries, device=device).unsqueeze(-1)
        j = torch.arange(keys, device=device)
        terms: list[Tensor] = []
        if self.causal:
            terms.append(j <= i)
        if self.window:
            terms.append((i - j < self.window) & (j - i < self.window))
        if self.chunk:
            terms.append(i // self.chunk == j // self.chunk)
        if self.key_mask is not None:
            terms.append(self.key_mask.bool()[:, None, None, :])
        if self.segments is not None:
            mine = self.segments.narrow(-1, self.offset, queries)
            terms.append((mine.unsqueeze(-1) == self.segments.unsqueeze(-2)).unsqueeze(1))
        if self.mask is not None:
            terms.append(self.mask)
        if not terms:
            return None
        out = terms[0]
        for term in terms[1:]:
            out = out & term
        return out if out.dim() == 4 else out[None, None]

    @property
    def by_position_alone(self) -> bool:
        """Whether causal, window and chunk are all of the mask."""
        return all(m is None for m in (self.bias, self.key_mask, self.segments, self.mask))

    @property
    def only_causal(self) -> bool:
        """Whether the triangle is all of the mask, so that a kernel's own causal flag expresses it."""
        return self.by_position_alone and not self.window and not self.chunk

    def additive_mask(self, q: Tensor, keys: int) -> Tensor:
        """Bias and mask as one float mask of q's dtype."""
        allowed = self.allowed(q.shape[2], keys, q.device)
        mask = self.bias.to(q.dtype) if self.bias is not None else q.new_zeros(())
        if allowed is not None:
            mask = torch.where(allowed, mask, float("-inf"))
        return mask

    def keep(self, scores_shape: Sequence[int]) -> Tensor:
        """Dropout mask of the probabilities [B, Hq, Sq, Sk]."""
        if self.seed is None:
            raise ValueError(
                f"attention: dropout of {self.dropout} needs a seed, found none; normalize the graph, which adds the "
                "seed input, or capture with train=False"
            )
        return keep_mask(scores_shape, self.seed, self.dropout, self.site, self.index, self.shape)
