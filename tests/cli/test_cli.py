"""The command line: what it prints, as tables and as JSON, and what it says to bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from autopar.cli import plan_command
from autopar.cli.main import main
from autopar.ir.graph import compressed
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.report.schedule_summary import grid
from autopar.report.summary import show_summary
from autopar.report.tables import human_bytes, human_seconds
from autopar.schedule.request import SCHEDULES, Request
from autopar.schedule.simulate import simulate

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False,
}  # fmt: skip
BERT = {
    "model_type": "bert", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64,
    "num_hidden_layers": 1, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def plan(capsys: pytest.CaptureFixture[str], config: Path, *more: object) -> str:
    code, out, err = run(capsys, "plan", "--config", config, "--mesh", "dp=2,tp=2", "--seq", 16, *more)
    assert code == 0, err
    return out


def test_plan_as_json_says_everything(capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path) -> None:
    options = ("--batch", 8, "--zero", 3, "--sequence-parallel", "--microbatches", 2)
    found: dict[str, Any] = json.loads(plan(capsys, config, "--json", "--dump", tmp_path / "dump", *options))
    assert found["mesh"] == {"dp": 2, "tp": 2} and found["ranks"] == 4
    chosen = [found["options"][name] for name in ("zero", "sequence_parallel", "microbatches")]
    assert chosen == [3, True, 2]
    rows = {row["name"]: row for row in found["parameters"]}
    query = rows["model.layers.{0,1}.self_attn.q_proj.weight"]
    assert (query["count"], query["shape"], query["dtype"]) == (2, [32, 32], "bf16")
    assert query["bytes"] == 2 * 2 * 32 * 32 // 4
    assert query["axes"]["tp"] == {"stored": "S(0)", "used": "S(0)", "reason": "column: by heads"}
    assert (query["axes"]["dp"]["stored"], query["axes"]["dp"]["used"]) == ("S(0)", "R")
    assert sum(row["bytes"] for row in rows.values()) == found["memory"]["parameters"]
    assert found["memory"]["inputs"] == 2 * 8 * 4 * 16  # the whole batch is 8: 4 for each dp rank, in 2 microbatches
    assert found["memory"]["accumulated"] > 0
    assert found["streams"][0]["node"] == "embedding"
    kinds = {(row["axis"], row["kind"]) for row in found["communication"]}
    assert {("dp", "all_gather"), ("dp", "reduce_scatter"), ("tp", "all_gather"), ("tp", "reduce_scatter")} <= kinds
    assert found["runs"]["forward"]["times"] == 2
    assert {"plan.json", "report.html"} <= {p.name for p in (tmp_path / "dump").iterdir()}


def test_plan_as_tables_shows_the_same_numbers(
    capsys: pytest.CaptureFixture[str], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary, made = plan_command._summary, list[dict[str, Any]]()

    def once(*args: Any) -> dict[str, Any]:
        made.extend([] if made else [summary(*args)])
        return made[0]

    monkeypatch.setattr(plan_command, "_summary", once)
    found, text = json.loads(plan(capsys, config, "--json")), plan(capsys, config)
    for row in found["parameters"]:
        assert row["name"] in text
    for line in ("S(0)", "column: by heads", "its result is partial", "input input_ids"):
        assert line in text
    for name in ("parameters", "gradients", "optimizer", "saved", "peak"):
        assert human_bytes(found["memory"][name]) in text
    sums = next(row for row in found["communication"] if (row["axis"], row["kind"]) == ("tp", "all_reduce"))
    assert f"{sums['calls']} │" in text and human_bytes(sums["bytes"]) in text
    assert "LlamaForCausalLM (bfloat16), input_ids [2, 16]" in text  # one example per dp rank when none is asked for


@pytest.mark.parametrize(
    ("level", "line"),
    [
        ("global", "model.layers.0.self_attn.q_proj"),
        ("typed", "convert("),
        ("local", "exchange("),
        ("forward", "autopar.all_reduce("),
        ("backward", "autopar.attention_backward("),
    ],
)
def test_show_prints_one_level(capsys: pytest.CaptureFixture[str], config: Path, level: str, line: str) -> None:
    code, out, _ = run(capsys, "show", "--config", config, "--mesh", "tp=2", "--seq", 16, "--level", level)
    assert code == 0
    assert line in out and out.splitlines()[-1].startswith("return (")


PIPELINE = ("--mesh", "pp=2,dp=2", "--seq", 16, "--microbatches", 4, "--schedule", "1f1b", "--zero", 1)


def test_plan_of_a_pipeline(capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path) -> None:
    more = ("--split-points", "model.layers.1", "--memory-limit", "1e9", "--json", "--dump", tmp_path)
    code, out, err = run(capsys, "plan", "--config", config, *PIPELINE, *more)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    assert (found["options"]["split_points"], found["options"]["memory_limit"]) == (["model.layers.1"], 10**9)
    pipeline = found["pipeline"]
    assert (pipeline["schedule"], pipeline["microbatches"], pipeline["token_slices"]) == ("1f1b", 4, [])
    assert [part["modules"] for part in pipeline["parts"]] == [
        "model.embed_tokens, model.layers.0",
        "model.layers.1, model.norm, lm_head",
    ]
    assert sum(part["parameters"] for part in pipeline["parts"]) == found["elements"]
    assert sum(part["time"] for part in pipeline["parts"]) == pytest.approx(1)
    ranks = pipeline["ranks"]
    assert [rank["live"] for rank in ranks] == [2, 1] and [rank["parts"] for rank in ranks] == [[0], [1]]
    assert all(rank["busy"] + rank["idle"] == pytest.approx(pipeline["makespan"]) for rank in ranks)
    assert pipeline["idle"] == pytest.approx(pipeline["bubble"] * pipeline["step"])
    assert 0 < pipeline["idle_if_equal"] < pipeline["idle"]  # of stages that are not equal, with transfers
    assert sum(rank["parameters"] for rank in ranks) == sum(row["bytes"] for row in found["parameters"])
    assert found["memory"]["peak"] == max(rank["peak"] for rank in ranks) == ranks[pipeline["fullest"]]["peak"]
    kinds = {(row["axis"], row["kind"]): row["calls"] for row in found["communication"]}
    assert kinds["pp", "send"] == 4 and kinds["dp", "reduce_scatter"] == 1
    assert found["runs"]["part1.gather"]["times"] == 1 and found["runs"]["part0.backward"]["times"] == 4
    names = {p.name for p in tmp_path.iterdir()}
    assert {"order.txt", "trace.json", "report.html"} <= names and any("part1.backward_weight" in n for n in names)
    assert len((tmp_path / "order.txt").read_text().splitlines()) == 2
    console = Console(width=160, highlight=False)
    with console.capture() as text:
        show_summary(found, console)
    for line in (
        "split points model.layers.1: the user's choice",
        "model.layers.1, model.norm, lm_head",
        "Ranks of pp",
        f"(p - 1)*(F + B + W) = {human_seconds(pipeline['idle_if_equal'])}",
    ):
        assert line in text.get()
    assert f"rank {pipeline['busiest']} of pp" in text.get()


def test_show_prints_a_graph_of_a_part(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    code, out, _ = run(capsys, "show", "--config", config, *PIPELINE, "--part", 1, "--level", "gather")
    assert code == 0 and "all_gather over dp" in out and "p_lm_head_weight" in out and "p_embed" not in out
    code, out, err = run(capsys, "show", "--config", config, *PIPELINE[:-2], "--level", "gather")
    assert code == 2 and not out and "show: there is no part0.gather graph; this stage uses its parameters as" in err
    for options, message in (
        (["--mesh", "pp=2", "--part", 1, "--level", "local"], "--part: needs one of the levels part, gather"),
        (["--mesh", "tp=2", "--part", 1, "--level", "forward"], "--part: needs a mesh with an axis pp, found tp=2"),
        (["--mesh", "tp=2", "--level", "reduce"], "--level reduce: needs a mesh with an axis pp"),
    ):
        code, out, err = run(capsys, "show", "--config", config, *options)
        assert code == 2 and not out and message in err


# --- sharded sequences ----------------------------------------------------------------------------------------

CONTEXT = ("--mesh", "cp=4,tp=2", "--seq", 64, "--topology", "cp=ring:50e9:5e-6")


def test_plan_of_a_cut_sequence(capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path) -> None:
    options = ("--attention", "zigzag_ring+token_ring", "--json", "--dump", tmp_path / "dump")
    code, out, err = run(capsys, "plan", "--config", config, *CONTEXT, *options)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    assert found["mesh"] == {"cp": 4, "tp": 2} and found["ranks"] == 8
    (entry,) = found["attention"]
    assert (entry["modules"], entry["count"]) == ("model.layers.{0,1}.self_attn", 2)
    assert entry["layout"] == "zigzag" and found["streams"][0]["placement"] == "cp:S(2;1,-1)"
    assert [row["algorithm"] for row in entry["passes"]] == ["zigzag_ring", "token_ring"]
    sent = {row["kind"]: row["bytes"] for row in found["communication"] if row["axis"] == "cp"}
    ways = {way for row in entry["passes"] for way in row["sent"]}
    assert {kind for kind in sent if kind.startswith("send")} == {f"send {way}" for way in ways}
    for way in ways:
        assert sent[f"send {way}"] == 2 * sum(row["sent"].get(way, 0) for row in entry["passes"])
    console = Console(width=160, highlight=False)
    with console.capture() as text:
        show_summary(found, console)
    for line in ("Attention over cp", "model.layers.{0,1}.self_attn", "zigzag_ring+token_ring", "--json, or"):
        assert line in text.get()
    for kind in sent:
        assert re.search(rf"│ cp   │ {kind} +│ .* {re.escape(human_bytes(sent[kind]))} │", text.get()), kind
    assert 'id="attention-over-cp"' in (tmp_path / "dump" / "report.html").read_text()


def test_show_prints_attention_over_ranks(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    options = ("--attention", "bi_ring+token_ring", "--cp-load-balance", "zigzag", "--level", "local")
    code, out, err = run(capsys, "show", "--config", config, *CONTEXT, *options)
    assert code == 0, err
    lines = [line for line in out.splitlines() if "attention_of_piece(" in line]
    assert len(lines) == 2 and all("'bi_ring', 'token_ring', [1, -1], [1, -1], 'cp', 4" in line for line in lines)
    assert re.search(r"# send up \S+ \w+, send down \S+ \w+ over cp; model.layers.0.self_attn$", lines[0])


BAD: list[tuple[str, list[object], str]] = [
    ("axis", ["--mesh", "dq=2"], "unknown axis 'dq'; the axes are"),
    ("mesh", ["--mesh", "two"], "expected name=size pairs"),
    ("unplanned axis", ["--mesh", "mb=2,tp=2"], "nothing is sharded on axis 'mb', found mb=2; the axes are pp"),
    ("no experts", ["--mesh", "ep=2"], "experts: nothing to shard on axis 'ep' of size 2: the model has no experts"),
    ("schedule", ["--mesh", "pp=2", "--schedule", "1f2b"], "--schedule: expected one of gpipe, 1f1b"),
    ("schedule without pp", ["--mesh", "tp=2", "--schedule", "1f1b"], "schedule: needs a mesh axis pp, found"),
    (
        "split_points",
        ["--mesh", "pp=2", "--schedule", "1f1b", "--split-points", "model.layers.9"],
        "no operation belongs to",
    ),
    (
        "token_slices",
        ["--mesh", "pp=2", "--token-slices", "8,x"],
        "--token-slices: expected a whole number of at least 0, found '8,x'",
    ),
    (
        "memory limit",
        ["--mesh", "pp=2", "--memory-limit", "all"],
        "--memory-limit: expected a number of bytes, such as 80e9",
    ),
    ("batch", ["--mesh", "dp=3", "--batch", 4], "does not divide into 3 pieces"),
    ("dtype", ["--mesh", "tp=2", "--dtype", "int3"], "--dtype: expected 'bfloat16', 'float16'"),
    ("zero", ["--mesh", "tp=2", "--zero", 4], "--zero: expected 0, 1, 2 or 3, found '4'"),
    ("number", ["--mesh", "tp=2", "--batch", 0], "expected a positive whole number"),
    ("no mesh", [], "--mesh"),
    ("unknown option", ["--mesh", "tp=2", "--steps", 3], "unrecognized arguments: --steps 3"),
]


@pytest.mark.parametrize(("options", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_options(capsys: pytest.CaptureFixture[str], config: Path, options: list[object], message: str) -> None:
    code, out, err = run(capsys, "plan", "--config", config, "--seq", 16, *options)
    assert code == 2 and not out
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no file"),
        ("{", "is not JSON"),
        ("[1]", "has no model_type"),
        ('{"vocab_size": 3}', "has no model_type"),
        ('{"model_type": "lama"}', "no model_type 'lama'"),
        (json.dumps(BERT), "bert has 32 positions (max_position_embeddings), found a length of 64"),
    ],
)
def test_bad_configs(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    code, out, err = run(capsys, "plan", "--config", path, "--mesh", "tp=2", "--seq", 64)
    assert code == 2 and not out
    assert message in err and len(err.strip().splitlines()) == 1


def test_the_kind_of_model_follows_from_the_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    code, out, _ = run(
        capsys, "plan", "--config", tmp_path, "--mesh", "tp=2", "--seq", 32, "--dtype", "float32", "--json"
    )
    assert code == 0
    assert json.loads(out)["model"] == "BertForMaskedLM (float32), input_ids [1, 32], labels [1, 32]"


def test_verify_and_demo_hand_over(
    capsys: pytest.CaptureFixture[str], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    for name, function in (("verify_run", "verify_config"), ("demo", "run_demo")):
        module = ModuleType(f"autopar.cli.{name}")
        setattr(module, function, lambda *args, **facts: calls.append((args, facts)) or 1)  # type: ignore[func-returns-value]
        monkeypatch.setitem(sys.modules, f"autopar.cli.{name}", module)
    code, _, _ = run(capsys, "verify", "--config", config, "--mesh", "dp=2,tp=2", "--zero", 3)
    assert code == 1  # a mismatch
    assert run(capsys, "demo", "--steps", 3)[0] == 1
    assert calls[1] == ((3, "dp=2,tp=2", 3, Path("demo_output")), {})
    (model, mesh, options), facts = calls[0]
    assert (model.model_type, mesh, options) == ("llama", Mesh.of(dp=2, tp=2), Options(zero=3))
    assert facts == {"seq": 16, "batch": 4, "dtype": torch.float64}


def test_names_of_repeated_layers_are_joined() -> None:
    assert compressed(["a.w"]) == "a.w"
    assert compressed(["a.0.w", "a.1.w"]) == "a.{0,1}.w"
    assert compressed(["a.0.w", "a.1.w", "a.2.w", "a.5.w"]) == "a.{0..2,5}.w"
    assert compressed([f"a.{i}.e.{j}.w" for i in range(2) for j in range(4)]) == "a.{0,1}.e.{0..3}.w"
    assert compressed(["a.0.e.0", "a.1.e.1"]) == "a.{0,1}.e.{0,1} (2 of 4)"


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "plan", "--help"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0
    assert "examples per step, over all ranks" in " ".join(done.stdout.split())


# --- schedules ----------------------------------------------------------------------------------------------

TIMES = "F=18.522,B=18.086,W=9.337,comm=0.601"  # 1.5B, 24 microbatches: table 9 of Zero Bubble (Qi et al. 2024)


def schedule(capsys: pytest.CaptureFixture[str], *more: object) -> str:
    code, out, err = run(capsys, "schedule", *more)
    assert code == 0 and not err, err
    return out


@pytest.mark.parametrize(("name", "bubble"), [("1f1b", 0.2431), ("zb_h1", 0.1585), ("zb_h2", 0.1083)])
def test_schedules_have_the_bubbles_of_the_paper(capsys: pytest.CaptureFixture[str], name: str, bubble: float) -> None:
    """Table 5 of Zero Bubble."""
    options = ("--name", name, "--stages", 8, "--microbatches", 24, "--times", TIMES, "--memory", "M_B=2,M_W=1")
    found = json.loads(schedule(capsys, *options, "--json"))
    assert found.keys() == {"makespan", "bubble", "peak", "order"}
    assert found["bubble"] == pytest.approx(bubble, abs=5e-5)
    assert len(found["peak"]) == len(found["order"]) == 8
    assert (
        found["peak"]
        == {
            "1f1b": [2 * (8 - i) for i in range(8)],
            "zb_h1": [2 * (8 - i) + i for i in range(8)],
            "zb_h2": [2 * (15 - 2 * i) + 2 * i for i in range(8)],
        }[name]
    )
    assert found["order"][7][:2] == (["7F0", "7BW0"] if name == "1f1b" else ["7F0", "7B0"])
    text = schedule(capsys, *options)
    assert f"bubble: {bubble:.2%}" in text and f"makespan: {found['makespan']:,.6g} ms" in text
    assert max(map(len, text.splitlines())) <= 160


def test_a_schedule_is_printed_drawn_and_traced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture, trace = tmp_path / "a.svg", tmp_path / "a.json"
    options = ("--stages", 3, "--microbatches", 5, "--virtual-stages", 2, "--svg", picture, "--trace", trace)
    text = schedule(capsys, "--name", "interleaved", *options)
    assert text.splitlines()[1].startswith("rank 0  0F0 0F1 0F2 ")
    assert "peak memory per rank: " in text and "makespan: 18" in text
    assert picture.read_text().startswith("<svg ") and "makespan 18" in picture.read_text()
    slices = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == 5 * 6 * 2 and max(e["ts"] + e["dur"] for e in slices) == pytest.approx(18e3)  # in ms


def test_all_schedules_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--name", "all", "--stages", 5, "--microbatches", 10)
    text = schedule(capsys, *options)
    found = json.loads(schedule(capsys, *options, "--json"))
    assert set(SCHEDULES) == set(found)
    for name, row in found.items():
        line = next(line for line in text.splitlines() if line.startswith(f"│ {name} "))
        if "refused" not in row:
            assert f"{row['makespan']:,.5g}" in line and f"{row['bubble']:.2%}" in line
    assert "refused" in found["dual_pipe"] and "refused" not in found["zb_h2"]
    assert "dual_pipe needs" in text
    limited = json.loads(schedule(capsys, *options, "--json", "--memory-limit", 5))
    fit = {name for name, row in limited.items() if "refused" not in row}
    assert fit >= {"1f1b", "zb_h1", "zb_v", "seq1f1b"} and not fit & {"gpipe", "interleaved", "zb_h2", "tera_pipe"}
    assert all(max(limited[name]["peak"]) <= 5 for name in fit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--name", "1f2b"], "schedule: unknown name '1f2b'; known are gpipe, 1f1b, "),
        (["--name", "gpipe", "--times", "F=fast"], "--times: F needs a number of 0 or more, found 'fast'"),
        (["--name", "gpipe", "--times", "F=1,F=2"], "--times: F is given twice"),
        (["--name", "gpipe", "--times", "F=0"], "--times: F needs a time above 0"),
        (["--name", "gpipe", "--times", "W=nan"], "--times: W needs a number"),
        (["--name", "gpipe", "--times", "X=1"], "--times: expected NAME=NUMBER of F, B, W, comm"),
        (["--name", "gpipe", "--memory", "M_F=1"], "--memory: expected NAME=NUMBER of M_B, M_W"),
        (["--name", "gpipe", "--microbatches", 0], "--microbatches: expected a positive whole number"),
        (["--name", "gpipe", "--stages", "x"], "--stages"),
        (["--name", "gpipe", "--virtual-stages", 2], "gpipe runs 1 parts per rank, found 2"),
        (["--name", "gpipe", "--token-slices", 4], "use tera_pipe"),
        (
            ["--name", "zb_h2", "--memory-limit", 6, "--memory", "M_B=2"],
            "needs a memory limit of 14 (rank 0), found 12",
        ),
        (["--name", "all", "--svg", "a.svg"], "need one schedule"),
        (["--name", "gpipe", "--svg", "/nowhere/a.svg"], "/nowhere/a.svg: cannot be written: No such file"),
        ([], "--name"),
    ],
)
def test_bad_schedule_options(capsys: pytest.CaptureFixture[str], options: list[object], message: str) -> None:
    code, out, err = run(capsys, "schedule", "--stages", 4, "--microbatches", 8, *options)
    assert code == 2 and not out
    assert message in err and len(err.strip().splitlines()) == 1


def test_a_terminal_gets_colours(capsys: pytest.CaptureFixture[str]) -> None:
    timeline = simulate(SCHEDULES["zb_h1"].make(Request(2, 3)))
    console = Console(force_terminal=True, color_system="truecolor", width=120)
    console.print(grid(timeline, 120))
    assert len(set(re.findall(r"48;2;\d+;\d+;\d+", capsys.readouterr().out))) == 3  # papers of F, B, W
