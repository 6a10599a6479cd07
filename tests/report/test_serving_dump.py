"""Dumps of a served model: the graphs that run, in the order in which they were made, and the report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cli.main import main
from tests.cli.test_cli import LLAMA
from tests.support.ranks import run_ranks


def texts(folder: Path, ending: str) -> dict[str, str]:
    """Name of a graph -> its file, in order."""
    files = sorted(folder.glob(f"[0-9]*{ending}"))
    return {file.name[4 : -len(ending)]: file.read_text() for file in files}


def dumped(folder: str, pp: int = 1) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    autopar.serve(model, autopar.init_mesh("cpu", pp=pp), max_length=64, cache="1MB", dump=folder).close()


def test_serve_writes_its_graphs_and_a_report(tmp_path: Path) -> None:
    run_ranks(1, dumped, str(tmp_path / "dump"))
    graphs = texts(tmp_path / "dump", ".txt")
    names = list(graphs)
    assert names[:2] == ["capture", "group_experts"] and names[-2:] == ["tables", "packed"]
    assert {"place_token_slices", "lower_to_local", "pack_tokens"} <= set(names)
    assert not {"tables", "packed"} & set(texts(tmp_path / "dump", ".diff")), "graphs that run follow no other"
    packed = graphs["packed"].splitlines()
    assert sum("autopar.cached_attention(" in line for line in packed) == 2
    assert any(line.startswith("slice_length: ") for line in packed) and packed[-1].endswith("# logits")
    assert "cos(" in graphs["tables"] and "cos(" not in graphs["packed"]
    page = (tmp_path / "dump" / "report.html").read_text()
    assert "Cache of keys and values" in page and all(
        f"{name}<" in page for name in ("pack_tokens", "tables", "packed")
    )
    assert "merge" in (tmp_path / "dump" / "timings.txt").read_text()


def test_one_rank_writes_the_graphs_of_all_stages(tmp_path: Path) -> None:
    run_ranks(2, dumped, str(tmp_path / "dump"), 2)
    assert [p.name for p in tmp_path.iterdir()] == ["dump"]
    assert list(texts(tmp_path / "dump", ".txt"))[-3::2] == ["part0.packed", "part1.packed"]
    assert "part1.packed<" in (tmp_path / "dump" / "report.html").read_text()


def test_stages_and_what_a_step_sends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = tmp_path / "config.json", tmp_path / "dump"
    config.write_text(json.dumps(LLAMA))
    words = ("plan", "--serve", "--config", config, "--mesh", "tp=2,pp=2", "--max-length", 64, "--dump", folder)
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    graphs = texts(folder, ".txt")
    assert list(graphs)[-4:] == ["part0.tables", "part0.packed", "part1.tables", "part1.packed"]
    sent, logits = (graphs[f"part{k}.packed"].splitlines()[-1] for k in range(2))
    names = re.fullmatch(r"return \((.*)\) +# (.*)", sent)
    assert names is not None and names[1] == names[2] and logits.endswith("# logits")
    rows = [line.split("  ") for line in (folder / "communication.txt").read_text().splitlines()[1:]]
    found = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    # 64 tokens of width 32 in bf16 are 4 KiB; a ring of 2 sends as much. Embedding, and two for each layer
    assert found == {
        "part0.packed, 64 tokens": ["tp", "all_reduce", "3", "12.0 KiB"],
        "part1.packed, 64 tokens": ["tp", "all_reduce", "2", "8.0 KiB"],
    }
