"""Rows of tokens as bytes of a message: x, the numbers of the experts chosen, and their weights.

    memory = Memory(rows.row_bytes * 3, device)
    rows.write(memory, 0, rows.parts_of(x, expert, weights), tokens)        # tokens: numbers of 3 of the T tokens
    x, expert, weights = rows.read(memory, 0, 3)                            # [3, H], [3, K], [3, K]: views

Each part is a run of bytes, those of the widest numbers first, so that all are aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 8  # bytes: of the widest numbers


class Memory:
    """Bytes that are read and written as tensors of any dtype."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.empty(-(-size // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8, device=device)
        self._seen: dict[torch.dtype, Tensor] = {}

    def __len__(self) -> int:
        return self.bytes.numel()

    @cached_property
    def numbers(self) -> Any:
        """The same as int64, on the host, without the way through torch: a numpy array."""
        return self.bytes.numpy().view("int64")

    def seen(self, dtype: torch.dtype, begin: int, rows: int, width: int) -> Tensor:
        """[rows, width] from byte ``begin`` on."""
        whole = self._seen.get(dtype)
        if whole is None:
            whole = self._seen[dtype] = self.bytes.view(dtype)
        return whole.as_strided((rows, width), (width, 1), begin // dtype.itemsize)


@dataclass(frozen=True)
class RowFormat:
    """What a row of a token consists of. ``weights_dtype`` None: x alone, and every token goes to every node (the
    experts are slices of a dense MLP)."""

    num_experts: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    weights_dtype: torch.dtype | None

    @cached_property
    def _parts(self) -> list[tuple[torch.dtype, int]]:
        """Dtype and width of x, the experts' numbers and their weights."""
        of_experts = [] if self.weights_dtype is None else [torch.int32, self.weights_dtype]
        return [(self.dtype, self.hidden), *((dtype, self.top_k) for dtype in of_experts)]

    @cached_property
    def _order(self) -> list[int]:
        """The parts in the order of their bytes."""
        return sorted(range(len(self._parts)), key=lambda i: -self._parts[i][0].itemsize)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of the row of a token."""
        return sum(dtype.itemsize * width for dtype, width in self._parts)

    def parts_of(self, x: Tensor, expert: Tensor | None, weights: Tensor | None) -> list[Tensor]:
        """The parts of all tokens, in the dtypes of rows."""
        given = [x] if expert is None or weights is None else [x, expert, weights]
        return [part if part.dtype is dtype else part.to(dtype) for part, (dtype, _) in zip(given, self._parts)]

    def write(self, memory: Memory, begin: int, parts: Sequence[Tensor], tokens: Tensor | None) -> None:
        """Write the rows of some ``tokens`` [n], None: of all, from byte ``begin`` on, a multiple of `ALIGNMENT`."""
        count = (parts[0] if tokens is None else tokens).size(0)
        for part, there in zip(parts, self._views(memory, begin, count)):
            if tokens is None:
                there.copy_(part)
            else:
                torch.index_select(part, 0, tokens, out=there)

    def read(self, memory: Memory, begin: int, tokens: int) -> list[Tensor | None]:
        """x [T, H], expert [T, K] int64, weights [T, K] of rows, the last two None where there are no experts. x and
        weights are views."""
        found: list[Tensor | None] = [*self._views(memory, begin, tokens)]
        if len(found) == 1:
            return [*found, None, None]
        x, expert, weights = found
        assert expert is not None
        return [x, expert.to(torch.int64), weights]

    def join(self, pieces: Sequence[tuple[Memory, int, int]], device: torch.device) -> Memory:
        """The rows of pieces, (memory, first byte, tokens) each, one after the other."""
        total = sum(tokens for _, _, tokens in pieces)
        joined = Memory(self.row_bytes * total, device)
        for k, there in enumerate(self._views(joined, 0, total)):
            torch.cat([self._views(*piece)[k] for piece in pieces], out=there)
        return joined

    def _views(self, memory: Memory, begin: int, tokens: int) -> list[Tensor]:
        """x, experts' numbers and weights, where they are in the memory."""
        views: list[Tensor] = [memory.bytes] * len(self._parts)
        for i in self._order:
            dtype, width = self._parts[i]
            views[i] = memory.seen(dtype, begin, tokens, width)
            begin += tokens * width * dtype.itemsize
        return views
