"""Draw docs/pictures: NAME.svg for every schedule, attention_NAME.svg for every attention algorithm.

Schedules: 4 ranks, 8 microbatches, F = B = W = 1 for a rank's share. Attention: both passes of one causal attention
over 4 ranks on a ring of links, dealt as the algorithm likes best. What a benchmark measured and drew lies in the
folder `measured`.

python docs/make_pictures.py            writes the pictures
python docs/make_pictures.py --check    fails when one is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import autopar.passes.attention  # (fills the table of algorithms)
import autopar.runtime.schedules  # noqa: F401  (fills the table of schedules)
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.problem import Mask, Problem
from autopar.cost.attention_costs import PASSES, pass_timeline
from autopar.cost.hardware import DEFAULT
from autopar.cost.topology import Topology
from autopar.planner.attention_choice import dealt
from autopar.report.attention_picture import timeline_svg
from autopar.report.html.schedule_picture import svg
from autopar.report.schedule_summary import run_schedule, timeline_facts
from autopar.schedule.request import SCHEDULES, Costs, Request

FOLDER = Path(__file__).resolve().parent / "pictures"
RANKS, MICROBATCHES, SLICES = 4, 8, 2
COSTS = Costs(stash=0.5)
LINKS = Topology.parse("ring", DEFAULT.card)
ATTENTION = Problem(
    batch=1, heads=32, kv_heads=32, queries=24000, keys=24000, width=128, value_width=128,
    dtype=torch.bfloat16, size=RANKS, mask=Mask(causal=True),
)  # fmt: skip


def draw(name: str) -> str:
    """The picture of one schedule."""
    entry = SCHEDULES[name]
    slices = SLICES if entry.sliced else 1
    timeline = run_schedule(name, Request(RANKS, MICROBATCHES, entry.virtual_stages, slices), COSTS)
    notes = " · ".join(f"{what} {value}" for what, value in timeline_facts(timeline))
    return svg(timeline, title=f"{name}: {entry.summary}", notes=notes)


def draw_attention(name: str) -> str:
    """The picture of one attention algorithm."""
    algorithm = ALGORITHMS[name]
    layout = algorithm.layouts[0]
    problem = dealt(ATTENTION, layout)
    panels = {way: pass_timeline(algorithm, problem, way, LINKS, DEFAULT) for way in PASSES}
    notes = f"{problem.queries} tokens, causal, {layout} · {problem.heads} heads · {LINKS} · {DEFAULT.name}"
    return timeline_svg(panels, f"{name}: {algorithm.title}", notes)


def main(arguments: list[str]) -> int:
    """Write or check the pictures; returns the exit status."""
    FOLDER.mkdir(exist_ok=True)
    pictures = {FOLDER / f"{name}.svg": draw(name) for name in SCHEDULES}
    pictures |= {FOLDER / f"attention_{name}.svg": draw_attention(name) for name in ALGORITHMS}
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
