"""Numbers for people: bytes, counts, seconds."""

from __future__ import annotations


def human_count(count: float) -> str:
    """'812', '1.2 M', '8.0 B'."""
    for unit in ("", " K", " M"):
        if count < 1000:
            return f"{count:.1f}{unit}" if unit else f"{count:.0f}"
        count /= 1000
    return f"{count:.1f} B"


def human_seconds(value: float) -> str:
    """'3.2 us', '12.5 ms', '1.42 s'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def human_bytes(count: float) -> str:
    """'512 B', '8.0 KiB', '1.5 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_digits(value: float) -> str:
    """'12,970', '74.18', '0.031': four digits, or all that stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
