"""Command lines with something wrong: exit code 2 and one line, or what the command is for."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys

import pytest

from autopar.cli.main import main
from autopar.runtime.training.launch import LaunchError, _RankReport, _refusal
from tests.malformed.judge import NOISE

VALID = [
    "schedule --name 1f1b --stages 2 --microbatches 3 --times F=1,B=2,W=1,comm=0.1 --memory M_B=1 --json",
    "schedule --name zb_h1 --stages 3 --microbatches 4 --memory-limit 5 --unit us --json",
    "schedule --name interleaved --stages 2 --microbatches 2 --virtual-stages 2 --json",
    "schedule --name seq1f1b --stages 2 --microbatches 2 --token-slices 2 --json",
    "attention --ranks 2 --seq 64 --heads 4 --kv-heads 2 --head-dim 16 --topology ring:12e9:1e-6 --cp-load-balance "
    "zigzag",
    "attention --ranks 2 --seq 64 --heads 4 --head-dim 16 --attention ring+token_ring --dtype float32",
    "plan --config /nowhere/config.json --mesh dp=2,tp=2 --seq 16 --batch 4 --zero 3 --dtype float32",
    "show --config /nowhere/config.json --mesh pp=2 --level forward --part 1 --microbatches 2",
    "verify --config /nowhere/config.json --mesh dp=2 --token-slices 4,4 --split-points a,b",
]
BARE = """
    -1 0 1.5 nan inf -inf 1e999 x π ² ٣ 999999999999999999999999999999 None True [] {} = , + -- - --json dp=0 dp=2,dp=2
    ep=2 F=1,F=2 F=-1 ring+ +ring ring: ring:0 ring:nan ../.. %s pp=2,tp=2,cp=2 tp=²
"""
WORDS = (*BARE.split(), "", "a\nb", "\t", "\x1b[31m")
COUNT = 400


def broken(rng: random.Random) -> list[str]:
    words = rng.choice(VALID).split()
    for _ in range(rng.choice((1, 1, 2))):
        at, how = rng.randrange(len(words)), rng.choice(("replaced", "replaced", "missing", "extra", "twice"))
        if how == "replaced":
            values = [i for i, w in enumerate(words) if i and not w.startswith("--")]
            words[rng.choice(values) if values else at] = rng.choice(WORDS)
        elif how == "missing":
            del words[at]
        else:
            words.insert(at, rng.choice(WORDS) if how == "extra" else words[at])
    return words


def run(words: list[str]) -> tuple[object, str, str]:
    """(exit code, stdout, stderr)"""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: object = main(words)
        except SystemExit as stop:
            code = stop.code
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    return code, out.getvalue(), err.getvalue()


def problem(words: list[str]) -> str:
    code, out, err = run(words)
    if code == 2:
        text = err.strip()
        one_line = text.startswith("autopar") and len(text.splitlines()) == 1
        return "" if one_line and not out and not NOISE.search(text) and len(text) < 1500 else f"{err!r:.400}"
    if code == 0 and "--json" in words and "schedule" in words:
        facts = json.loads(out)
        return "" if "all" in words or (facts["makespan"] > 0 and 0 <= facts["bubble"] < 1) else f"gave {facts}"
    return "" if code == 0 and out else f"exit code {code}, {err!r:.300}"


def test_command_lines() -> None:
    rng = random.Random(0)
    lines = [broken(rng) for _ in range(COUNT)]
    found = {" ".join(words)[:200]: text for words in lines if (text := problem(words))}
    assert not found, "\n".join(f"{line}: {text}" for line, text in found.items())


def test_who_reads_nothing_or_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``autopar cache | head -1``, and Ctrl-C: no traceback."""
    read, write = os.pipe()
    os.close(read)
    found = subprocess.run([sys.executable, "-m", "autopar", "cache"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert found.returncode == 141 and found.stderr == ""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autopar.cli.cache_command.entry_folder", interrupted)
    assert run(["cache"]) == (130, "", "autopar: interrupted\n")


def test_what_all_ranks_refuse_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        words = "tensor_parallel: no weight can be sharded on axis 'tp' of size 3\nchoose another size"
        raise LaunchError("launch: rank 0 failed: ...\ntraceback of rank 0: ...", words)

    monkeypatch.setattr("autopar.cli.cache_command.entry_folder", refused)
    expected = "autopar: tensor_parallel: no weight can be sharded on axis 'tp' of size 3 choose another size\n"
    assert run(["cache"]) == (2, "", expected)


def test_what_one_rank_fails_of_is_no_refusal() -> None:
    same = {rank: _RankReport(error="ValueError: too long") for rank in range(2)}
    assert _refusal(same) == "too long"
    assert _refusal({**same, 2: _RankReport(error="rank 0 died", consequence=True)}) == "too long"
    assert _refusal({**same, 2: _RankReport(error="ValueError: too short")}) == ""
    assert _refusal({0: _RankReport(error="KeyError: 'boom'")}) == ""
