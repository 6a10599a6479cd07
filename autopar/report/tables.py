"""Tables on a terminal of any width.

wide     a table; columns of sentences wrap, names and numbers do not
narrow   a paragraph per row:   model.layers.{0..3}.self_attn.q_proj.weight
                                    shape bf16[64,64] · tp S(0) · bytes 8.0 KiB
                                    why: tp: column: by heads
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_SENTENCE, _LEAST = 30, 18  # characters: what is longer may be a sentence; the least that one is wrapped to


def table_of(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns ``right`` are right-aligned, long texts are folded."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def escaped(value: str) -> str:
    """Escape brackets, which rich would read as markup."""
    return value.replace("[", "\\[")


def show_table(console: Console, table: Table) -> None:
    """Print it: without lines between columns where it is narrow, as paragraphs where names and numbers would break."""
    if not fits(console, table):
        if not fits(console, table, between=1):
            _show_paragraphs(console, table)
            return
        table.box, table.padding = None, (0, 1, 0, 0)
    for column in table.columns:
        if not _is_of_sentences(column):
            column.width, column.no_wrap = _width(column, wrapped=table.box is None), False
    _show_title(console, table)
    console.print(table)


def fits(console: Console, table: Table, between: int = 3) -> bool:
    """Whether names and numbers fit next to sentences that wrap. between: characters between columns."""
    narrow = between < 3
    widths = [min(_width(c), _LEAST) if _is_of_sentences(c) else _width(c, narrow) for c in table.columns]
    return sum(widths) + between * len(widths) + 1 <= console.width


def _cells(column: Column) -> list[Text]:
    return [Text.from_markup(str(cell)) for cell in column.cells]


def _width(column: Column, wrapped: bool = False) -> int:
    """wrapped: the words of its head stand below each other."""
    head = str(column.header).split() if wrapped else [str(column.header)]
    return max((text.cell_len for text in (*map(Text.from_markup, head), *_cells(column))), default=0)


def _is_of_sentences(column: Column) -> bool:
    return any(text.cell_len > _SENTENCE and text.plain.count(" ") > 2 for text in _cells(column))


def _show_title(console: Console, table: Table) -> None:
    """Above the table, as wide as the console."""
    if table.title:
        console.print(table.title, style="bold")
    table.title = None


def _show_paragraphs(console: Console, table: Table) -> None:
    _show_title(console, table)
    sentences = [_is_of_sentences(column) for column in table.columns]
    for row, cells in zip(table.rows, zip(*map(_cells, table.columns)), strict=True):
        given = [(str(c.header), x, long) for c, x, long in zip(table.columns, cells, sentences) if x.plain]
        (_, heading, _), *rest = given or [("", Text(), False)]
        console.print(heading, style=row.style or "", overflow="fold")
        facts = [f"{name} {text.plain}".strip() for name, text, long in rest if not long]
        lines = [" · ".join(facts)] if facts else []
        lines += [f"{name}: {text.plain}" if name else text.plain for name, text, long in rest if long]
        for line in lines:
            for part in Text(line, style=row.style or "").wrap(console, max(console.width - 4, 1)):
                part.rstrip()
                console.print(Text("    ") + part)
    if table.caption:
        console.print(table.caption)


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
