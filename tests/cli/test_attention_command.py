"""`autopar attention`: the table, the choice, the picture, and what it refuses; the options of plans."""

from __future__ import annotations

import argparse
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import autopar.passes.attention  # noqa: F401  (fills the table of algorithms)
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.problem import Mask, Problem
from autopar.cli.main import main
from autopar.cli.shared_arguments import add_model
from autopar.cost.attention_costs import pass_timeline
from autopar.cost.topology import Topology
from autopar.planner.attention_choice import dealt
from autopar.report.attention_picture import MOST_RANKS, WAYS, timeline_svg

SVG = "{http://www.w3.org/2000/svg}"
SMALL = ("--ranks", 4, "--seq", 4096, "--heads", 6, "--kv-heads", 2, "--head-dim", 64)


def run(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, str, str]:
    try:
        code = main(["attention", *map(str, options)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def attention(capsys: pytest.CaptureFixture[str], *options: object) -> str:
    code, out, err = run(capsys, *SMALL, *options)
    assert code == 0, err
    return out


def row(out: str, *cells: str) -> list[str]:
    """The first row of the table that begins with these cells."""
    rows = ([cell.strip() for cell in line.strip("│ ").split("│")] for line in out.splitlines())
    return next(found for found in rows if tuple(found[: len(cells)]) == cells)


def test_the_table_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    out = attention(capsys, "--topology", "ring:50e9:5e-6", "--target-hardware", "H100")
    assert "4096 queries to 4096 keys (causal), 6 heads, 2 key heads, over 4 ranks; ring:5e10:5e-6; H100" in out
    kv = 2 * 1024 * 2 * 64 * 2  # bytes of k and v of a rank
    forward = row(out, "contiguous", "ring", "forward")
    assert forward[3] == f"up {3 * kv / 1e6:.3g} MB" and forward[4] == "3"
    assert float(forward[5]) > float(forward[6]) > 0
    refused = row(out, "zigzag", "ulysses", "forward")
    assert refused[3:7] == [""] * 4 and refused[7].startswith("context_parallel:")
    assert "query heads do not divide over 4 ranks" in " ".join(out.replace("│", " ").split())
    assert re.search(r"^choice: \w+(\+\w+)? \(.* ms by estimate, of which .* waiting; ", out, re.MULTILINE)
    assert re.search(r"^cp_load_balance: (zigzag|contiguous) \(\w+ takes .* ms; \w+ takes .* ms\)$", out, re.MULTILINE)
    assert re.search(r"^ideal: forward [\d.]+ ms, backward [\d.]+ ms", out, re.MULTILINE)


def test_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    out = attention(capsys, "--full", "--attention", "bi_ring+token_ring", "--bandwidth", "1e9", "--latency", "0")
    assert "(full)" in out and "switch:1e9:0" in out and "zigzag " not in out
    assert "choice: bi_ring+token_ring (asked for)" in out
    out = attention(capsys, "--cp-load-balance", "zigzag", "--window", 100)
    assert "causal, window 100" in out and "contiguous" not in out and "cp_load_balance: zigzag (asked for)" in out


def test_cross_attention_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    out = attention(capsys, "--kv-seq", 65536, "--topology", "mesh")
    assert "4096 queries to 65536 keys (full)" in out and "choice: token_ring (" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "star"], "topology: expected one of ring, mesh, switch, found 'star'"),
        (["--attention", "rings"], "--attention: expected one of all_gather, ring"),
        (["--attention", "ulysses"], "6 query heads do not divide over 4 ranks"),
        (["--kv-heads", 4], "--kv-heads: 6 query heads are not a multiple of 4 key heads"),
        (["--seq", 4098], "--seq: 4098 tokens do not divide over 4 ranks; use 4100"),
        (["--kv-seq", 66], "--kv-seq: 66 tokens do not divide over 4 ranks; use 68"),
        (["--kv-seq", 64, "--causal"], "--causal: needs as many keys as queries, found 64 and 4096; use --full"),
        (["--seq", 4092, "--cp-load-balance", "zigzag"], "does not divide into 8 chunks for 4 ranks; pad to 4096"),
        (["--svg", "/no/such/folder/a.svg"], "/no/such/folder/a.svg: cannot be written: No such file"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], options: list[object], message: str) -> None:
    code, out, err = run(capsys, *SMALL, *options)
    assert code == 2 and not out and message in err


def test_options_of_plans() -> None:
    parser = argparse.ArgumentParser()
    add_model(parser, seq=16, batch=None, dtype="float64")
    given = ["--config", __file__, "--mesh", "cp=2"]
    found = parser.parse_args(given)
    assert (found.attention, found.cp_load_balance, found.topology) == ("auto", "auto", "")
    more = ["--attention", "ring+token_ring", "--cp-load-balance", "zigzag", "--topology", "cp=ring"]
    found = parser.parse_args(given + more)
    assert (found.attention, found.cp_load_balance, found.topology) == ("ring+token_ring", "zigzag", "cp=ring")


# --- pictures ---------------------------------------------------------------------------------------------


def problem(size: int) -> Problem:
    facts = {"batch": 1, "heads": 8, "kv_heads": 8, "queries": 1024 * size, "keys": 1024 * size, "width": 64}
    causal = Mask(causal=True)
    return Problem(**facts, value_width=64, dtype=torch.bfloat16, size=size, mask=causal)  # type: ignore[arg-type]


def test_the_picture_of_all_algorithms(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    attention(capsys, "--cp-load-balance", "zigzag", "--svg", file)
    text = file.read_text(encoding="utf-8")
    names = re.findall(r'<tspan class="name">([^<]*)</tspan>', text)
    able = [name for name in ALGORITHMS if f"{name}, forward" in names]
    assert {"all_gather", "bi_ring", "zigzag_ring", "token_ring", "hybrid"} <= set(able)
    assert not {"ring", "ulysses"} & set(able), "of another layout, and of more heads"
    assert names == [f"{name}, {way}" for name in able for way in ("forward", "backward")]
    assert "prefers-color-scheme: dark" in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    ET.fromstring(text)


def test_every_event_has_a_box_in_its_lane() -> None:
    p = dealt(problem(4), "zigzag")
    timeline = pass_timeline(ALGORITHMS["token_ring"], p, "forward", Topology("mesh"))
    root = ET.fromstring(timeline_svg({"token_ring, forward": timeline}, "a <title>", "notes & more"))
    boxes = [group.find(SVG + "rect") for group in root.iter(SVG + "g")]
    assert len(boxes) == len(timeline.spans)
    says = [str(box.find(SVG + "title").text) for box in boxes if box is not None]  # type: ignore[union-attr]
    assert any(re.match(r"q: 0 -> 3, \d+ bytes, 1 -> 0, \d+ bytes, ", text) for text in says)
    assert any(re.match(r"rank 0: \d+ queries of 3, \d+ keys of 0", text) for text in says)
    lanes: dict[float, list[tuple[float, float]]] = {}
    for box in boxes:
        assert box is not None
        x, y, width = (float(box.get(name, 0)) for name in ("x", "y", "width"))
        lanes.setdefault(y, []).append((x, x + width))
    used = {span.what for span in timeline.spans}
    assert len(lanes) == 4 * len(used) and used <= {"compute", *WAYS}
    for found in lanes.values():
        found.sort()
        assert all(one[1] <= other[0] + 0.02 for one, other in pairwise(found))  # nothing overlaps in a lane


def test_labels_fit_their_boxes() -> None:
    timeline = pass_timeline(ALGORITHMS["bi_ring"], dealt(problem(4), "zigzag"), "backward", Topology("ring"))
    root = ET.fromstring(timeline_svg({"bi_ring, backward": timeline}))
    labelled = [(group.find(SVG + "rect"), group.find(SVG + "text")) for group in root.iter(SVG + "g")]
    shown = [(rect, text) for rect, text in labelled if rect is not None and text is not None]
    assert len(shown) > len(labelled) / 3
    for rect, text in shown:
        assert 0.6 * float(text.get("font-size", 0)) * len(text.text or "") <= float(rect.get("width", 0))


def test_many_ranks_are_drawn_in_part() -> None:
    timeline = pass_timeline(ALGORITHMS["ring"], problem(MOST_RANKS + 1), "forward", Topology())
    text = timeline_svg({"ring": timeline})
    assert f"the first {MOST_RANKS} of {MOST_RANKS + 1} ranks" in text and f">rank {MOST_RANKS}<" not in text
