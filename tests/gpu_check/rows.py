"""Rows of the report: the table that is printed and the JSON that is sent around."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

OK, FAILED, NOT_APPLICABLE = "ok", "failed", "not applicable"
POISONED = ("CUDA error", "CUBLAS_STATUS", "device-side assert")  # after these no call of this process works
SHOWN = 40  # failed rows that are printed; the JSON has all


@dataclass(frozen=True)
class Row:
    """One finding. figure: a number, in ``unit`` ("error": over what is allowed, from 1 on it is wrong)."""

    what: str
    case: str
    verdict: str = OK
    figure: float | None = None
    unit: str = ""
    words: str = ""
    section: str = ""


def judged(what: str, case: str, error: float, allowed: float, words: str = "") -> Row:
    """A row of an error that may reach ``allowed``; NaN is wrong."""
    right = error <= allowed
    told = words or ("" if right else f"error {error:.2e}, allowed {allowed:.2e}")
    return Row(what, case, OK if right else FAILED, error / allowed if allowed else error, "error", told)


def guarded(what: str, case: str, check: Callable[[], Row | None]) -> Iterator[Row]:
    """The row of a check; a failed one if it raises. None: not applicable. Errors after which nothing works in this
    process are raised on."""
    try:
        yield check() or Row(what, case, NOT_APPLICABLE)
    except Exception as error:
        yield Row(what, case, FAILED, words=told(error))
        if any(sign in str(error) for sign in POISONED):
            raise RuntimeError(f"the rest of {what} was not run, CUDA is gone: {told(error)}") from error


def told(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def table(rows: Sequence[Row]) -> str:
    """A line for each thing that was checked, with counts and its worst figure; then what failed."""
    head = ("section", "what", OK, FAILED, "n/a", "figure", "")
    lines = [head, *(_line(group) for group in _groups(rows))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    text = ["  ".join([*(cell.ljust(w) for cell, w in zip(line, widths)), line[-1]]).rstrip() for line in lines]
    failed = [row for row in rows if row.verdict == FAILED]
    text += ["", *(f"FAILED {r.section}: {r.what}, {r.case}: {r.words}" for r in failed[:SHOWN])]
    if len(failed) > SHOWN:
        text.append(f"... and {len(failed) - SHOWN} more, see the JSON")
    count = {verdict: sum(row.verdict == verdict for row in rows) for verdict in (OK, FAILED, NOT_APPLICABLE)}
    return "\n".join([*text, ", ".join(f"{n} {verdict}" for verdict, n in count.items())])


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.section, row.what), []).append(row)
    return list(groups.values())


def _line(rows: Sequence[Row]) -> tuple[str, ...]:
    counts = (str(sum(r.verdict == verdict for r in rows) or "") for verdict in (OK, FAILED, NOT_APPLICABLE))
    numbers = [r for r in rows if r.figure is not None]
    worst = max(numbers, key=lambda r: math.inf if math.isnan(r.figure or 0.0) else r.figure or 0.0, default=None)
    figure = "" if worst is None else f"{worst.figure:.3g} {worst.unit}"
    words = rows[0].words if len(rows) == 1 and rows[0].verdict != FAILED else ""
    return (
        rows[0].section,
        rows[0].what,
        *counts,
        figure,
        words or (f"worst: {worst.case}" if worst and len(numbers) > 1 else ""),
    )


def write_json(file: Path, device: str, rows: Sequence[Row], seconds: float) -> None:
    """All rows; numbers that JSON has not, such as NaN, as texts."""

    def plain(row: Row) -> dict[str, object]:
        found = dataclasses.asdict(row)
        if row.figure is not None and not math.isfinite(row.figure):
            found["figure"] = str(row.figure)
        return found

    failed = any(row.verdict == FAILED for row in rows)
    content = {"device": device, "seconds": round(seconds, 1), "failed": failed, "rows": [plain(row) for row in rows]}
    file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
