"""Schedules as people see them: SVG, grid of text, trace, part of the report, and the pictures of the documents."""

from __future__ import annotations

import importlib.util
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import autopar.passes.attention
import autopar.runtime.schedules  # noqa: F401  (fills the table of schedules)
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.report.chrome_trace import Event, chrome_trace, events_of, measured_events, transfers
from autopar.report.html.page import Page, render
from autopar.report.html.schedule_picture import pipeline_section, svg
from autopar.report.schedule_summary import compare, grid, run_schedule, sent, sequence, timeline_facts
from autopar.report.svg import ticks
from autopar.schedule.lowering import lower
from autopar.schedule.order import Action, P2PEdge
from autopar.schedule.request import SCHEDULES, Costs, Request
from autopar.schedule.simulate import Timeline, simulate
from tests.support.order_texts import parse_row

MS = Costs(F=18.5, B=18.1, W=9.3, comm=0.6, stash=0.5)
SVG = "{http://www.w3.org/2000/svg}"
NAMES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "zb_auto",
    "dual_pipe",
    "dual_pipe_v",
    "tera_pipe",
    "seq1f1b",
)


def made(name: str, ranks: int = 4, microbatches: int = 8, costs: Costs = MS) -> Timeline:
    entry = SCHEDULES[name]
    return run_schedule(name, Request(ranks, microbatches, entry.virtual_stages, 2 if entry.sliced else 1), costs)


def boxes(text: str) -> list[tuple[str, str, dict[str, float]]]:
    """(kind, hover text, geometry) of each action."""
    groups = [g for g in ET.fromstring(text).iter(SVG + "g") if g.get("class") == "box"]
    out = []
    for rect in (g.find(SVG + "rect") for g in groups):
        assert rect is not None
        title = rect.find(SVG + "title")
        assert title is not None and title.text
        out.append(
            (str(rect.get("class")), title.text, {k: float(rect.get(k, 0)) for k in ("x", "y", "width", "height")})
        )
    return out


def labels(text: str) -> list[str]:
    return [str(t.text) for g in ET.fromstring(text).iter(SVG + "g") for t in g.findall(SVG + "text")]


# --- SVG --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_action_has_a_box_to_scale(name: str) -> None:
    timeline = made(name)
    events, found = events_of(timeline), boxes(svg(timeline, title=name, unit="ms"))
    assert len(found) == len(events) == sum(map(len, timeline.order.ranks))
    at = {title.split(",")[0]: (kind, place) for kind, title, place in found}
    rows = sorted({round(place["y"] // 26) for _, place in at.values()})
    scale = (at[str(events[-1][1]).rstrip("&")][1]["x"] - at[str(events[0][1])][1]["x"]) / (
        events[-1][2] - events[0][2]
    )
    origin = at[str(events[0][1])][1]["x"] - scale * events[0][2]
    for rank, action, start, end in events:
        kind, place = at[str(action).rstrip("&")]
        assert kind == action.kind
        assert round(place["y"] // 26) == rows[0] + rank
        assert place["x"] == pytest.approx(origin + start * scale, abs=0.1)
        assert place["width"] == pytest.approx((end - start) * scale - 1, abs=0.1)  # and a gap


def test_hovering_says_what_and_when() -> None:
    timeline = made("zb_h1")
    rank, index = 2, timeline.order.ranks[2].index(Action(2, "B", 5))
    start, end = timeline.start[rank][index], timeline.end[rank][index]
    assert f"2B5, {start:.1f}-{end:.1f} ms" in [title for _, title, _ in boxes(svg(timeline, unit="ms"))]


def test_numbers_stand_where_they_fit() -> None:
    small, large = made("zb_h1"), made("zb_h1", 16, 64)
    assert len(labels(svg(small))) == len(events_of(small))
    assert sorted(set(labels(svg(small)))) == [str(i) for i in range(8)]
    text = svg(large)
    assert not labels(text) and len(boxes(text)) == len(events_of(large))
    view = [float(v) for v in str(ET.fromstring(text).get("viewBox")).split()]
    assert max(b["y"] + b["height"] for _, _, b in boxes(text)) < view[3] < 600
    assert max(b["x"] + b["width"] for _, _, b in boxes(text)) < view[2]


def test_the_two_halves_of_a_cell_share_the_row() -> None:
    timeline = made("dual_pipe")
    halves = {str(a).rstrip("&") for actions in timeline.order.ranks for a in actions if a.paired}
    found = {title.split(",")[0]: place for _, title, place in boxes(svg(timeline))}
    whole = max(place["height"] for place in found.values())
    assert halves
    for half in halves:
        other = [
            p for p in found.values() if p["x"] == found[half]["x"] and abs(p["y"] - found[half]["y"]) <= whole / 2
        ]
        assert sorted(p["height"] for p in other) == [whole / 2] * 2
        assert abs(other[0]["y"] - other[1]["y"]) == whole / 2


@pytest.mark.parametrize(
    ("name", "tones", "note"), [("1f1b", 1, ""), ("zb_v", 2, "stages of the rank"), ("seq1f1b", 2, "token slices")]
)
def test_stages_and_slices_differ_in_tone(name: str, tones: int, note: str) -> None:
    text = svg(made(name))
    found = set(re.findall(r'class="F"[^>]*?( fill-opacity="[\d.]+")?>', text))
    assert len(found) == tones and note in text and ("fainter" in text) == bool(note)


def test_a_measured_run_has_the_same_scale() -> None:
    timeline = made("1f1b")
    slower = [
        (rank, action, 1000 + 1.25 * start, 1000 + 1.25 * end) for rank, action, start, end in events_of(timeline)
    ]
    text = svg(timeline, measured=slower, unit="ms")
    found, n = boxes(text), len(slower)
    assert "simulated" in text and "measured" in text and len(found) == 2 * n
    first, second = found[:n], found[n:]
    assert max(b["y"] for _, _, b in first) < min(b["y"] for _, _, b in second)
    assert min(b["x"] for _, _, b in first) == min(b["x"] for _, _, b in second)  # both start at 0
    widest = [
        max(b["x"] + b["width"] for _, _, b in half) - min(b["x"] for _, _, b in half) for half in (first, second)
    ]
    assert widest[1] / widest[0] == pytest.approx(1.25, abs=0.01)


def test_peaks_and_special_letters() -> None:
    timeline = made("zb_h1")
    text = svg(timeline, title="a < b & c", notes="x > y")
    root = ET.fromstring(text)
    assert {"a < b & c", "x > y", "peak memory", "4", "3.5"} <= {t.text for t in root.iter(SVG + "text")}
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)  # nothing is loaded


@pytest.mark.parametrize(("span", "step"), [(33, 5), (1302.4, 200), (0.0007, 0.0001), (12, 1), (13, 2)])
def test_ticks_are_round(span: float, step: float) -> None:
    found = ticks(span)
    assert found[1] == pytest.approx(step) and span - step < found[-1] <= span * (1 + 1e-9)


# --- the grid -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [60, 90, 160])
def test_the_grid_holds_every_action_once(name: str, width: int) -> None:
    timeline = made(name)
    text = grid(timeline, width).plain
    assert max(map(len, text.splitlines())) <= width
    several = len(timeline.order.rank_of) > len(timeline.order.ranks)
    for rank, actions in enumerate(timeline.order.ranks):
        lines = [line for line in text.splitlines() if line.startswith(f"rank {rank} ")]
        words = re.findall(r"\d*[FBW]+\d+(?:\.\d+)?", " ".join(line[6:] for line in lines))
        names = [str(a).rstrip("&") if several else str(a).removeprefix(str(a.stage)) for a in actions]
        assert words == names


def test_the_grid_is_to_scale() -> None:
    text = grid(made("1f1b", costs=Costs()), 200).plain.splitlines()
    margin = text[1].index("F0")
    unit = (text[4].index("F0") - margin) / 3
    assert unit == int(unit)
    assert text[1].index("BW0") == margin + 10 * unit and text[1].index("BW7") == margin + 31 * unit
    assert text[0].index(" 30") + 1 == margin + 30 * unit


def test_what_is_too_long_becomes_a_list() -> None:
    timeline = made("zb_h1", 2, 200)
    text = grid(timeline, 100).plain
    assert text == sequence(timeline.order, 100)
    rows = re.split(r"rank \d", text)[1:]
    assert tuple(parse_row(row) for row in rows) == timeline.order.ranks


# --- traces -------------------------------------------------------------------------------------------------


def check_trace(trace: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(slices, arrows) of a trace whose arrows begin and end inside of slices, and never go back in time."""
    events = json.loads(json.dumps(trace))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"] and end["bp"] == "e"
        for e in (start, end):
            rows = [s for s in slices if (s["pid"], s["tid"]) == (e["pid"], e["tid"])]
            assert any(s["ts"] <= e["ts"] <= s["ts"] + s["dur"] for s in rows)
    return slices, list(starts.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_simulated_trace(name: str) -> None:
    timeline = made(name)
    slices, arrows = check_trace(chrome_trace({name: events_of(timeline)}, unit=1e-3))
    assert len(slices) == len(events_of(timeline)) and len(arrows) == 2 * sent(timeline.order)
    last = max(s["ts"] + s["dur"] for s in slices)
    assert last == pytest.approx(timeline.makespan * 1e3, abs=0.01)  # microseconds
    assert {s["tid"] // 2 for s in slices} == set(range(4))


def test_a_measured_trace_shows_its_transfers() -> None:
    """Events of a lowered order, with transfers that take time and threads of their own."""
    edges = [P2PEdge("x", part, part + 1) for part in range(3)]
    order = lower(made("1f1b").order, edges)
    timeline = simulate(order, MS)
    all_of_it = [
        (rank, action, start, end)
        for rank, actions in enumerate(order.ranks)
        for action, start, end in zip(actions, timeline.start[rank], timeline.end[rank])
    ]
    sends = {one[1]: one[2] for one, _ in transfers(all_of_it)}
    measured: list[Event] = []
    for rank, action, start, end in all_of_it:
        sender = Action(action.peer, "S" + action.kind[1:], action.microbatch, peer=action.stage)
        arrival = max(start, sends[sender]) if action.kind[0] == "R" else start
        measured.append((rank, action, start, end if end > start else arrival + 0.6))
    slices, arrows = check_trace(chrome_trace({"simulated": events_of(timeline), "measured": measured}, unit=1e-3))
    real = [a for a in arrows if a["pid"] == 1]
    assert len(real) == 2 * 3 * 8 and all(re.fullmatch(r"\dS[FB]\d>\d", a["name"]) for a in real)
    assert {s["tid"] for s in slices if s["pid"] == 1} == set(range(8))
    for one, other in transfers(measured):
        assert (one[1].stage, one[1].peer, one[1].microbatch) == (other[1].peer, other[1].stage, other[1].microbatch)


def test_receives_that_were_only_posted_give_way_to_what_waits_for_them() -> None:
    """As the executor records it, in seconds: posting a receive takes no time, and comes before the send."""
    first = [(Action(0, "F", 0), 5.0, 5.001), (Action(0, "SF", 0, peer=1), 5.001, 5.002)]
    second = [(Action(1, "RF", 0, peer=0), 5.0, 5.0001), (Action(1, "F", 0), 5.003, 5.004)]
    events = measured_events([first, second], unit=1e-3)
    assert events[0] == (0, Action(0, "F", 0), pytest.approx(5000), pytest.approx(5001))
    slices, arrows = check_trace(chrome_trace({"measured": events}, unit=1e-3))
    assert len(slices) == 4 and [a["ts"] for a in arrows] == [pytest.approx(1000, abs=1e-3)]
    assert [(one[1].kind, other[1].kind) for one, other in transfers(events)] == [("SF", "F")]
    assert [title for _, title, _ in boxes(svg(made("1f1b"), measured=events, unit="ms"))][-2:] == [
        "0F0, 0-1 ms",
        "1F0, 3-4 ms",
    ]


# --- the report and the documents ---------------------------------------------------------------------------


def test_the_report_has_a_part_for_the_pipeline() -> None:
    timeline = made("zb_h2")
    section = pipeline_section(timeline, events_of(timeline), ["cut by time, <balanced>"], unit="ms")
    page = render(Page(sections=[section]))
    for fact in (
        "zb_h2",
        f"{timeline.makespan:,.6g} ms",
        f"{timeline.bubble:.2%}",
        "&lt;balanced&gt;",
        "<svg",
        "measured",
    ):
        assert fact in page
    assert timeline.order.text().splitlines()[3] in page
    assert 'href="#pipeline"' in page


def test_a_step_may_be_shorter_than_the_makespan() -> None:
    """ZB-H2 staggers the ranks' starts."""
    timeline = made("zb_h2", costs=Costs())
    assert dict(timeline_facts(timeline)) == {
        "makespan": "27", "step (each rank from its own start)": "24", "bubble": "0.00%", "peak memory": "7 (rank 0)",
    }  # fmt: skip


def test_a_comparison_has_times_of_the_whole_share() -> None:
    outcomes = {o.name: o for o in compare(Request(4, 8), Costs())}
    assert list(outcomes) == list(SCHEDULES)
    found = {name: o.timeline.makespan for name, o in outcomes.items() if o.timeline}
    assert (found["gpipe"], found["1f1b"], found["interleaved"], found["zb_h1"]) == (33, 33, 28.5, 27)
    odd = {o.name: o for o in compare(Request(3, 8), Costs())}
    assert odd["dual_pipe"].timeline is None and "3" in odd["dual_pipe"].refusal and odd["1f1b"].timeline


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    """docs/make_pictures.py"""
    file = Path(__file__).resolve().parents[2] / "docs" / "make_pictures.py"
    spec = importlib.util.spec_from_file_location("make_pictures", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_up_to_date(pictures: ModuleType) -> None:
    assert pictures.main(["--check"]) == 0, "docs/pictures is out of date; run make docs"
    drawn = {*SCHEDULES, *(f"attention_{name}" for name in ALGORITHMS)}
    assert {f.stem for f in pictures.FOLDER.glob("*.svg")} == drawn


def test_old_pictures_are_found(
    pictures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    assert pictures.main([]) == 0 and pictures.main(["--check"]) == 0
    (tmp_path / "gone.svg").write_text("<svg/>")
    (tmp_path / "1f1b.svg").write_text("<svg/>")
    assert pictures.main(["--check"]) == 1
    assert "1f1b.svg, gone.svg" in capsys.readouterr().out
    assert pictures.main([]) == 0 and pictures.main(["--check"]) == 0
