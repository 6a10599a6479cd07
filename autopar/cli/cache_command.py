"""`autopar cache`: list the compiled steps on disk, the last used one first, or remove them.

autopar cache
autopar cache --clear
"""

from __future__ import annotations

import argparse
import time

from autopar.cache.disk_cache import SIZE_VARIABLE, VARIABLE, DiskCache, ListedEntry, entry_folder
from autopar.cli.command import Command, console_of_results

_UNITS = (("d", 86400), ("h", 3600), ("min", 60))
_MIB = 1 << 20


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="remove all of them")


def _run(args: argparse.Namespace) -> int:
    folder = entry_folder()
    if folder is None:
        print(f"autopar: the cache is off ({VARIABLE})")
        return 0
    if args.clear:
        count, nbytes = folder.clear()
        print(f"autopar: removed {count} entries, {nbytes / _MIB:.1f} MiB, from {folder.path}")
        return 0
    _show(folder)
    return 0


def _show(folder: DiskCache) -> None:
    from rich.table import Table  # what only this command takes long to load

    from autopar.report.tables import show_table

    entries = folder.entries()
    total = sum(entry.nbytes for entry in entries) / _MIB
    most = f"at most {folder.size / _MIB:.0f} MiB ({SIZE_VARIABLE})"
    if entries:
        table = Table(box=None)
        for column in ("model", "mesh", "kind"):
            table.add_column(column)
        for column in ("KiB", "made", "last used", "hits"):
            table.add_column(column, justify="right")
        for entry in entries:
            table.add_row(*_row(entry))
        show_table(console_of_results(160), table)
    print(f"{len(entries)} entries, {total:.1f} MiB of {most}, in {folder.path}")


def _row(entry: ListedEntry) -> list[str]:
    about = entry.about
    texts = [str(about.get(name, "")).replace("[", r"\[") for name in ("model", "mesh", "kind")]
    created = about.get("created")
    age = _ago(created) if isinstance(created, (int, float)) else ""
    return [*texts, f"{entry.nbytes / 1024:.0f}", age, _ago(entry.used), str(entry.hits)]


def _ago(moment: float) -> str:
    """'3 h' since a moment."""
    seconds = max(time.time() - moment, 0.0)
    return next((f"{seconds / size:.0f} {unit}" for unit, size in _UNITS if seconds >= size), f"{seconds:.0f} s")


CACHE = Command("cache", "list or remove the compiled steps on disk", _add_arguments, _run)
