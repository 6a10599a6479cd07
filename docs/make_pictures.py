"""Draw docs/pictures/NAME.svg for every schedule: 4 ranks, 8 micro-batches, F = B = W = 1 for a rank's share.

python docs/make_pictures.py            writes the pictures
python docs/make_pictures.py --check    fails when one is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

import autopar.runtime.schedules  # noqa: F401  (fills the table of schedules)
from autopar.picture import svg
from autopar.pipeline_report import describe, run
from autopar.schedule import SCHEDULES, Costs, Request

FOLDER = Path(__file__).resolve().parent / "pictures"
RANKS, MICRO_BATCHES, SLICES = 4, 8, 2
COSTS = Costs(stash=0.5)


def draw(name: str) -> str:
    """The picture of one schedule."""
    entry = SCHEDULES[name]
    slices = SLICES if entry.sliced else 1
    timeline = run(name, Request(RANKS, MICRO_BATCHES, entry.chunks, slices), COSTS)
    notes = " · ".join(f"{what} {value}" for what, value in describe(timeline))
    return svg(timeline, title=f"{name}: {entry.summary}", notes=notes)


def main(arguments: list[str]) -> int:
    """Write or check the pictures; returns the exit status."""
    FOLDER.mkdir(exist_ok=True)
    pictures = {FOLDER / f"{name}.svg": draw(name) for name in SCHEDULES}
    if "--check" in arguments:
        old = {file: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.svg")}
        stale = sorted(file.name for file in {*old, *pictures} if old.get(file) != pictures.get(file))
        if stale:
            print(f"docs: out of date in docs/pictures: {', '.join(stale)}; run make docs")
        return int(bool(stale))
    for file in FOLDER.glob("*.svg"):
        file.unlink()
    for file, text in pictures.items():
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
