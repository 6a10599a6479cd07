"""Layouts: how a sequence is dealt to the ranks that share it. Loads no torch."""

from __future__ import annotations

Blocks = tuple[int, ...]  # as in `autopar.ir.placement.Shard`: a negative one is dealt from the last rank to the first
CONTIGUOUS: Blocks = ()
ZIGZAG: Blocks = (1, -1)
LAYOUTS: dict[str, Blocks] = {"contiguous": CONTIGUOUS, "zigzag": ZIGZAG}
