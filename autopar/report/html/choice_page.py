"""A page about a chosen layout: time by cause, memory of each stage against the chip, candidates, neighbours.

It takes what `autopar plan --auto --json` prints.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.report.html.page import Page, Section, render, table

SHOWN = 12  # rows of a table
WIDTH, HEIGHT, LEFT, BOTTOM = 900, 340, 70, 40  # of the map, in units of its view box


def choice_page(choice: Mapping[str, Any], title: str) -> str:
    """The page as one HTML text."""
    options = ", ".join(f"{name}={value}" for name, value in choice["options"].items())
    mesh = ",".join(f"{axis}={size}" for axis, size in choice["mesh"].items())
    summary = [
        ("mesh", mesh), ("options", options or "as by default"), ("GPUs", f"{choice['ranks']:,} ({choice['cluster']})"),
        ("batch", f"{choice['batch']:,} x {choice['seq']:,}"),
        ("step", f"{_s(choice['seconds'])} ({_s(choice['low'])} to {_s(choice['high'])})"),
        ("MFU", f"{choice['mfu']:.1%}"),
        ("memory", f"{_gb(max(choice['memory']))} of {_gb(choice['limit'])}"), ("stack", choice["stack"]),
    ]  # fmt: skip
    sections = [
        Section("Time by cause", _causes(choice["causes"])),
        Section("Memory of each stage", _memory(choice["memory"], choice["limit"])),
        Section("Candidates", _map(choice)),
        *([Section("What if", _what_if(choice["sliders"]))] if choice.get("sliders") else []),
        Section("One value changed", _neighbours(choice["neighbours"])),
        Section("What limits", _sentences([*choice["limits"], *choice["remarks"]])),
        Section("What was pruned", _sentences(choice["pruned"])),
        Section("To run it", f"<pre>{html.escape(choice['command'])}</pre>"),
    ]
    return render(Page(title, summary, model=sections))


def _s(value: float) -> str:
    return f"{value:,.3g} s" if value >= 1 else f"{1e3 * value:,.3g} ms"


def _gb(value: float) -> str:
    return f"{value / 1e9:,.1f} GB"


def _causes(causes: Sequence[Mapping[str, Any]]) -> str:
    """A bar per cause: the exposed part dark, the hidden one light."""
    longest = max((c["seconds"] for c in causes), default=0.0) or 1.0
    lines = "".join(
        _bar(
            c["name"] if c["axis"] in ("", c["name"]) else f"{c['name']} ({c['axis']})",
            [(c["exposed"] / longest, "1"), ((c["seconds"] - c["exposed"]) / longest, ".3")],
            _s(c["exposed"]),
        )
        for c in sorted(causes, key=lambda c: -c["exposed"])
    )
    return f"<div class=bars>{lines}</div><p class=muted>Dark: adds to the step. Light: hidden behind computation.</p>"


def _memory(memory: Sequence[float], limit: float) -> str:
    lines = "".join(
        _bar(f"stage {stage}", [(min(1.0, size / limit), "1")], _gb(size)) for stage, size in enumerate(memory)
    )
    return f"<div class=bars>{lines}</div><p class=muted>Full width: {_gb(limit)}, the memory of a chip.</p>"


def _bar(name: str, parts: Sequence[tuple[float, str]], value: str) -> str:
    fill = "".join(f"<b style='width:{100 * share:.2f}%;opacity:{dark}'></b>" for share, dark in parts)
    return (
        f"<div class=bar><span>{html.escape(name)}</span><i style='display:flex'>{fill}</i>"
        f"<span class=num>{value}</span></div>"
    )


def _map(choice: Mapping[str, Any]) -> str:
    """Candidates as time over memory, those that do not fit to the right of the line, with the band of equal times."""
    rows = choice["candidates"]
    longest, largest = (
        max(r["seconds"] for r in rows) * 1.05,
        max(max(r["memory"] for r in rows), choice["limit"]) * 1.05,
    )
    least = min(r["seconds"] for r in rows) * 0.95

    def x(memory: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * memory / largest

    def y(time: float) -> float:
        return 10 + (HEIGHT - BOTTOM - 10) * (longest - time) / (longest - least)

    best = min((r["seconds"] for r in rows if r["fits"]), default=least)
    top = y(best * (1 + choice["band"]))
    parts = [
        f'<rect x="{LEFT}" y="{top:.1f}" width="{WIDTH - LEFT - 10}" height="{y(best) - top:.1f}" '
        'fill="var(--ins-back)"/>',
        f'<line x1="{x(choice["limit"]):.1f}" x2="{x(choice["limit"]):.1f}" y1="10" y2="{HEIGHT - BOTTOM}" '
        'stroke="var(--del)" stroke-dasharray="4"/>',
    ]
    for row in rows:
        chosen = row["seconds"] == choice["seconds"] and row["memory"] == max(choice["memory"])
        color = "var(--accent)" if row["fits"] else "var(--muted)"
        tip = html.escape(f"{row['name']}: {_s(row['seconds'])}, {_gb(row['memory'])}")
        parts.append(
            f'<circle cx="{x(row["memory"]):.1f}" cy="{y(row["seconds"]):.1f}" r="{7 if chosen else 3.5}" '
            f'fill="{color}" fill-opacity="{1 if chosen else 0.6}"><title>{tip}</title></circle>'
        )
    parts += [
        _text(x(choice["limit"]) - 6, 22, f"chip: {_gb(choice['limit'])}", "end"),
        _text(LEFT, HEIGHT - 12, f"memory of the fullest rank, up to {_gb(largest)}", "start"),
        _text(LEFT - 8, 20, _s(longest), "end"), _text(LEFT - 8, HEIGHT - BOTTOM, _s(least), "end"),
    ]  # fmt: skip
    body = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="candidates">{"".join(parts)}</svg>'
    hint = "Time of a step over memory. Green: within the band of the fastest that fits; the large dot is the choice."
    near = [(r["name"], _s(r["seconds"]), _gb(r["memory"])) for r in choice["close"][:SHOWN]]
    return f"{body}<p class=muted>{hint}</p>{table(('within the band', 'time', 'memory'), near, numeric=(1, 2))}"


def _text(x: float, y: float, words: str, anchor: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} font-size="12" fill="var(--muted)">{html.escape(words)}</text>'


def _what_if(sliders: Mapping[str, Any]) -> str:
    """Sliders, and the price that the page computes from them."""
    data = {name: value for name, value in sliders.items() if name != "gpus"}
    data["gpus"] = [{"ranks": one["ranks"], "rows": one["rows"]} for one in sliders["gpus"]]
    prices = ",".join(one["price"] for one in sliders["gpus"])
    inputs = "".join(
        f"<div class=bar><label for=s-{name}>{words}</label><input type=range id=s-{name} style='flex:1'>"
        f"<output class=num id=o-{name}></output></div>"
        for name, words in (
            ("gpus", "GPUs (dp)"), ("batch", "batch"), ("seq", "sequence"), ("inside", "links within a node"),
            ("card", "network cards"),
        )
    )  # fmt: skip
    bars = f"<div class=bars>{inputs}</div><p><b id=whatif></b></p>"
    hint = "The chosen options with other values, by the formulas of the price; the search is not repeated."
    code = SCRIPT.replace("DATA", json.dumps(data)).replace("PRICES", f"[{prices}]")
    return f"{bars}<p class=muted>{hint}</p><script>{code}</script>"


SCRIPT = """
(() => {
const d = DATA, prices = PRICES, $ = id => document.getElementById(id);
const set = (n, min, max, step, value) => Object.assign($('s-' + n), {min, max, step, value, oninput: show});
const say = (n, text) => { $('o-' + n).textContent = text; };
const time = s => s >= 1 ? s.toPrecision(3) + ' s' : (1e3 * s).toPrecision(3) + ' ms';
const gb = bytes => (bytes / 1e9).toFixed(1) + ' GB';
function show() {
  const k = +$('s-gpus').value, g = d.gpus[k], batch = +$('s-batch').value * g.rows, seq = +$('s-seq').value;
  const inside = 2 ** +$('s-inside').value, card = 2 ** +$('s-card').value;
  const [s, mfu, ...memory] = prices[k](batch, seq, inside, card), most = Math.max(...memory);
  const tokens = Math.round(batch * seq / s / g.ranks).toLocaleString('en');
  say('gpus', g.ranks); say('batch', batch); say('seq', seq);
  say('inside', 'x ' + inside.toPrecision(2)); say('card', 'x ' + card.toPrecision(2));
  $('whatif').textContent = time(s) + ' per step, MFU ' + (100 * mfu).toFixed(1) + '%, ' + tokens +
    ' tokens per second and GPU, ' + gb(most) + ' of ' + gb(d.limit) + (most > d.limit ? ': does not fit' : '');
}
const least = Math.ceil(d.least / d.step) * d.step, s = d.seq;
set('gpus', 0, d.gpus.length - 1, 1, d.gpus.findIndex(g => g.ranks === d.ranks));
set('batch', least, Math.max(8 * d.microbatches, least), d.step, d.microbatches);
set('seq', s[0], s[2], s[0] % 128 ? s[0] : 128, s[1]);
set('inside', -3, 3, .25, 0); set('card', -3, 3, .25, 0);
show();
})()
"""


def _neighbours(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = [
        (
            r["name"],
            _s(r["seconds"]) if "seconds" in r else "",
            _gb(r["memory"]) if "memory" in r else "",
            r["sentence"],
        )
        for r in rows
    ]
    return table(("value", "time", "memory", "what it changes"), shown, numeric=(1, 2))


def _sentences(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>"
