"""Tables for people, on a terminal."""

from __future__ import annotations

from rich.table import Table


def table_of(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns ``right`` are right-aligned, long texts are folded."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def escaped(value: str) -> str:
    """Brackets are no markup."""
    return value.replace("[", "\\[")
