"""Calls and bytes that one rank sends, by axis and kind: what a plan predicts and what a run counts.

Bytes are those of the ring algorithms, which are optimal in volume (Patarasuk and Yuan, 2009), for a value of b bytes
(unsharded) on an axis of n ranks:

    all_reduce       2 (n-1)/n b
    all_gather         (n-1)/n b       b is what every rank has afterwards
    reduce_scatter     (n-1)/n b       b is what every rank had before
    all_to_all         (n-1)/n b/n     a rank keeps one n-th of its shard of b/n
    all_to_all_rows    (n-1)/n b/n     rows for experts, with even routing; features of images
    broadcast                  b       on the source
    send                       b
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_rows")


@dataclass(frozen=True)
class Traffic:
    """Number of calls, and bytes that one rank sends in all of them."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes)

    def times(self, count: int, share: float = 1.0) -> Traffic:
        """That of ``count`` runs, each on a share of the data."""
        return Traffic(self.calls * count, round(self.bytes * count * share))


Ledger = Mapping[tuple[str, str], Traffic]  # (axis, kind) -> traffic


def add_ledgers(*ledgers: Ledger) -> dict[tuple[str, str], Traffic]:
    """Sum of several ledgers."""
    total: dict[tuple[str, str], Traffic] = {}
    for ledger in ledgers:
        for key, traffic in ledger.items():
            total[key] = total.get(key, Traffic()) + traffic
    return total


def ledger_between(before: Ledger, after: Ledger) -> dict[tuple[str, str], Traffic]:
    """What was sent in between."""
    pairs = {key: (before.get(key, Traffic()), after.get(key, Traffic())) for key in {**before, **after}}
    return {key: Traffic(b.calls - a.calls, b.bytes - a.bytes) for key, (a, b) in pairs.items() if a != b}


def rows_sent(ledger: Ledger) -> dict[str, int]:
    """Axis, or level of it -> bytes of rows for experts."""
    return {axis: traffic.bytes for (axis, kind), traffic in ledger.items() if kind == "all_to_all_rows"}


def collective_bytes(kind: str, nbytes_whole: int, n: int) -> int:
    """Bytes that one of ``n`` ranks sends, rounded up; 0 for what stays local (none, slice, pad, divide)."""
    if kind not in KINDS or n == 1:
        return 0
    divisor = n * n if kind.startswith("all_to_all") else n
    return -((1 - n) * nbytes_whole * (2 if kind == "all_reduce" else 1) // divisor)


def traffic_of(kind: str, shape: Sequence[int], dtype: torch.dtype, ranks: int) -> int:
    """Bytes that one rank sends in a collective whose input on this rank has this shape."""
    local = torch.Size(shape).numel() * dtype.itemsize
    return collective_bytes(kind, local if kind in ("all_reduce", "reduce_scatter") else local * ranks, ranks)
