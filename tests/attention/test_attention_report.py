"""Attention over sharded sequences in the summary and in the report, which must agree with the step's graphs."""

from __future__ import annotations

import functools
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.functional import scaled_dot_product_attention

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.program import ExchangeEvent
from autopar.capture.front_end import capture
from autopar.compile.model import compile_graph
from autopar.cost.attention_costs import PASSES, pass_timeline
from autopar.cost.traffic import step_communication
from autopar.ir.graph import copy_graph
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.report.attention_picture import MOST_RANKS
from autopar.report.attention_summary import attention_summary, attentions_of
from autopar.report.dump.dump import Dumper, plan_rows
from autopar.report.html.attention_section import SECTION, attention_sections
from autopar.report.summary import show_summary, summarize
from autopar.report.tables import human_bytes
from autopar.steps.graphs import Compiled

SVG = "{http://www.w3.org/2000/svg}"
WAYS = ("up", "down", "home")


class Block(nn.Module):
    """Attention with two key heads, causal or full, to itself or to a memory."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.causal = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8), causal
        self.o = nn.Linear(16, 16)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (-1, 4)).transpose(1, 2) for y in (self.q(x), self.k(memory), self.v(memory)))
        out = scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return x + self.o(out.transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Two causal layers, then one that reads another sequence: two distinct attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(16, 16), nn.ModuleList(Block(True) for _ in range(2))
        self.cross = Block(False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, x)
        return self.cross(x, memory).square().mean()


@functools.cache
def captured(train: bool) -> GraphModule:
    batch = {"x": torch.empty(2, 32, 16, device="meta"), "memory": torch.empty(2, 64, 16, device="meta")}
    return capture(Net().to("meta"), batch, train=train)


@functools.cache
def compiled(mesh: str, train: bool = True, **options: Any) -> Compiled:
    return compile_graph(copy_graph(captured(train)), Mesh.parse(mesh), Options(**options), outputs=(), train=train)


def auto() -> Compiled:
    """Two heads and one of keys on each of four ranks, so that heads cannot be exchanged."""
    return compiled("cp=4,tp=2", topology="cp=ring:50e9:5e-6")


def hybrid() -> Compiled:
    return compiled("cp=4", attention="hybrid", cp_load_balance="zigzag")


def many() -> Compiled:
    """Evaluation on more ranks than are drawn."""
    return compiled("cp=16", train=False, attention="ring")


def named() -> Compiled:
    return compiled("cp=4", attention="ring+token_ring", cp_load_balance="contiguous")


class Page(HTMLParser):
    """Raises AssertionError for tags that do not nest; collects the texts of table cells."""

    VOID = ("meta", "input", "br", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def pictures(page: str) -> list[ET.Element]:
    return [
        ET.fromstring(svg)
        for svg in re.findall(r'<svg xmlns="http://www.w3.org/2000/svg" class="attention".*?</svg>', page, re.S)
    ]


# --- the summary -----------------------------------------------------------------------------------------


def test_equal_attentions_are_one_entry() -> None:
    layers, cross = attention_summary(auto())
    assert (layers["modules"], layers["count"]) == ("layers.{0,1}", 2)
    assert layers["what"] == "32 queries, 32 keys, causal, 2 heads, 1 of keys, over 4 ranks"
    assert (cross["modules"], cross["count"]) == ("cross", 1) and cross["what"].startswith("32 queries, 64 keys, 2 he")
    for entry in (layers, cross):
        assert [row["pass"] for row in entry["passes"]] == ["forward", "backward"]
        assert all(row in entry["candidates"] for row in entry["passes"])
        times = [row["seconds"] for row in entry["candidates"] if "seconds" in row]
        assert len(times) >= 8 and all(row["exposed"] < row["seconds"] for row in entry["passes"])
        refusals = {row["algorithm"]: row["refusal"] for row in entry["candidates"] if "refusal" in row}
        assert "2 query heads do not divide over 4 ranks" in refusals["ulysses"]
    json.dumps([layers, cross])


@pytest.mark.parametrize("made", [auto, hybrid, named])
def test_bytes_of_entries_sum_up_to_those_of_a_step(made: Callable[[], Compiled]) -> None:
    said: Counter[str] = Counter()
    for entry in attention_summary(made()):
        for row in entry["passes"]:
            said.update({f"send {way}": entry["count"] * row["sent"].get(way, 0) for way in WAYS})
    found: Counter[str] = Counter()
    for (axis, kind), volume in step_communication(made()).items():
        if axis.startswith("cp") and kind.startswith("send "):
            found[kind] += volume.bytes
    assert sum(found.values()) and +said == found


def test_tables_say_what_runs() -> None:
    summary = summarize(hybrid(), "Net")
    console = Console(width=160, highlight=False)
    with console.capture() as text:
        show_summary(summary, console)
    lines = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in text.get().splitlines()]
    layers = summary["attention"][0]
    forward = next(line for line in lines if line[:5] == ["layers.{0,1}", "2", "zigzag", "forward", "hybrid"])
    assert all(human_bytes(size) in forward[5] for size in layers["passes"][0]["sent"].values())
    assert ["stream attention_default.q", "cp:S(2;1,-1)", "32 tokens; zigzag: asked for"] in lines
    assert ["attention layers.{0,1}", "cp: hybrid", "asked for"] in lines
    assert any(line[:2] == ["cp, 2 neighbours", "all_to_all"] for line in lines)
    assert any(line[:2] == ["cp, ranks 2 apart", "send up"] for line in lines)
    assert "--json, or --dump DIR" in text.get()


def test_without_the_axis_nothing_is_said() -> None:
    made = compiled("tp=2")
    assert not attentions_of(made) and not attention_sections(made) and "attention" not in summarize(made)


def test_evaluation_has_one_pass() -> None:
    (layers, cross) = attention_summary(many())
    assert {row["pass"] for entry in (layers, cross) for row in entry["passes"] + entry["candidates"]} == {"forward"}


# --- the report ------------------------------------------------------------------------------------------


def test_the_report_shows_choices_and_timelines(tmp_path: Path) -> None:
    made = auto()
    dumper = Dumper(tmp_path)
    dumper.add_compiled(made)
    page = (tmp_path / "report.html").read_text()
    rows = Page(page).rows
    assert f"<h2>{SECTION}</h2>" in page and "Links: ring:5e10:5e-6." in page
    for a in attentions_of(made):
        for way in ("forward", "backward"):
            name = getattr(a.plan, way)
            overview = next(row for row in rows if row[:1] == [a.modules] and row[3] == way)
            assert overview[1:3] == [str(len(a.where)), a.layout] and overview[4] == name
            assert overview[-1] == a.plan.reason
            picked = [row for row in rows if row[:2] == [name, way] and row[-1] == "chosen"]
            assert any(row[2:6] == overview[5:9] for row in picked)
    assert any(row[0] == "ulysses" and "do not divide" in row[-1] for row in rows)


def test_pictures_show_every_exchange_of_both_passes() -> None:
    made = named()
    for a, svg in zip(attentions_of(made), pictures(attention_sections(made)[0].body), strict=True):
        texts = ["".join(node.itertext()) for node in svg.iter(f"{SVG}text")]
        assert sum(text == "rank 3" for text in texts) == 2 and "rank 4" not in texts
        assert any(text.startswith("ring, forward") for text in texts)
        assert any(text.startswith("token_ring, backward") for text in texts)
        says = " | ".join(node.text or "" for node in svg.iter(f"{SVG}title"))
        ways = zip(("ring", "token_ring"), PASSES, strict=True)
        spans = [s for name, way in ways for s in pass_timeline(ALGORITHMS[name], a.problem, way, a.topology).spans]
        assert says.count(" | ") + 1 == len(spans)
        for span in spans:
            if isinstance(span.event, ExchangeEvent) and span.event.to >= 0:
                assert f"{span.event.what}: {span.rank} -> {span.event.to}, {span.event.sent} bytes" in says


def test_of_many_ranks_some_are_drawn() -> None:
    (first, _) = pictures(attention_sections(many())[0].body)
    texts = ["".join(node.itertext()) for node in first.iter(f"{SVG}text")]
    assert f"rank {MOST_RANKS - 1}" in texts and f"rank {MOST_RANKS}" not in texts
    assert any("the first 8, each simulated alone" in text for text in texts)


def test_decisions_are_listed() -> None:
    rows = plan_rows(hybrid().plan)
    assert ("attention attention_default", "cp: hybrid, backward hybrid", "asked for") in rows
    assert any(row[:2] == ("stream from attention_default.q", "cp:S(2;1,-1)") for row in rows)
