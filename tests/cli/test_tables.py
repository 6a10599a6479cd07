"""Tables on terminals of any width: no name and no number is broken, and no line is too long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from autopar.cli.main import main
from autopar.cli.show_command import _wrapped
from autopar.report.summary import show_side_by_side, show_summary
from autopar.report.tables import show_table, table_of

NAME = "model.layers.{0..3}.post_attention_layernorm.weight"
WHY = "gathered right before use, and its gradients are scattered"


def lines_of(width: int, show: Any) -> list[str]:
    console = Console(width=width, highlight=False, no_color=True)
    with console.capture() as text:
        show(console)
    return text.get().splitlines()


def placed() -> Table:
    table = table_of("Parameters", "parameter", "a shape", "bytes", "why", right=("bytes",))
    table.add_row(NAME, "bf16\\[64,64]", "8.0 KiB", WHY)
    return table


@pytest.mark.parametrize(("width", "kind"), [(200, "lines"), (94, "columns"), (80, "paragraphs"), (60, "paragraphs")])
def test_names_and_numbers_are_whole_at_any_width(width: int, kind: str) -> None:
    lines = lines_of(width, lambda console: show_table(console, placed()))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width and NAME in text and "bf16[64,64]" in text and "8.0 KiB" in text
    found = "lines" if "┃" in text else "paragraphs" if "shape bf16[64,64] · bytes 8.0 KiB" in text else "columns"
    assert found == kind and lines[0].rstrip() == "Parameters"
    assert " ".join(WHY.split()) in " ".join(text.replace("│", " ").split()) or kind != "paragraphs"


def summary(config: str, capsys: pytest.CaptureFixture[str], *meshes: str) -> Any:
    words = [word for mesh in meshes for word in ("--mesh", mesh)]
    assert main(["plan", "--config", config, "--seq", "16", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_plans_at_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    one = summary(str(tmp_path), capsys, "tp=2")
    lines = lines_of(80, lambda console: show_summary(one, console))
    assert max(map(len, lines)) <= 80 and any("self_attn.q_proj.weight" in line for line in lines)
    refused = {"model": one["model"], "mesh": {"tp": 3}, "refused": "4 heads [4] do not divide"}
    lines = lines_of(80, lambda console: show_side_by_side([one, refused], 2, 16, console))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80 and "fastest" in text and "of it weights" in text
    assert "tp=3: 4 heads [4] do not divide" in text


def test_graphs_on_a_narrow_terminal_go_on_indented() -> None:
    text = "a: bf16[4] = aten.add(x, y)                                  # model.layers.0\nb = a\n"
    assert _wrapped(text, 200) == text
    assert _wrapped(text, 40) == "a: bf16[4] = aten.add(x, y)  #\n        model.layers.0\nb = a\n"
