"""Attention to paged keys on CUDA: one call of torch's `varlen_attn`, which reads page tables."""

from __future__ import annotations

from torch import Tensor

from autopar.adapters import varlen_attention
from autopar.ops.kernels.kernel import HALF
from autopar.ops.kernels.paged_kernel import Paged, PagedKernel

PAGE = 256  # torch's flash kernel needs pages of a multiple of this


def _on_cuda(q: Tensor) -> bool:
    return q.is_cuda  # tests on the CPU say that it is


class Varlen(PagedKernel):
    """Half types, one width up to 256 that is a multiple of 8, pages of a multiple of 256 keys; causal and window, no
    softcap, sinks, bias or chunks. Nothing is read on the host.

    Keys are never split between blocks of a kernel: torch 2.13 does not write the rows of all requests then
    (https://github.com/pytorch/pytorch/issues/194167). So the bits of a request do not depend on its neighbours.
    """

    name = "varlen"

    def applies(self, q: Tensor, given: Paged) -> bool:
        if not _on_cuda(q):
            return False
        width, value = q.shape[-1], given.values.shape[-1]
        plain = not given.softcap and not given.chunk and given.bias is None and given.sinks is None
        fits = q.dtype in HALF and width == value <= 256 and width % 8 == 0 and given.keys.shape[1] % PAGE == 0
        return plain and fits and varlen_attention.works(q.device)

    def forward(self, q: Tensor, given: Paged) -> Tensor:
        tokens, requests = q.shape[2], given.table.shape[0]
        # Every request has a token. At 1 another kernel would run than beside a request with more.
        most = tokens - requests + 1 if given.split_kv else max(tokens - requests + 1, 2)
        lengths = given.lengths.clamp(max=given.table.shape[1] * given.keys.shape[1])  # that of padding can be any
        out = varlen_attention.attend(
            q[0].transpose(0, 1).contiguous(), given.keys, given.values, given.table, given.starts, lengths, most,
            given.window, given.scale,
        )  # fmt: skip
        return out.transpose(0, 1).unsqueeze(0)
